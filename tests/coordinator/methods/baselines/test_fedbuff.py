"""FedBuff: a step by hand, and what it costs in time."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest

from coordinator.aggregation.protection import Protection
from coordinator.methods.baselines.fedbuff import FedBuff
from coordinator.methods.parts.asynchronous import Buffer
from coordinator.methods.settings import MethodSettings
from coordinator.methods.state import encode_state
from coordinator.simulation.reports.outcome import compute_cost
from coordinator.simulation.rounds import run_rounds
from coordinator.simulation.run import simulate
from coordinator.simulation.settings import Scenario
from fedge.errors import ConfigError
from fedge.steps.training.train import Trained
from tests.support.simulation import digits


@pytest.mark.statistical
def test_less_simulated_time_to_the_target_than_fedavg(tmp_path: Path) -> None:
    """On mixed hardware; docs/methods/fedbuff.md has the figures."""
    for deadline_s in (None, 1.0):
        scenario = Scenario(rounds=15, hardware="mixed", evaluate_every=1, deadline_s=deadline_s, global_test=0.0)
        seconds = {}
        for name in ("fedavg", "fedbuff"):
            outcome = simulate(scenario, name, {}, 0, tmp_path / f"{name}-{deadline_s}", lambda _: None, name)
            assert outcome.bundles >= 15  # who is away at the end has none
            reached = compute_cost(outcome.curve, 0.9)
            assert reached is not None, name
            seconds[name] = reached.seconds
        assert seconds["fedbuff"] < seconds["fedavg"]


async def test_a_step_by_hand(tmp_path: Path) -> None:
    """Two updates, one of them a step old: w + (Delta_1 / sqrt(2) + Delta_2) / 2."""
    fleet, layout, first, _ = digits(tmp_path, n=3, limit=120)
    method = FedBuff(MethodSettings(options={"buffer": 2}))
    updates = {}
    for key, value, n in (("a/1", 1.0, 7), ("b/0", 3.0, 1)):
        tensors = {info.name: np.full(info.shape, value, np.float32) for info in layout.tensors}
        updates[key] = Trained(update=fleet.put(tensors), n_samples=n)
    buffer = Buffer(updates, {"a/1": 1, "b/0": 0}, asked=2, seen=())
    after = fleet.get(await method.step_server(method.init(layout, first), fleet, buffer), layout)
    wanted = fleet.get(first, layout).params + (1 / np.sqrt(2) + 3) / 2
    np.testing.assert_allclose(after.params, wanted, rtol=1e-6)


async def test_steps_of_the_server(tmp_path: Path) -> None:
    """Each takes K updates; who has answered is asked again; equal runs give equal bytes."""
    ends = []
    for number in range(2):
        fleet, layout, first, _ = digits(tmp_path / str(number), n=6, limit=240)
        fleet._hardware = {
            i: dataclasses.replace(own, latency_s=1.0 + k * k) for k, (i, own) in enumerate(fleet._hardware.items())
        }
        method = FedBuff(MethodSettings(rounds=5, options={"buffer": 4}))
        state = await run_rounds(method, method.init(layout, first), fleet)
        assert [line.answered for line in state.history] == [4] * 5
        assert [line.asked for line in state.history] == [9, 4, 4, 4, 4]
        assert sum(state.participations.values()) == 20
        assert state.participations["d00"] > state.participations["d01"] > state.participations["d02"]
        assert state.installed.keys() == fleet.workers.keys()
        ends.append(encode_state(state))
    assert ends[0] == ends[1]


def test_a_sum_of_masked_updates_would_wait() -> None:
    with pytest.raises(ConfigError, match="fedbuff cannot have masking"):
        FedBuff(MethodSettings(protection=Protection(average="mean", masking=True)))
