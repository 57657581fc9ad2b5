"""kill -9 of agents whose method keeps something on the device: what was kept is neither lost nor used twice.

The federation ends with the model of an undisturbed run: the same devices in the simulated fleet, without a network.
"""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from coordinator.methods.baselines.dbe import DbeState
from coordinator.methods.baselines.fedavg import FedAvgState
from coordinator.methods.baselines.personal_layers import PersonalState
from coordinator.methods.baselines.shared.feddyn import FedDynState
from coordinator.methods.baselines.shared.scaffold import ScaffoldState
from fedge.tensors.layout import Codec
from tests.support.broker import local_broker
from tests.support.federation import Federation, same, settings
from tests.support.waiting import until

ROUNDS, STEPS = 4, 200


@pytest.mark.parametrize(
    ("name", "kind", "codec", "file"),
    [
        ("fedrep", PersonalState, Codec.INT8, "personal"),
        ("dbe", DbeState, Codec.INT8, "personal"),
        ("scaffold", ScaffoldState, Codec.INT8, "personal"),
        ("feddyn", FedDynState, Codec.INT8, "personal"),
        ("fedavg", FedAvgState, Codec.TOP, "waits-train"),
    ],
)
async def test_agents_killed_again_and_again_end_where_undisturbed_ones_do(
    tmp_path: Path, name: str, kind: type[FedAvgState], codec: Codec, file: str
) -> None:
    rng = random.Random(1)
    async with (
        local_broker("auto", tmp_path) as broker,
        Federation(broker, tmp_path, devices=("a", "b", "c")) as federation,
    ):
        coordinator = await federation.coordinator(method=name, rounds=ROUNDS, local_steps=STEPS, codec=codec)
        agents = await federation.agents()
        await coordinator.said("round_begun", round=1)
        for done in range(2, 2 + 3 * (ROUNDS - 1), 2):
            await until(lambda done=done: len(federation.accepted()) >= done)  # type: ignore[misc]
            victim = rng.choice(federation.devices)
            await agents[victim].kill()
            agents[victim] = await federation.agent(victim)
        assert await coordinator.ended() == 0, coordinator.log.read_text()[-3000:]
        found = federation.state(kind)
        assert same(found, await federation.undisturbed(name, settings(ROUNDS, steps=STEPS, codec=codec)))
        for device in federation.devices:
            runs = list((tmp_path / device / "kept").iterdir())
            assert len(runs) == 1
            assert sorted(path.name for path in (runs[0] / file).iterdir()) == [str(ROUNDS - 1), str(ROUNDS)]
