"""Differential privacy between real processes: what is on the wire, what the ledgers hold, and who stops answering."""

from __future__ import annotations

from pathlib import Path

import msgspec

from coordinator.methods.baselines.fedavg import FedAvgState
from edge_agent.privacy.dp_ledger import Ledger
from fedge.wire.messages import Report, Why
from tests.support.broker import local_broker
from tests.support.federation import Federation
from tests.support.waiting import until

ROUNDS = 3


async def test_a_federation_with_noise_ends_though_an_agent_is_killed_and_one_has_a_small_budget(
    tmp_path: Path,
) -> None:
    devices = ("a", "b", "c")
    async with (
        local_broker("auto", tmp_path) as broker,
        Federation(broker, tmp_path, devices=devices) as federation,
    ):
        coordinator = await federation.coordinator(method="fedavg", rounds=ROUNDS, local_steps=20, dp_epsilon=8)
        agents = {device: await federation.agent(device) for device in "ab"}
        await federation.agent("c", max_epsilon=6)
        await coordinator.said("round_begun", round=1)
        await until(lambda: len(federation.accepted()) >= 2)
        await agents["a"].kill()
        await federation.agent("a")
        assert await coordinator.ended() == 0, coordinator.log.read_text()[-3000:]
        reports = {i: msgspec.msgpack.decode(data, type=Report) for i, data in federation.accepted().items()}
        state = federation.state(FedAvgState)
        spent = {device: Ledger(tmp_path / device).compute_spent(1e-5) for device in devices}
    trained = {i: report for i, report in reports.items() if ".train." in i}
    assert {report.seconds for report in trained.values()} == {0.0}, "how long it took is not told"
    assert {report.why for i, report in trained.items() if i.endswith(".c")} == {None, Why.BUDGET}
    assert spent["c"] <= 6
    assert max(spent.values()) <= 8 * (1 + 1e-9), "what a kill has cost is part of it"
    assert state.history[-1].accuracy is None
    assert state.history[-1].loss is None
    assert sorted(state.installed) == sorted(devices), "who tells nothing more still gets a bundle"
