"""What people are told of a federation, and what they may ask of it, while real messages go over a real broker."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from coordinator.page import cli as watch_cli
from coordinator.service import cli
from coordinator.service.service import serve
from coordinator.service.settings import CoordinatorSettings
from coordinator.store.records import Event
from coordinator.store.requests import read_requests, request_action
from coordinator.store.store import Store
from coordinator.watch.state import Watch, read_summary
from coordinator.watch.words import describe_event
from fedge.commands.broker import LocalBroker
from fedge.errors import ConfigError
from tests.support.device import TASK
from tests.support.learners import Learner, learners
from tests.support.shop import NOW, make_shop

WAIT_S = 300.0


pytestmark = pytest.mark.usefixtures("no_torch")


@pytest.fixture
def home(tmp_path: Path) -> Path:
    return tmp_path / "server"


@pytest.fixture
def store(home: Path) -> Iterator[Store]:
    with contextlib.closing(Store(home)) as opened:
        yield opened


@pytest.fixture
async def devices(mosquitto: LocalBroker, tmp_path: Path) -> AsyncIterator[list[Learner]]:
    async with contextlib.AsyncExitStack() as stack:
        yield await learners(stack, mosquitto, tmp_path)


WITHOUT_CLUSTERS = {"split": False, "clusters": {}}
EXPERTS = (
    "5 experts and a gate, of which the best 2 answer each input: a device that does not train gets them, or a mix for "
    "its own samples"
)


@pytest.mark.parametrize(("summary", "told"), [({"experts": 5, "top": 2}, EXPERTS), ({"experts": 1, "top": 1}, "")])
def test_experts_for_all_devices_are_not_called_one_model(home: Path, summary: dict[str, object], told: str) -> None:
    home.mkdir()
    with contextlib.closing(make_shop(home, **WITHOUT_CLUSTERS, **summary)) as store:
        assert Watch(home, store).get_state()["experts"] == told
        shown = CliRunner().invoke(cli.status, ["--home", str(home)]).output
    assert ("one global model" in shown) == (not told)
    assert f"none, but {told}" in shown or not told


def served(broker: LocalBroker, store: Store, seen: list[tuple[str, Any]] | None = None, **changes: Any) -> Any:
    values = {"rounds": 2, "devices": 2, "method": "fedavg", "seed": 3, "deadline_s": 30.0, "once": True, **changes}
    address = f"{broker.host}:{broker.port}"
    settings = CoordinatorSettings(broker=address, federation="f", home=store.home, task="unused", **values)
    told = [] if seen is None else seen
    return serve(settings, TASK, store, lambda event, fields: told.append((event, fields)))


async def until(seen: list[tuple[str, Any]], name: str, count: int = 1) -> None:
    async with asyncio.timeout(WAIT_S):
        while sum(event == name for event, _ in seen) < count:  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def test_devices_rounds_and_reasons(
    mosquitto: LocalBroker, devices: list[Learner], store: Store, home: Path
) -> None:
    await served(mosquitto, store, participation=0.5)
    watch = Watch(home, store)
    state = watch.get_state()
    assert [(d["id"], d["presence"], d["bundle"], d["why"]) for d in state["devices"]] == [
        ("a", "unknown", True, ""),  # nobody listens any more
        ("b", "unknown", True, ""),
    ]
    assert [(r["round"], r["asked"], r["answered"], r["open"]) for r in state["rounds_list"]] == [
        (1, 1, 1, 0),
        (2, 1, 1, 0),
        (3, 2, 2, 0),
    ]
    assert all(row["done_at"] >= row["begun_at"] for row in state["rounds_list"])
    trained = {row["device"]: row["outcome"] for row in watch.describe_round(1)["devices"]}
    assert sorted(trained.values()) == ["answered", "not asked"]
    other = next(i for i, outcome in trained.items() if outcome == "not asked")
    assert watch.explain_device(other, 1) == [
        f"{other} was online when the run ended",
        "round 1: not asked, not chosen: the selection took 1 other",
    ]
    assert watch.explain_device("a")[1].startswith("round 3: install: answered")
    with pytest.raises(ConfigError, match="no device c was ever heard of"):
        watch.explain_device("c")
    assert not devices[0].done.keys() & devices[1].done.keys()


def test_the_line_above_a_round_counts_every_order(tmp_path: Path) -> None:
    with contextlib.closing(make_shop(tmp_path)) as store:
        store.record_events(Event(at=NOW, round=4, name="asked", fields={"label": "train", "devices": 5}))
        for device, result in (("a", "done"), ("b", "declined"), ("c", "failed")):
            told = {"label": "train", "result": result, "seconds": 1.0}
            store.record_events(Event(at=NOW, round=4, name="answer", device=device, fields=told))
        closed = {"label": "train", "reason": "late", "late": True}
        store.record_events(Event(at=NOW, round=4, name="closed", device="d", fields=closed)).result(WAIT_S)
        text = Watch(tmp_path, store).describe_round(4)["text"]
    assert text == "5 orders, 1 answered, 1 late, 2 failed or declined, 1 open"


async def test_what_became_of_orders_that_are_no_longer_stored(
    mosquitto: LocalBroker, devices: list[Learner], store: Store, home: Path
) -> None:
    await served(mosquitto, store, rounds=4, keep_rounds=1)
    assert not store.get_entries(1)
    watch = Watch(home, store)
    assert watch.explain_device("a", 1)[1].startswith("round 1: train: answered")
    assert {row["outcome"] for row in watch.describe_round(1)["devices"]} == {"answered"}
    with pytest.raises(ConfigError, match="nothing is known of round 99"):
        watch.explain_device("a", 99)


async def test_a_paused_run_waits_and_goes_on_a_round_at_a_time(
    mosquitto: LocalBroker, devices: list[Learner], store: Store, home: Path
) -> None:
    request_action(store, "pause")
    seen: list[tuple[str, Any]] = []
    running = asyncio.create_task(served(mosquitto, store, seen))
    await until(seen, "paused")
    assert not devices[0].orders
    request_action(store, "run-now")
    await until(seen, "paused", 2)
    assert [o.round for o in devices[0].orders] == [1]
    await asyncio.sleep(1.2)
    assert (read_summary(home)["paused"], Watch(home, store).get_state()["text"]) == (True, "paused after round 1 of 2")
    request_action(store, "resume")
    assert (await asyncio.wait_for(running, WAIT_S))["done"]
    assert [e.name for e in store.get_events(limit=1000) if e.name in {"paused", "resumed"}] == [
        "paused",
        "resumed",
    ] * 2


async def test_a_retired_device_gets_no_order_and_why_says_so(
    mosquitto: LocalBroker, devices: list[Learner], store: Store, home: Path
) -> None:
    store.record_events(Event(at=0.0, round=0, name="device", device="b")).result()
    request_action(store, "retire", "b")
    await served(mosquitto, store, devices=1)
    assert devices[0].orders
    assert not devices[1].orders
    assert Watch(home, store).explain_device("b", 1) == [
        "b was online when the run ended: retired: it gets no more orders",
        "round 1: not asked, retired",
    ]
    with pytest.raises(ConfigError, match="no device's name"):
        request_action(store, "retire", "../b")


async def test_a_method_without_clusters_says_that_it_cannot_make_them_anew(
    mosquitto: LocalBroker, devices: list[Learner], store: Store
) -> None:
    request_action(store, "recluster")
    seen: list[tuple[str, Any]] = []
    await served(mosquitto, store, seen)
    assert [event for event, _ in seen if event.startswith("recluster")] == ["recluster_refused"]
    assert read_requests(store).recluster is None
    assert devices


async def test_the_commands_read_what_a_coordinator_left(
    mosquitto: LocalBroker, devices: list[Learner], store: Store, home: Path
) -> None:
    await served(mosquitto, store)

    def run(command: Any, *words: str) -> str:
        done = CliRunner().invoke(command, [*words, "--home", str(home)])
        assert done.exit_code == 0, done.output
        return done.output

    *_, a, b = run(watch_cli.devices).splitlines()
    assert [line.split()[:2] for line in (a, b)] == [["a", "unknown"], ["b", "unknown"]]
    assert [line.split()[0] for line in run(watch_cli.rounds).splitlines()] == ["round", "1", "2", "3"]
    assert [r["answered"] for r in json.loads(run(watch_cli.rounds, "--json"))] == [2, 2, 2]
    assert run(watch_cli.why, "a", "1").splitlines()[1].startswith("round 1: train: answered")
    assert run(watch_cli.why, "a", "1").splitlines()[2] == "round 1: chosen among 2"
    first = json.loads(run(watch_cli.events, "--json", "--round", "1").splitlines()[0])
    assert (first["round"], first["number"]) == (1, 1)
    assert run(watch_cli.pause) == "No further round begins; the one under way ends.\n"
    assert read_requests(store).paused
    assert len(devices) == 2


def test_what_devices_say_commands_no_terminal_and_forges_no_line(tmp_path: Path) -> None:
    make_shop(tmp_path).close()
    for command, *words in (
        (watch_cli.devices,),
        (watch_cli.rounds,),
        (watch_cli.why, "cam12", "3"),
        (watch_cli.events, "--device", "cam12"),
        (cli.status,),
    ):
        done = CliRunner().invoke(command, [*words, "--home", str(tmp_path)])
        assert done.exit_code == 0, done.output
        assert all(line.isprintable() for line in done.output.splitlines())
        assert (r"\x1b[31m" in done.output) == (command is not watch_cli.rounds)


def test_status_says_why_something_was_refused_and_how_old_all_that_is(tmp_path: Path) -> None:
    make_shop(tmp_path).close()
    lines = CliRunner().invoke(cli.status, ["--home", str(tmp_path)]).output.splitlines()
    assert lines[0] == "attention   warning   cam4: its inputs are unlike those that its bundle learned"
    assert lines[2].startswith("federation  shop (fedge), as it was ")
    assert lines[4:6] == [
        "accuracy    0.930 (of the bundles that answer, 40 validation samples on 1 device)",
        "            0.600 (of the models in training, validation samples of the last cohort)",
    ]
    assert lines[8].startswith("refused     forged, 2 times; the last: cam12: <img src=x")
    assert lines[9] == "refused     replayed, 7 times"
    assert next(line for line in lines if line.startswith("  cam2: online, heard ")).endswith("ago, trained 3 times")
    cam1 = next(line for line in lines if line.startswith("  cam1: online, heard "))
    assert cam1.endswith("ago, trained 3 times, accuracy 0.930 of its bundle")


def test_no_more_events_are_kept_than_there_is_room_for(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("coordinator.store.store.MAX_EVENTS", 5)
    for k in range(20):
        store.record_events(Event(at=float(k), round=k, name="n", device="a\0b", fields={"reason": "x\0y"})).result()
    assert [e.number for e in store.get_events()] == [16, 17, 18, 19, 20]
    assert [e.round for e in store.get_events(last=2)] == [18, 19]


def test_nothing_of_a_folder_that_is_no_coordinators(tmp_path: Path) -> None:
    done = CliRunner().invoke(watch_cli.devices, ["--home", str(tmp_path)])
    assert "is no coordinator's --home" in str(done.exception)


def test_one_device_is_told_of_in_the_singular():
    asked = [Event(at=0.0, round=1, name="asked", fields={"label": "train", "devices": n}) for n in (1, 2)]
    assert [describe_event(event) for event in asked] == ["train: 1 device", "train: 2 devices"]


@pytest.mark.parametrize(
    ("more", "text"),
    [
        ({"drift": False}, "bundle serving"),
        ({"drift": True}, "bundle serving, its inputs are unlike those that its bundle learned"),
        ({"drift": True, "kind": "labels"}, "bundle serving, its labelled samples contradict its bundle"),
    ],
    ids=["none", "of an earlier version", "labels"],
)
def test_drift_is_told_of_with_its_kind(more: dict[str, object], text: str) -> None:
    fields = {"serving": "serving", "phase": "serving", "reason": "", **more}
    assert describe_event(Event(at=1.0, round=2, name="health", device="cam1", fields=fields)) == text


def test_what_became_of_new_bundles_is_told_in_words() -> None:
    stage = {"state": "running", "stage": 1, "stages": 3, "running": 2, "devices": 9, "reasons": []}
    kept = {"phase": "kept", "release": 4, "reason": "accuracy: x"}
    told = [
        Event(at=1.0, round=2, name="introduction", fields=stage),
        Event(at=1.0, round=2, name="introduction", fields=stage | {"state": "aborted", "reasons": ["asked for"]}),
        Event(at=1.0, round=2, name="introduced", device="cam1", fields=kept),
    ]
    assert [describe_event(event) for event in told] == [
        "new bundles running, stage 1 of 3, on 2 of 9 devices",
        "new bundles aborted, stage 1 of 3, on 2 of 9 devices: asked for",
        "its new bundle: kept (accuracy: x)",
    ]
