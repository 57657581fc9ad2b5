"""The durable loop, with devices that answer at once and a real broker between them."""

from __future__ import annotations

import asyncio
import contextlib
import json
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from coordinator.methods.baselines.fedavg import FedAvgState
from coordinator.methods.state import State, decode_state
from coordinator.service.beginning import resume
from coordinator.service.service import explain_spent, serve
from coordinator.service.settings import CoordinatorSettings
from coordinator.store.records import Device, Event, OrderStatus
from coordinator.store.requests import read_requests, request_action
from coordinator.store.store import Store
from coordinator.watch.state import read_summary
from coordinator.watch.words import describe_progress
from fedge.commands.broker import LocalBroker
from fedge.errors import ConfigError, FruitlessError, StoreError, TransportError
from fedge.steps.contract import Failed
from fedge.system.files import compute_digest
from fedge.tensors import codecs
from fedge.tensors.layout import Codec
from fedge.wire.messages import Health, Order, Phase, Why
from tests.support.device import IN_0_1, TASK, RawDevice
from tests.support.learners import LAYOUT, Learner, learners
from tests.support.waiting import until

WAIT_S = 300.0


pytestmark = pytest.mark.usefixtures("no_torch")


def settings(broker: LocalBroker | None, home: Path, **changes: Any) -> CoordinatorSettings:
    address = f"{broker.host}:{broker.port}" if broker else "localhost"
    values = {"rounds": 2, "devices": 2, "method": "fedavg", "seed": 3, "deadline_s": 30.0, "once": True, **changes}
    return CoordinatorSettings(broker=address, federation="f", home=home, task="unused", **values)


def quiet(event: str, fields: dict[str, Any]) -> None:
    """Observe nothing."""


def final(store: Store) -> State:
    saved = store.get_state()
    assert saved is not None
    return decode_state(saved, FedAvgState)


async def test_before_the_first_round_the_summary_says_why_a_device_does_not_take_part(
    mosquitto: LocalBroker, tmp_path: Path, store: Store
) -> None:
    """Nobody would look into the log for why nothing begins."""
    seen: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def observe(event: str, _: dict[str, Any]) -> None:
        if event == "problem":
            asyncio.get_running_loop().call_soon(seen.set_result, None)

    async with asyncio.timeout(WAIT_S), RawDevice(mosquitto, "cam1", tmp_path) as old:
        await old.say("status", IN_0_1, retain=True)
        serving = asyncio.create_task(serve(settings(mosquitto, tmp_path / "server"), TASK, store, observe))
        await seen
        summary = json.loads((tmp_path / "server" / "summary.json").read_bytes())
        serving.cancel()
        await asyncio.wait([serving])
    assert summary["problems"]["cam1"]["reason"].endswith("update fedge on cam1 to 0.2 or later")


async def test_a_federation_from_beginning_to_end(mosquitto: LocalBroker, tmp_path: Path, store: Store) -> None:
    events: list[tuple[str, dict[str, Any]]] = []
    async with contextlib.AsyncExitStack() as stack:
        async with asyncio.timeout(WAIT_S), asyncio.TaskGroup() as group:
            serving = group.create_task(
                serve(settings(mosquitto, tmp_path / "server"), TASK, store, lambda *event: events.append(event))
            )
            devices = await learners(stack, mosquitto, tmp_path)
        summary = serving.result()
        for device in devices:  # the last verdicts have left before the coordinator did
            for order in device.orders:
                assert (await device.ack(order.id)).accepted
            assert [o.step for o in device.orders] == ["train", "train", "install"]

    assert json.loads((tmp_path / "server" / "summary.json").read_bytes()) == json.loads(json.dumps(summary))
    assert (summary["round"], summary["done"], summary["selection"]) == (2, True, {"a": 2, "b": 2})
    assert sorted(summary["installed"]) == ["a", "b"]
    assert summary["bytes_up"] > 0 < summary["bytes_down"]
    assert summary["refused"] == {}
    assert summary["devices"] == {"a": "online", "b": "online"}
    assert len(summary["round_s"]) == 3
    assert summary["wall_s"] > 0
    assert [name for name, _ in events if name in {"round_begun", "round_done"}] == ["round_begun", "round_done"] * 3
    assert {e.status for n in (1, 2, 3) for e in store.get_entries(n)} == {OrderStatus.ACCEPTED}

    # w = 3 (the seed) + 2 rounds of (1 + 3) / 2, and of all tensors only that is left.
    state = final(store)
    w = codecs.decode(store.blobs.get(state.model.digest), Codec.FLOAT32, LAYOUT)
    np.testing.assert_allclose(w.params, 3 + 2 * 2, rtol=1e-5)
    assert list(store.blobs) == [state.model.digest]


async def test_stopped_in_mid_round_and_served_again(mosquitto: LocalBroker, tmp_path: Path, store: Store) -> None:
    """Every report is accepted once, each device does each order once, the end is that of an undisturbed run."""
    wanted = settings(mosquitto, tmp_path / "server")
    async with contextlib.AsyncExitStack() as stack, asyncio.timeout(WAIT_S):
        first = asyncio.create_task(serve(wanted, TASK, store, quiet))
        a, b = await learners(stack, mosquitto, tmp_path)
        b.held = frozenset({2})
        await b.order("train", count=2)
        await a.ack((await a.order("train", count=2)).id)
        first.cancel()
        await asyncio.wait([first])
        half = {e.order.device_id: e.status for e in store.get_entries(2)}
        assert half == {"a": OrderStatus.ACCEPTED, "b": OrderStatus.OPEN}
        digest = compute_digest(codecs.encode({"w": np.full(3, a.value, np.float32)}, Codec.INT8))
        (lost := store.blobs.get_path(digest)).rename(tmp_path / "lost")
        with pytest.raises(StoreError, match=f"lacks 1 of the tensors .*{digest}"):
            await serve(wanted, TASK, store, quiet)
        (tmp_path / "lost").rename(lost)
        b.held = frozenset()
        summary = await serve(wanted, TASK, store, quiet)
    assert summary["selection"] == {"a": 2, "b": 2}
    assert {e.status for n in (1, 2, 3) for e in store.get_entries(n)} == {OrderStatus.ACCEPTED}
    assert len(a.done) == len(b.done) == 3
    w = codecs.decode(store.blobs.get(final(store).model.digest), Codec.FLOAT32, LAYOUT)
    np.testing.assert_allclose(w.params, 3 + 2 * 2, rtol=1e-5)


async def test_a_federation_that_is_done_is_left_as_it_is(mosquitto: LocalBroker, tmp_path: Path, store: Store) -> None:
    wanted = settings(mosquitto, tmp_path / "server", rounds=0, devices=2)
    async with contextlib.AsyncExitStack() as stack, asyncio.timeout(WAIT_S), asyncio.TaskGroup() as group:
        group.create_task(serve(wanted, TASK, store, quiet))
        await learners(stack, mosquitto, tmp_path)
    before = store.get_state()
    events: list[tuple[str, dict[str, Any]]] = []
    nowhere = msgspec.structs.replace(wanted, broker="localhost:1")
    async with asyncio.timeout(WAIT_S):
        again = await serve(nowhere, TASK, store, lambda *event: events.append(event))
    assert again["done"]
    assert events == [("finished", {"rounds": 0, "bundles": 2})]
    assert store.get_state() == before


async def test_a_run_that_ended_goes_on_with_more_rounds_and_ends_again(
    mosquitto: LocalBroker, tmp_path: Path, store: Store
) -> None:
    wanted = settings(mosquitto, tmp_path / "server")
    async with contextlib.AsyncExitStack() as stack, asyncio.timeout(WAIT_S):
        first = asyncio.create_task(serve(wanted, TASK, store, quiet))
        devices = await learners(stack, mosquitto, tmp_path)
        assert (await first)["round"] == 2
        more = settings(mosquitto, tmp_path / "server", rounds=3)
        for _ in "goes on", "is done":
            summary = await serve(more, TASK, store, quiet)
            assert (summary["round"], summary["rounds"], summary["done"]) == (4, 4, True)
            assert summary["selection"] == {"a": 3, "b": 3}
            for device in devices:
                assert [o.step for o in device.orders] == ["train", "train", "install", "train", "install"]
        with pytest.raises(ConfigError, match="rounds was 3, is 2"):
            await serve(wanted, TASK, store, quiet)
    assert [line.round for line in final(store).history] == [1, 2, 4]
    w = codecs.decode(store.blobs.get(final(store).model.digest), Codec.FLOAT32, LAYOUT)
    np.testing.assert_allclose(w.params, 3 + 3 * 2, rtol=1e-5)


async def test_a_broker_that_refuses_us_ends_it(mosquitto_program: str, tmp_path: Path, store: Store) -> None:
    """Mosquitto with a password file and no password given."""
    from fedge.commands.broker import find_free_port

    port = find_free_port("127.0.0.1")
    config = tmp_path / "mosquitto.conf"
    config.write_text(f"listener {port} 127.0.0.1\nallow_anonymous false\n")
    process = await asyncio.create_subprocess_exec(
        mosquitto_program, "-c", str(config), stderr=asyncio.subprocess.DEVNULL
    )
    try:
        wanted = msgspec.structs.replace(settings(None, tmp_path), broker=f"127.0.0.1:{port}")
        with pytest.raises(TransportError, match="Not authorized"):
            async with asyncio.timeout(WAIT_S):
                await serve(wanted, TASK, store, quiet)
    finally:
        process.terminate()
        await process.wait()


class Failing(Learner):
    """Fails each order."""

    async def _answer(self, order: Order) -> None:
        await self.report(order, Failed(why=Why.ERROR, reason="its own business"))


async def test_a_run_in_which_no_update_came_ends_before_anything_is_installed(
    mosquitto: LocalBroker, tmp_path: Path, store: Store
) -> None:
    """Started again, it says the same at once, and that more rounds go on; they do."""
    wanted = settings(mosquitto, tmp_path / "server", devices=1)
    async with Failing(mosquitto, "cam1", tmp_path) as device, asyncio.timeout(WAIT_S):
        await device.appear("2", task=TASK)
        with pytest.raises(FruitlessError, match=r"none of 2 orders to train brought an update.*its own") as caught:
            await serve(wanted, TASK, store, quiet)
        assert {order.step for order in device.orders} == {"train"}
    kept = read_summary(tmp_path / "server")
    assert kept["failed"] == str(caught.value)
    assert describe_progress(kept).startswith("failed: nothing was learned in 2 rounds")
    with pytest.raises(FruitlessError) as again:
        await serve(wanted, TASK, store, quiet)
    assert str(again.value) == (
        f"{caught.value}; to go on with this federation, start it with more rounds than 2 (--rounds)"
    )
    longer = settings(None, tmp_path / "server", devices=1, rounds=3)
    assert resume(longer, TASK, store, {})[0].last == 3


async def test_a_coordinator_stays_after_the_last_round_and_watches(
    mosquitto: LocalBroker, tmp_path: Path, store: Store
) -> None:
    """What devices say of themselves is shown; a retired device and a start without anything to do change nothing."""
    home = tmp_path / "server"
    wanted = settings(mosquitto, home, once=False)
    events: list[str] = []
    async with contextlib.AsyncExitStack() as stack, asyncio.timeout(WAIT_S):
        serving = asyncio.create_task(serve(wanted, TASK, store, lambda event, _: events.append(event)))
        a, b = await learners(stack, mosquitto, tmp_path)
        await until(lambda: "resting" in events)
        assert not serving.done()
        summary = read_summary(home)
        assert (summary["done"], summary["coordinator"]["state"]) == (True, "running")
        await a.say("health", Health(device_id="a", release=1, phase=Phase.SERVING, at=0.0, drift=True))
        await until(lambda: (read_summary(home)["fleet"]["a"]["health"] or {}).get("drift"))
        request_action(store, "retire", "b")
        await until(lambda: read_summary(home)["retired"] == ["b"])
        serving.cancel()
        await asyncio.wait([serving])
        before = store.get_state()
        again = asyncio.create_task(serve(wanted, TASK, store, lambda event, _: events.append(event)))
        await until(lambda: events.count("resting") == 2)
        assert store.get_state() == before
        assert len(a.done) == len(b.done) == 3
        again.cancel()
        await asyncio.wait([again])
    assert not read_summary(home)["ended"]
    ended = await serve(settings(mosquitto, home), TASK, store, quiet)
    assert ended["ended"]


async def test_training_is_ended_early_with_bundles(mosquitto: LocalBroker, tmp_path: Path, store: Store) -> None:
    """The round under way is finished, also if the coordinator is stopped right then; more rounds go on from there."""
    wanted = settings(mosquitto, tmp_path / "server", rounds=50)
    request_action(store, "finish")  # before anything was learned it waits
    async with contextlib.AsyncExitStack() as stack, asyncio.timeout(WAIT_S):
        first = asyncio.create_task(serve(wanted, TASK, store, quiet))
        a, b = await learners(stack, mosquitto, tmp_path)
        b.held = frozenset({2})  # the bundle
        await b.order("install")
        first.cancel()
        await asyncio.wait([first])
        request_action(store, "finish")  # too late for this run: it is ending
        b.held = frozenset()
        summary = await serve(wanted, TASK, store, quiet)
        assert (summary["round"], summary["rounds"], summary["done"]) == (1, 1, True)
        assert sorted(summary["installed"]) == ["a", "b"]
        assert len(a.done) == len(b.done) == 2
        more = await serve(settings(mosquitto, tmp_path / "server", rounds=51), TASK, store, quiet)
        assert (more["rounds"], more["selection"]) == (3, {"a": 2, "b": 2})


async def test_nobody_else_is_retired(store: Store) -> None:
    store.start_round(1, (Device("cam1", 5), Device("north.cam7", 5)), 0.0)
    store.record_events(Event(at=0.0, round=1, name="device", device="cam2")).result()
    for device in ("cam1", "north.cam7", "cam2"):
        assert request_action(store, "retire", device).startswith(device)
    with pytest.raises(ConfigError, match=r"cam11 is no device of this federation.*did you mean cam1\?"):
        request_action(store, "retire", "cam11")
    with pytest.raises(ConfigError, match="cam3 is not retired"):
        request_action(store, "readmit", "cam3")
    assert read_requests(store).retired == ("cam1", "cam2", "north.cam7")


async def test_a_campaign_goes_on_from_the_last_and_is_done_once_whenever_the_coordinator_is_stopped(
    mosquitto: LocalBroker, tmp_path: Path, store: Store
) -> None:
    """Stopped before its first round, in a round, and before bundles: each device does each order once."""
    home = tmp_path / "server"
    wanted = settings(mosquitto, home, rounds=1, once=False, campaign_rounds=2)

    async def serve_until(event: str, **fields: object) -> None:
        """Until it says this, and not a step further."""
        said = asyncio.Event()

        def observe(name: str, about: dict[str, Any]) -> None:
            if name == event and fields.items() <= about.items():
                said.set()

        serving = asyncio.create_task(serve(wanted, TASK, store, observe))
        await said.wait()
        serving.cancel()
        await asyncio.wait([serving])

    async with contextlib.AsyncExitStack() as stack, asyncio.timeout(WAIT_S):
        a, b = await learners(stack, mosquitto, tmp_path)
        request_action(store, "campaign-run")  # as soon as none is running
        await serve_until("campaign_begun", number=2)
        kept = store.get_state()
        await serve_until("round_begun", round=3)
        assert store.get_state() == kept, "nothing of the campaign is stored yet"
        await serve_until("round_done", round=3)
        await serve_until("asked", label="install")
        await serve_until("resting")
    state = final(store)
    assert (state.round, state.campaign, state.participations) == (5, 2, {"a": 2, "b": 2})
    assert [line.round for line in state.history] == [3, 4]
    w = codecs.decode(store.blobs.get(state.model.digest), Codec.FLOAT32, LAYOUT)
    np.testing.assert_allclose(w.params, 3 + 3 * 2, rtol=1e-5)  # one round, then two more
    assert len(a.done) == len(b.done) == 5
    assert set(a.done.values()) == set(b.done.values()) == {1}
    campaign = read_summary(home)["campaign"]
    assert (campaign["number"], campaign["state"], campaign["why"]) == (2, "resting", "somebody asked for it")
    assert [(c["number"], c["rounds"]) for c in campaign["history"]] == [(1, 1), (2, 2)]


async def test_new_samples_begin_a_campaign_that_a_restart_does_not_forget(
    mosquitto: LocalBroker, tmp_path: Path, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("coordinator.service.service.SETTLE_S", 0.0)
    monkeypatch.setattr("coordinator.service.campaigns.PAUSE_S", 0.0)
    wanted = settings(mosquitto, tmp_path / "server", rounds=1, once=False, when=("new-samples=30",))
    events: list[tuple[str, dict[str, Any]]] = []
    async with contextlib.AsyncExitStack() as stack, asyncio.timeout(WAIT_S):
        serving = asyncio.create_task(serve(wanted, TASK, store, lambda *event: events.append(event)))
        a, b = await learners(stack, mosquitto, tmp_path)
        await until(lambda: "resting" in dict(events))
        await a.appear("1", n_arrived=20, data_version=20)
        await until(lambda: read_summary(tmp_path / "server")["at"] > 0)
        assert "campaign_begun" not in dict(events)
        await b.appear("1", n_arrived=10, data_version=1)
        await until(lambda: "campaign_begun" in dict(events))
        assert dict(events)["campaign_begun"] == {"number": 2, "reason": "30 new samples on 2 devices"}
        await until(lambda: [name for name, _ in events].count("resting") == 2)
        serving.cancel()
        await asyncio.wait([serving])
        again = asyncio.create_task(serve(wanted, TASK, store, lambda *event: events.append(event)))
        await until(lambda: [name for name, _ in events].count("resting") == 3)
        await asyncio.sleep(1.2)  # two looks: the samples are not counted twice
        again.cancel()
        await asyncio.wait([again])
    assert [name for name, _ in events].count("campaign_begun") == 1


async def test_campaigns_that_spend_one_epsilon_are_equally_long(tmp_path: Path, store: Store) -> None:
    with pytest.raises(ConfigError, match="leave out --campaign-rounds"):
        await serve(settings(None, tmp_path / "server", dp_epsilon=8.0, campaign_rounds=3), TASK, store, quiet)


def test_a_campaign_beyond_those_that_the_epsilon_is_for_is_refused_with_what_to_set(tmp_path: Path) -> None:
    one, three = (settings(None, tmp_path, dp_epsilon=8.0, dp_campaigns=n) for n in (1, 3))
    assert [explain_spent(three, n) for n in (1, 2)] == ["", ""]
    assert (
        explain_spent(settings(None, tmp_path), 100) == explain_spent(settings(None, tmp_path, dp_noise=1.0), 9) == ""
    )
    assert explain_spent(one, 1) == (
        "--dp-epsilon 8 is for one campaign, which is done, so each sample has spent it: start the coordinator with "
        "--dp-campaigns 2 and a larger --dp-epsilon, such as 16, if the devices' owners agree"
    )
    assert "--dp-epsilon 8 is for 3 campaigns, which are done" in explain_spent(three, 3)
