import json
from pathlib import Path

import msgspec
import numpy as np
import pytest

from coordinator.demo.baselines import LocalBaseline, count_rounds, run_baselines, run_choosing
from coordinator.demo.boards import choose_boards
from coordinator.demo.broker import open_broker
from coordinator.demo.processes import ProcessError
from coordinator.demo.run import (
    _make_coordinator_flags,
    find_installed_bundles,
    load_best_expert,
    partition_samples,
)
from coordinator.methods.catalogue import load_method_class, make_method
from coordinator.methods.settings import MethodSettings
from coordinator.simulation.rounds import run_rounds
from coordinator.simulation.settings import DemoSettings
from coordinator.store.records import Event
from fedge.commands.broker import LocalBroker, find_free_port
from fedge.errors import ConfigError, TransportError
from fedge.steps.sgd import Sgd
from fedge.tasks import load_task, read_device_data, read_labelled
from fedge.wire.streams import open_connection
from tests.support.simulation import digits


def test_a_device_gets_its_training_data_and_never_its_test_samples(tmp_path: Path) -> None:
    cameras = partition_samples(DemoSettings(out=tmp_path, devices=3, samples=200, sensitive=0.5))
    assert list(cameras.shares) == ["camera-0", "camera-1", "camera-2"]
    assert load_task(str(tmp_path / "task.json")) == cameras.task
    for device_id, share in cameras.shares.items():
        own = read_device_data(cameras.task, tmp_path / device_id / "data.npz", seed=0)
        assert (len(own.y_train), len(own.y_val)) == (len(share.y_train), len(share.y_val))
        assert own.sensitive.sum() == share.sensitive.sum() > 0
        with np.load(tmp_path / device_id / "data.npz") as stored:
            assert len(stored["y"]) == len(share.y_train) + len(share.y_val)
        with np.load(tmp_path / device_id / "test.npz") as test:
            assert list(test) == ["x"], "inference gets no labels"
            assert np.array_equal(test["x"], share.x_test)


def test_the_same_seed_deals_the_same_samples(tmp_path: Path) -> None:
    one = partition_samples(DemoSettings(out=tmp_path / "a", devices=3, samples=200, seed=5))
    two = partition_samples(DemoSettings(out=tmp_path / "b", devices=3, samples=200, seed=5))
    other = partition_samples(DemoSettings(out=tmp_path / "c", devices=3, samples=200, seed=6))
    assert all(np.array_equal(one.shares[i].y_test, two.shares[i].y_test) for i in one.shares)
    assert any(not np.array_equal(one.shares[i].y_test, other.shares[i].y_test) for i in one.shares)


def test_too_few_devices_for_a_masked_sum_are_refused_at_once(tmp_path: Path) -> None:
    settings = DemoSettings(out=tmp_path, devices=6, participation=0.5, method="fedavg", average="mean", masking=True)
    with pytest.raises(ConfigError, match="covers 5 to 10000 devices, and 3 train in a round"):
        partition_samples(settings)


def test_a_bundle_is_found_by_its_release(tmp_path: Path) -> None:
    settings = DemoSettings(out=tmp_path, devices=2, samples=100)
    cameras = partition_samples(settings)
    summary = {"installed": {}}
    for device_id in cameras.shares:
        for release in ("1", "2"):
            folder = tmp_path / device_id / "home" / "bundles" / release
            folder.mkdir(parents=True)
            (folder / "manifest.json").write_text(json.dumps([device_id, release]))
        summary["installed"][device_id] = {"release": 2}
    found = find_installed_bundles(settings, cameras, summary)
    assert found == {i: tmp_path / i / "home" / "bundles" / "2" for i in cameras.shares}


def test_a_device_without_a_bundle_is_an_error_with_its_log(tmp_path: Path) -> None:
    settings = DemoSettings(out=tmp_path, devices=2, samples=100)
    cameras = partition_samples(settings)
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "camera-0.log").write_text("event=order_failed out of memory")
    with pytest.raises(ProcessError, match=r"camera-0 ended without a bundle(.|\n)*out of memory"):
        find_installed_bundles(settings, cameras, {"installed": {}})


def test_the_method_and_its_options_reach_the_coordinator(tmp_path: Path) -> None:
    settings = DemoSettings(out=tmp_path, method="pm-moe", devices=2, samples=100)
    flags = _make_coordinator_flags(settings, {"base": "dbe", "guard": False})
    assert flags[:2] == ["--method", "pm-moe"]
    assert flags[-4:] == ["--option", "base=dbe", "--option", "guard=False"]


async def test_a_broker_of_the_users_own_is_only_named(broker: LocalBroker) -> None:
    own = f"{broker.host}:{broker.port}"
    async with open_broker(DemoSettings(out=Path(), broker=own)) as (address, name):
        assert address == name == own
    async with open_broker(DemoSettings(out=Path(), broker=own)):
        pass  # it is still there


async def test_a_broker_that_is_not_there_ends_the_demo_at_once() -> None:
    address = f"127.0.0.1:{find_free_port('127.0.0.1')}"
    with pytest.raises(TransportError, match=f"{address} cannot be reached: "):
        async with open_broker(DemoSettings(out=Path(), broker=address)):
            pass


async def test_a_wrong_address_is_refused() -> None:
    with pytest.raises(ConfigError):
        async with open_broker(DemoSettings(out=Path(), broker="broker.local:port")):
            pass


async def test_our_own_broker_runs_and_ends(tmp_path: Path) -> None:
    async with open_broker(DemoSettings(out=tmp_path)) as (address, name):
        host, port = address.split(":")
        async with open_connection(host, int(port)):
            assert name in {"mosquitto", "amqtt"}
    with pytest.raises(OSError, match=r"."):
        await open_connection(host, int(port)).__aenter__()


@pytest.mark.parametrize(
    ("method", "options", "wanted"),
    [("fedcoe", {}, True), ("fedcoe+ft", {}, True), ("fedepc", {"extractor": "server"}, True), ("fedepc", {}, False)],
)
def test_methods_whose_server_learns_get_labelled_samples_that_no_device_has(
    method: str, options: dict[str, str], wanted: bool, tmp_path: Path
) -> None:
    settings = DemoSettings(out=tmp_path, devices=3, samples=400, method=method)
    assert load_method_class(method).needs_server_data(options) is wanted
    cameras = partition_samples(settings, server_data=wanted)
    assert ("--server-data" in _make_coordinator_flags(settings, options)) is wanted
    n_samples = sum(len(s.y_train) + len(s.y_val) + len(s.y_test) for s in cameras.shares.values())
    assert n_samples == (380 if wanted else 400)
    if wanted:
        x, y = read_labelled(cameras.task, tmp_path / "server_data.npz")
        assert x.shape == (20, 1, 8, 8)
        assert set(y.tolist()) == set(range(10)), "evenly over the classes"


def test_baselines_train_as_much_as_the_method_and_where_it_has_no_rounds_as_its_budget_says(tmp_path: Path) -> None:
    settings = DemoSettings(out=tmp_path, devices=2, samples=100, rounds=8, participation=0.75)
    cameras = partition_samples(settings)
    assert count_rounds(settings, cameras, {"selection": {"camera-0": 3, "camera-1": 5}}) == {
        "camera-0": 3,
        "camera-1": 5,
    }
    assert count_rounds(settings, cameras, {"selection": {}}) == {"camera-0": 6, "camera-1": 6}


@pytest.mark.parametrize("base", ["fedper", "lg-fedavg", "fedrod", "dbe"])
async def test_of_a_pool_of_private_modules_the_devices_own_one_is_measured(base: str, tmp_path: Path) -> None:
    fleet, layout, first, _ = digits(tmp_path, n=3, limit=150)
    options = {"base": base, "guard": False}
    method = make_method("pm-moe", MethodSettings(rounds=2, sgd=Sgd(steps=5), options=options))
    state = await run_rounds(method, method.init(layout, first), fleet)
    for i, worker in fleet.workers.items():
        found = load_best_expert(worker.home / "bundles" / "1", layout)
        expected = worker.make_personal_model(fleet.get(method.get_model(state, i), layout))
        network, x = worker.network, worker.data.x_val
        np.testing.assert_allclose(network.compute_logits(found, x), network.compute_logits(expected, x), atol=1e-4)


async def test_alone_a_device_trains_as_many_rounds_as_it_did_in_the_federation(tmp_path: Path) -> None:
    fleet, layout, first, _ = digits(tmp_path, n=3, limit=150)
    trained = dict(zip(fleet.workers, (3, 0, 1), strict=True))
    method = LocalBaseline(MethodSettings(), trained)
    state = await run_rounds(method, method.init(layout, first), fleet)
    models = [load_best_expert(fleet.workers[i].home / "bundles" / "1", layout).params for i in state.installed]
    begun = fleet.get(first, layout).params
    assert [np.array_equal(model, begun) for model in models] == [False, True, False]


def test_the_baselines_are_those_of_the_seed(tmp_path: Path) -> None:
    settings = DemoSettings(out=tmp_path / "a", devices=4, samples=320, rounds=3, average="median")
    cameras = partition_samples(settings)
    told: list[str] = []
    one = run_baselines(settings, cameras, {"selection": dict.fromkeys(cameras.shares, 3)}, told.append)
    assert [found.method for found in one] == ["local", "fedavg", "fedavg+ft"]
    assert {line.split("  ")[0] for line in told} == {"local", "fedavg", "fedavg+ft"}
    assert [found.bundles for found in one] == [4, 4, 4]
    assert [[device.trained for device in found.devices] for found in one[1:]] == [[3] * 4] * 2
    again = msgspec.structs.replace(settings, out=tmp_path / "b")
    two = run_baselines(again, cameras, {"selection": dict.fromkeys(cameras.shares, 3)}, told.append)
    assert [found.devices for found in two] == [found.devices for found in one]


def test_ways_to_choose_run_by_the_times_that_the_devices_took(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All devices wait for the slowest. A device that never answered in time takes the median of all."""
    settings = DemoSettings(out=tmp_path, devices=3, samples=150, rounds=2, participation=0.3, method="fedavg")
    cameras = partition_samples(settings)
    took = {"camera-0": (1.0, 1.5, 40.0), "camera-1": (30.0, 30.0), "camera-2": ()}
    events = [
        Event(at=0.0, round=2, name="answer", device=i, fields={"label": label, "seconds": s})
        for i, seconds in took.items()
        for label, each in (("train", seconds), ("trial", (99.0,)))
        for s in each
    ]
    events.append(Event(at=0.0, round=1, name="answer", device="camera-2", fields={"label": "train", "seconds": 77.0}))
    monkeypatch.setattr("coordinator.demo.baselines.read_events", lambda _, name: events if name == "answer" else [])
    boards = choose_boards(cameras.shares, settings.seed)
    bandit, lot, everybody = run_choosing(settings, cameras, boards, {"selection": "ccmab"}, lambda _: None)
    assert everybody.curve[2].seconds == 2 * 30.0
    times = {"camera-0": 1.5, "camera-1": 30.0, "camera-2": 30.0}
    assert bandit.curve[2].seconds == sum(choice.asked * times[choice.id] for choice in bandit.choices) > 0
    assert not lot.choices
