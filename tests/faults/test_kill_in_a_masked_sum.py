"""kill -9 of agents and of the coordinator in the middle of masked sums, over a real broker.

A sum is exact whatever the masks are, so a federation that was disturbed ends in the bits of one that was not.
"""

from __future__ import annotations

import sqlite3
from pathlib import Path

from coordinator.aggregation.protection import Protection
from coordinator.methods.baselines.fedavg import FedAvgState
from fedge.commands.broker import LocalBroker
from tests.support.federation import Federation, same, settings
from tests.support.waiting import until

DEVICES = tuple(f"cam{k}" for k in range(6))
MASKED = {"method": "fedavg", "rounds": 1, "average": "mean", "masking": True}
PROTECTION = Protection(average="mean", masking=True)
STEPS = 1500
LABELS = ("train-keys", "train-shares", "train", "train-confirm", "train-unmask")


async def test_agent_and_coordinator_killed_in_a_sum_end_as_if_nothing_had_happened(
    one_broker: LocalBroker, tmp_path: Path
) -> None:
    """The coordinator at each step, asking nobody for anything else afterwards; an agent in mid-training."""
    async with Federation(one_broker, tmp_path, devices=DEVICES) as federation:
        agents = await federation.agents()
        asked: dict[str, bytes] = {}
        for label in LABELS:
            coordinator = await federation.coordinator(**MASKED, local_steps=STEPS)
            if label == "train":
                await agents["cam1"].said("order_started", round=1, step="train_masked")
                await agents["cam1"].kill()
                await federation.agent("cam1")
            await until(lambda label=label: answered(federation, label) > 0)
            await coordinator.kill()
            orders = dict(federation.rows("SELECT id, body FROM orders"))
            assert asked.items() <= orders.items()
            asked = orders
        assert await (await federation.coordinator(**MASKED, local_steps=STEPS)).ended() == 0
        assert asked.items() <= dict(federation.rows("SELECT id, body FROM orders")).items(), "none was written anew"
        assert federation.rows("SELECT DISTINCT status FROM orders") == [("accepted",)]
        state = federation.state(FedAvgState)
        undisturbed = await federation.undisturbed("fedavg", settings(1, steps=STEPS, protection=PROTECTION))
    assert list(state.sums) == [DEVICES]
    assert same(state, undisturbed)


def answered(federation: Federation, label: str) -> int:
    """Accepted reports of a step, so far."""
    try:
        ((n,),) = federation.rows(f"SELECT count(*) FROM orders WHERE label = '{label}' AND status = 'accepted'")
    except sqlite3.OperationalError:  # its tables are not there yet
        return 0
    return int(n)
