"""The fleet of workers in this process."""

import numpy as np
import pytest

from coordinator.fleet.fleet import Answer, make_order
from coordinator.fleet.problems import Problem
from coordinator.fleet.simulated import clock, memory
from coordinator.fleet.simulated import fleet as simulated
from coordinator.fleet.simulated.devices import PI_4, Hardware, draw_mixed
from coordinator.fleet.simulated.fleet import GIVEN_UP_S, SimulatedFleet
from coordinator.methods.baselines.fedavg import FedAvg
from coordinator.methods.settings import MethodSettings
from coordinator.simulation.rounds import run_rounds
from edge_agent.device.device import CACHED_MODELS, Fetch
from edge_agent.device.worker import FinishedOrder, Worker
from edge_agent.learning.batched import execute_singly
from fedge.errors import FruitlessError, ProtocolError
from fedge.models.build import make_initial_model
from fedge.models.choice import with_network
from fedge.steps.contract import Action, Declined, Failed
from fedge.steps.descriptions.describe_labels import DescribeLabels, LabelsDescribed
from fedge.steps.descriptions.trial import Trial, Tried
from fedge.steps.sgd import Sgd
from fedge.steps.training.train import Start, Train, Trained
from fedge.system.stopping import Stop, never
from fedge.tasks import Partitioning, load_pool, make_device_data, partition_pool
from fedge.tensors import codecs, rounding
from fedge.tensors.layout import HEAD, Codec, Model, to_bytes, unflatten
from fedge.wire.messages import Order, Why
from tests.support.simulation import digits


def test_devices_are_all_workers_in_order_and_tell_what_may_be_shared(tmp_path) -> None:
    fleet, *_ = digits(tmp_path, n=3)
    devices = fleet.get_devices()
    assert [device.id for device in devices] == ["d00", "d01", "d02"]
    assert all(device.context is not None and device.n_samples == device.context.n_samples for device in devices)


async def test_answers_are_the_workers_and_their_updates_can_be_read(tmp_path) -> None:
    fleet, layout, first, _ = digits(tmp_path, n=3)
    order = Train(starts=(Start(model=first),), sgd=Sgd(steps=2), codec=Codec.FLOAT32)
    answers = await fleet.run("train", {"d02": order, "d00": order})
    assert list(answers) == ["d00", "d02"]
    for answer in answers.values():
        assert isinstance(answer.result, Trained)
        change = fleet.get(answer.result.update, layout)
        assert 0 < np.abs(change.params).max() < 1
    assert fleet.bytes_up == sum(answer.result.update.size_bytes for answer in answers.values())
    assert fleet.bytes_down == 2 * first.size_bytes
    again = await fleet.run("train", {"d00": order})
    assert again["d00"].result == answers["d00"].result


async def test_many_devices_are_at_work_in_lots_and_answer_as_if_they_were_not(tmp_path, monkeypatch) -> None:
    made, layout, *_ = digits(tmp_path, n=5)
    fleet = SimulatedFleet(made.task, layout, made.workers, seed=0, execute=execute_singly)
    first = fleet.put(unflatten(make_initial_model(made.task, 0)[1], layout))
    order = Train(starts=(Start(model=first),), sgd=Sgd(steps=2))
    at_once = await fleet.run("train", dict.fromkeys(fleet.workers, order))
    monkeypatch.setattr(simulated, "AT_ONCE", 2)
    assert await fleet.run("train", dict.fromkeys(fleet.workers, order)) == at_once
    assert list(at_once) == list(fleet.workers)


@pytest.mark.parametrize("model", ["mlp", "cnn"])  # side by side, and one after the other
async def test_a_round_is_the_same_to_the_last_bit_where_updates_do_not_fit_into_memory(
    tmp_path, monkeypatch, model
) -> None:
    async def models_after(in_memory: int) -> list[str]:
        monkeypatch.setattr(memory, "IN_MEMORY", in_memory)
        fleet, layout, first, _ = digits(tmp_path / str(in_memory), n=5, model=model)
        method = FedAvg(MethodSettings(rounds=2, sgd=Sgd(steps=2), codec=Codec.FLOAT32))
        found: list[str] = []
        await run_rounds(method, method.init(layout, first), fleet, lambda state: found.append(state.model.digest))
        return found

    assert await models_after(2**31) == await models_after(25_000) == await models_after(0)


async def test_what_is_frozen_is_downloaded_once(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    samples = load_pool("digits", limit=100)
    layout, model = make_initial_model(with_network(samples.spec, "cnn"), 0)
    (tmp_path / "w.safetensors").write_bytes(to_bytes(unflatten(model, layout)))
    task = with_network(samples.spec, "cnn", tmp_path / "w.safetensors", "head")
    layout, model = make_initial_model(task, 0)
    (share,) = partition_pool(samples, 1, Partitioning(partition="iid"), seed=0)
    fleet = SimulatedFleet(
        task, layout, {"d": Worker("d", task, make_device_data(task, share), tmp_path / "d")}, seed=0
    )
    refs = [fleet.put(unflatten(Model(model.params + k, model.buffers, model.counters), layout)) for k in range(3)]
    for k, ref in enumerate(refs):
        answers = await fleet.run(f"train-{k}", {"d": Train(starts=(Start(model=ref),), sgd=Sgd(steps=2))})
        assert isinstance(answers["d"].result, Trained)
        fleet.remove_others({own.digest for own in refs} | fleet.find_needed_blobs())
    assert fleet.bytes_down == 3 * refs[0].size_bytes + (tmp_path / "w.safetensors").stat().st_size
    assert refs[0].size_bytes < 4 * layout.n_params + 400


async def test_a_model_is_downloaded_once_while_it_is_among_those_that_a_device_used_last(tmp_path) -> None:
    fleet, layout, first, _ = digits(tmp_path, n=2)
    refs = [
        fleet.put(unflatten(make_initial_model(fleet.task, seed)[1], layout)) for seed in range(1, CACHED_MODELS + 4)
    ]
    for n_downloads, ref in enumerate(refs, 1):
        for _ in "again", "and again":
            await fleet.run("trial", {"d00": Trial(global_model=ref, expert=refs[0])})
            assert fleet.bytes_down == n_downloads * first.size_bytes
    await fleet.run("trial", {"d00": Trial(global_model=refs[2], expert=refs[-1])})
    assert fleet.bytes_down == len(refs) * first.size_bytes
    await fleet.run("trial", {"d00": Trial(global_model=refs[1], expert=refs[-1])})  # it was not used for longest
    assert fleet.bytes_down == (len(refs) + 1) * first.size_bytes


@pytest.mark.parametrize("codec_", list(Codec))
async def test_updates_are_those_that_devices_send_as_bytes(tmp_path, codec_) -> None:
    fleet, layout, first, _ = digits(tmp_path, n=2)
    order = Train(starts=(Start(model=first),), sgd=Sgd(steps=2), codec=codec_)
    alone = SimulatedFleet(fleet.task, layout, fleet.workers, seed=0, execute=execute_singly)
    alone.put(fleet.get_tensors(first))
    answers = await alone.run("train", {"d01": order})
    sent = make_order("simulation", 0, 0, "train", "d01", fleet.task.compute_fingerprint(), order, left_s=60.0)
    outcome = fleet.workers["d01"].execute(sent, alone.get_bytes)
    (data,) = outcome.blobs.values()
    device, update = codecs.decode(data, codec_, layout), answers["d01"].result.update
    np.testing.assert_array_equal(alone.get(update, layout).params, device.params)
    assert update.size_bytes == len(data) == alone.bytes_up
    assert codec_ is not Codec.FLOAT32 or alone.get_bytes(update) == data
    with pytest.raises(ProtocolError, match="layout"):
        alone.get(update, layout.select(HEAD))


@pytest.mark.parametrize("model", ["mlp", "cnn"])
def test_a_model_is_kept_as_its_bytes_would_be_and_cannot_be_changed(tmp_path, model) -> None:
    fleet, layout, first, _ = digits(tmp_path, n=1, limit=60, model=model)
    known = fleet.get(first, layout)
    own = Model(known.params + 1, known.buffers.copy(), known.counters.copy())
    ref = fleet.put_model(own, layout)
    assert ref == fleet.put(unflatten(own, layout))
    kept = fleet.get(fleet.put_model(own, layout), layout)
    for array in (own.params, own.buffers, own.counters, kept.params):
        with pytest.raises(ValueError, match="read-only"):
            array += 1
    with pytest.raises(rounding.NotFiniteError):
        fleet.put_model(Model(known.params * np.float32(np.inf), known.buffers, known.counters), layout)


async def test_tensors_that_nobody_needs_are_forgotten(tmp_path) -> None:
    fleet, layout, first, _ = digits(tmp_path, n=3)
    other = fleet.put({"v": np.zeros(3, np.float32)})
    np.testing.assert_array_equal(fleet.get_tensors(other)["v"], np.zeros(3))
    fleet.remove_others({first.digest})
    assert len(fleet.get(first, layout).params) == layout.n_params
    with pytest.raises(ProtocolError, match="unknown-blob"):
        fleet.get(other, layout)


async def test_a_run_goes_to_its_end_and_tells_of_each_round(tmp_path) -> None:
    fleet, layout, first, _ = digits(tmp_path, n=3)
    method = FedAvg(MethodSettings(rounds=2, sgd=Sgd(steps=2)))
    told: list[int] = []
    state = await run_rounds(method, method.init(layout, first), fleet, lambda state: told.append(state.round))
    assert method.is_done(state)
    assert told == [1, 2, 3]
    assert not any(isinstance(result, Declined) for result in state.installed.values())


# ------------------------------------------------------------------------------------------------- the simulated clock


def on(hardware, tmp_path, n=6, **rest):
    """A fleet of digits devices that are all of one class, its first model, and an order to train."""
    fleet, layout, first, _ = digits(tmp_path, n=n)
    own = dict.fromkeys(fleet.workers, hardware)
    timed = SimulatedFleet(fleet.task, layout, fleet.workers, seed=3, hardware=own, **rest)
    first = timed.put(fleet.get_tensors(first))
    return timed, first, Train(starts=(Start(model=first),), sgd=Sgd(steps=2), codec=Codec.FLOAT32)


async def test_without_hardware_nothing_takes_time(tmp_path) -> None:
    fleet, _, first, _ = digits(tmp_path, n=3)
    plain = SimulatedFleet(fleet.task, fleet._layout, fleet.workers, seed=0)
    order = Train(starts=(Start(model=plain.put(fleet.get_tensors(first))),), sgd=Sgd(steps=2))
    answers = await plain.run("train", dict.fromkeys(plain.workers, order))
    assert plain.seconds == 0
    assert all(answer.seconds == 0 and isinstance(answer.result, Trained) for answer in answers.values())
    assert all(device.context is None for device in plain.get_devices())


async def test_a_step_lasts_as_long_as_its_slowest_answer(tmp_path) -> None:
    fleet, first, order = on(Hardware(speed=0.5, up_mbit_s=1, down_mbit_s=2, latency_s=0.1, jitter=0.5), tmp_path)
    answers = await fleet.run("train", dict.fromkeys(fleet.workers, order))
    times = [answer.seconds for answer in answers.values()]
    assert fleet.seconds == max(times)
    assert len(set(times)) == 6
    d00, worker = answers["d00"], fleet.workers["d00"]
    n, m = worker.data.n_shared, len(worker.data.y_val)
    work = (4 * n + m + 3 * 2 * min(32, n)) * 2 * (64 * 32 + 32 * 10)
    expected = (
        0.1
        + 8e-6 * (first.size_bytes / 2 + d00.result.update.size_bytes)
        + work / (0.5 * clock.FLOPS) * clock.draw_noise(Hardware(jitter=0.5), clock.Occasion(3, 0, "train", "d00"))
    )
    assert d00.seconds == pytest.approx(expected)
    before = fleet.seconds
    again = await fleet.run("again", {"d01": order})
    assert fleet.seconds == before + again["d01"].seconds


async def test_devices_tell_the_rate_of_their_links_for_both_ways(tmp_path) -> None:
    fleet, _, _ = on(Hardware(cpu_ghz=1.0, up_mbit_s=20, down_mbit_s=30), tmp_path, n=1)
    fleet._hardware["d00"] = own = Hardware(cpu_ghz=1.0, up_mbit_s=20, down_mbit_s=30)
    (device,) = fleet.get_devices()
    assert device.context.link_mbit_s == own.link_mbit_s
    assert 2 * 12 / own.link_mbit_s == pytest.approx(12 / 20 + 12 / 30)
    assert Hardware().link_mbit_s is None


async def test_an_answer_after_the_deadline_is_none_and_costs_the_deadline(tmp_path) -> None:
    fleet, _, order = on(Hardware(latency_s=1.0), tmp_path, deadline_s=2.0)
    fleet._hardware["d02"] = Hardware(latency_s=2.5)
    fleet._hardware["d03"] = Hardware(latency_s=2.0)
    answers = await fleet.run("train", dict.fromkeys(fleet.workers, order))
    assert answers["d02"] == Answer("d02", None, 2.0)
    assert {i for i, answer in answers.items() if answer.result is None} == {"d02"}
    assert answers["d03"].seconds == 2.0
    assert fleet.seconds == 2.0


@pytest.mark.parametrize(("deadline_s", "cost"), [(5.0, 5.0), (None, GIVEN_UP_S)])
async def test_an_order_that_is_dropped_is_never_answered(tmp_path, deadline_s, cost) -> None:
    fleet, _, order = on(Hardware(), tmp_path, deadline_s=deadline_s)
    fleet._hardware["d01"] = Hardware(drops=1.0)
    answers = await fleet.run("train", dict.fromkeys(fleet.workers, order))
    assert answers["d01"] == Answer("d01", None, cost)
    assert sum(isinstance(answer.result, Trained) for answer in answers.values()) == 5
    assert fleet.seconds == cost


async def test_devices_come_and_go_and_one_that_is_away_answers_nothing(tmp_path) -> None:
    fleet, _, order = on(Hardware(stays=0.6, returns=0.6, cpu_ghz=1.0), tmp_path)
    seen = []
    for number in range(1, 12):
        fleet.round = number
        seen.append({device.id for device in fleet.get_devices()})
    assert len(set(map(frozenset, seen))) > 5
    for number in (5, 11, 2):  # asked for in any order
        fleet.round = number
        assert {device.id for device in fleet.get_devices()} == seen[number - 1]
        answers = await fleet.run("train", dict.fromkeys(fleet.workers, order))
        assert {i for i, answer in answers.items() if answer.result is not None} == seen[number - 1]


async def test_contexts_are_those_of_the_hardware(tmp_path) -> None:
    fleet, *_ = on(PI_4, tmp_path)
    fleet.round = 4
    (device, *_) = fleet.get_devices()
    assert device.context.cpu_ghz == 1.8
    assert device.context.free_ram_gb == 3.0
    assert device.context.n_samples == device.n_samples


async def test_the_same_seed_gives_the_same_run_and_another_one_does_not(tmp_path) -> None:
    async def history(seed: int) -> tuple[object, ...]:
        fleet, layout, first, _ = digits(tmp_path / str(seed), n=6)
        timed = SimulatedFleet(
            fleet.task, layout, fleet.workers, seed=seed, hardware=draw_mixed(fleet.workers, seed=seed), deadline_s=1.0
        )
        method = FedAvg(MethodSettings(rounds=4, sgd=Sgd(steps=2), seed=seed))
        state = await run_rounds(method, method.init(layout, timed.put(fleet.get_tensors(first))), timed)
        return state, timed.seconds, timed.bytes_up, timed.bytes_down

    assert await history(1) == await history(1)
    assert (await history(1))[1:] != (await history(2))[1:]


class Liar(Worker):
    """Answers every order with a result of another step."""

    def execute(self, order: Order, fetch: Fetch, *, stop: Stop = never, action: Action | None = None) -> FinishedOrder:
        del order, fetch, stop, action
        return FinishedOrder(Tried(delta=0.5))


async def test_a_result_that_does_not_answer_is_none_as_over_mqtt(tmp_path) -> None:
    fleet, *_ = digits(tmp_path, n=2)
    honest = fleet.workers["d00"]
    fleet.workers["d01"] = Liar("d01", honest.task, honest.data, tmp_path / "liar")
    answers = await fleet.run("labels", dict.fromkeys(("d00", "d01"), DescribeLabels()))
    assert isinstance(answers["d00"].result, LabelsDescribed)
    assert answers["d01"].result is None


async def test_a_traceback_is_logged_once_and_is_of_the_users_code_alone(tmp_path, caplog) -> None:
    fleet, layout, first, _ = digits(tmp_path, n=3, model="tests.support.networks:Tiring")
    method = FedAvg(MethodSettings(rounds=3, sgd=Sgd(steps=20)))
    with pytest.raises(FruitlessError, match="it is tired"):
        await run_rounds(method, method.init(layout, first), fleet)
    assert sum("Traceback" in line for line in caplog.text.splitlines()) == 1
    assert "During handling" not in caplog.text


class Failing(Worker):
    """Its steps raise what is no traceback: only a real agent logged it."""

    def execute(self, order: Order, fetch: Fetch, *, stop: Stop = never, action: Action | None = None) -> FinishedOrder:
        return FinishedOrder(Failed(why=Why.UNFIT, reason=f"a step of {order.label} cannot do this"))


async def test_a_failure_of_each_kind_is_logged_once_and_noted_for_each_device(tmp_path, caplog) -> None:
    made, layout, first, _ = digits(tmp_path, n=4)
    workers = {i: Failing(i, made.task, own.data, tmp_path / i) for i, own in made.workers.items()}
    fleet = SimulatedFleet(made.task, layout, workers, seed=0, execute=execute_singly)
    order = Train(starts=(Start(model=first),), sgd=Sgd(steps=2))
    for fleet.round in (1, 2):
        await fleet.run("train", dict.fromkeys(workers, order))
    await fleet.run("labels", dict.fromkeys(workers, DescribeLabels()))
    told = [line.getMessage() for line in caplog.records if "order_failed" in line.getMessage()]
    assert told == [
        "event=order_failed device=d00 round=1 label=train reason='a step of train cannot do this'",
        "event=order_failed device=d00 round=2 label=labels reason='a step of labels cannot do this'",
    ]
    assert set(fleet.problems.values()) == {Problem(round=2, reason="failed: a step of labels cannot do this")}
    assert fleet.problems.keys() == workers.keys()
