"""kill -9 of the coordinator in mid-round: started again with the same folder it ends as if nothing had happened."""

from __future__ import annotations

import asyncio
import random
import signal
from pathlib import Path

import msgspec
import pytest

from coordinator.methods.baselines.fedavg import FedAvgState
from coordinator.methods.baselines.shared.feddyn import FedDynState
from coordinator.methods.baselines.shared.ifca import IfcaState
from coordinator.methods.baselines.shared.scaffold import ScaffoldState
from coordinator.methods.papers.fedge_state import FedgeState
from coordinator.methods.state import State
from coordinator.store.store import RECALLED_ROUNDS
from fedge.commands.broker import LocalBroker
from tests.support.federation import Federation, same, settings

DEVICES = ("cam0", "cam1", "cam2")
MANY_ROUNDS = 50  # a round takes some 50 ms: they are not over before the last kill


def counted_once(federation: Federation) -> bool:
    """Every order of every round and step is there once, and accepted."""
    per_step = federation.rows("SELECT round, label, device_id, count(*), min(status) FROM orders GROUP BY 1, 2, 3")
    return all(row[3:] == (1, "accepted") for row in per_step)


@pytest.mark.parametrize(
    ("method", "kind", "rounds", "store_url"),
    [
        pytest.param("fedavg", FedAvgState, 3, "sqlite", marks=pytest.mark.smoke),
        ("fedavg", FedAvgState, 3, "postgresql"),
        ("fedge", FedgeState, 7, "sqlite"),
        ("scaffold", ScaffoldState, 3, "sqlite"),
        ("feddyn", FedDynState, 3, "sqlite"),
        ("ifca", IfcaState, 3, "sqlite"),
    ],
    indirect=["store_url"],
)
async def test_with_a_part_of_the_reports_accepted(
    mosquitto: LocalBroker, tmp_path: Path, method: str, kind: type[State], rounds: int, store_url: str | None
) -> None:
    """One agent stands still, so that its round is certainly open when the two others have been accepted."""
    flags = {"method": method, "rounds": rounds}
    async with Federation(mosquitto, tmp_path, devices=DEVICES, store_url=store_url) as federation:
        agents = await federation.agents()
        coordinator = await federation.coordinator(**flags)
        await coordinator.said("round_done", round=1)
        number = await federation.stands_still("cam2", agents["cam2"])
        await coordinator.kill()

        before = federation.accepted()
        assert federation.rows("SELECT device_id FROM orders WHERE status = 'open'") == [("cam2",)]
        assert federation.rows("SELECT max(round) FROM states") == [(number - 1,)]

        coordinator = await federation.coordinator(**flags)
        agents["cam2"].send(signal.SIGCONT)
        assert await coordinator.ended() == 0
        after = federation.accepted()
        assert before.items() <= after.items(), "what was accepted stays accepted, with the same report"
        assert counted_once(federation)
        assert same(federation.state(kind), await federation.undisturbed(method, settings(rounds)))


async def test_killed_again_and_again_at_random(mosquitto: LocalBroker, tmp_path: Path) -> None:
    rng = random.Random(11)
    flags = {"method": "fedavg", "rounds": MANY_ROUNDS}
    async with Federation(mosquitto, tmp_path, devices=DEVICES) as federation:
        await federation.agents()
        kept: dict[str, bytes] = {}
        for _ in range(6):
            coordinator = await federation.coordinator(**flags)
            await coordinator.said("round_begun")
            await asyncio.sleep(rng.uniform(0.0, 0.3))
            await coordinator.kill()
            accepted = federation.accepted()
            assert kept.items() <= accepted.items()
            kept = accepted
        coordinator = await federation.coordinator(**flags)
        assert await coordinator.ended() == 0
        assert kept.items() <= federation.accepted().items()
        assert counted_once(federation)
        assert same(federation.state(FedAvgState), await federation.undisturbed("fedavg", settings(MANY_ROUNDS)))


@pytest.mark.parametrize(("method", "kind", "rounds"), [("fedavg", FedAvgState, 2), ("fedge", FedgeState, 7)])
async def test_a_run_that_ended_goes_on_and_is_killed(
    mosquitto: LocalBroker, tmp_path: Path, method: str, kind: type[State], rounds: int
) -> None:
    """Its first end has a number of its own; two more rounds, and the end once more, as in one process."""
    longer = {"method": method, "rounds": rounds + 2}
    async with Federation(mosquitto, tmp_path, devices=DEVICES) as federation:
        await federation.agents()
        assert await (await federation.coordinator(method=method, rounds=rounds)).ended() == 0
        planned = federation.state(kind)
        coordinator = await federation.coordinator(**longer)
        await coordinator.said("round_done", round=rounds + 2)
        await coordinator.kill()
        assert await (await federation.coordinator(**longer)).ended() == 0
        assert counted_once(federation)
        state = federation.state(kind)
        assert same(state, await federation.undisturbed(method, settings(rounds), last=rounds + 3))
        assert getattr(state, "trial", None) == getattr(planned, "trial", None)
        assert {i: done.release for i, done in state.installed.items()} == dict.fromkeys(DEVICES, 2)
        assert all((federation.folder / i / "bundles" / "2" / "manifest.json").exists() for i in DEVICES)


async def test_training_that_stops_early_is_killed(mosquitto: LocalBroker, tmp_path: Path) -> None:
    """Rounds without a better score count on, and the best state is installed, whoever was killed meanwhile."""
    flags = {"method": "fedavg", "rounds": 40, "patience": 3, "learning_rate": 0.3, "keep_rounds": RECALLED_ROUNDS}
    plain = settings(40)
    learned = msgspec.structs.replace(plain, patience=3, sgd=msgspec.structs.replace(plain.sgd, learning_rate=0.3))
    async with Federation(mosquitto, tmp_path, devices=DEVICES) as federation:
        wanted = await federation.undisturbed("fedavg", learned)
        assert wanted.best_state
        stopped, best = wanted.best_state.stopped, wanted.best_state.round
        assert stopped is not None
        assert best + 4 == stopped < 40
        agents = await federation.agents()
        for number in (best, best + 2, None):  # before the best model has been scored, while it waits, at the end
            coordinator = await federation.coordinator(**flags)
            await (
                coordinator.logged("event=stopped") if number is None else coordinator.said("round_done", round=number)
            )
            await coordinator.kill()
            await agents["cam1"].kill()
            agents["cam1"] = await federation.agent("cam1")
        assert await (await federation.coordinator(**flags)).ended() == 0
        found = federation.state(FedAvgState)
        assert same(found, wanted)
        assert set(found.installed) == set(DEVICES)
