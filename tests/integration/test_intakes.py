"""Intake and server of models beside a coordinator where everything is signed: agents take what these say."""

from __future__ import annotations

from pathlib import Path

from fedge.identity.names import Role
from tests.support.federation import Federation
from tests.support.identities import Authority, TlsBroker

DEVICES = ("cam0", "cam1", "cam2")


async def test_agents_take_wants_models_and_verdicts_of_helpers_with_a_certificate(
    mosquitto_program: str, tmp_path: Path
) -> None:
    authority = Authority(tmp_path / "provision")
    authority.issuer.equip(Role.INTAKE)
    async with (
        TlsBroker(authority, tmp_path / "broker") as broker,
        Federation(broker, tmp_path, devices=DEVICES) as federation,
    ):
        flags = {"method": "fedavg", "rounds": 4, "local_steps": 1}
        coordinator = await federation.coordinator(**flags, **authority.client("coordinator"))
        await coordinator.said("waiting")
        helpers = [
            await federation.coordinator(**flags, **authority.client("intake"), role=role, log=role)
            for role in ("intake", "blobs")
        ]
        for helper in helpers:
            await helper.logged("event=connected")
        agents = {device: await federation.agent(device, **authority.client(device)) for device in DEVICES}
        assert await coordinator.ended() == 0
        assert len(federation.accepted()) == 5 * len(DEVICES)
        assert [helper.process.returncode for helper in helpers] == [None, None]
        for running in (*helpers, *agents.values()):
            assert running.refused() == {}, running.log.read_text()[-2000:]
