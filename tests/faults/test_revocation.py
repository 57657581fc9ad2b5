"""A device whose certificate is revoked while it takes part: it is cut off, and the others go on."""

from __future__ import annotations

import json
import time
from pathlib import Path

from fedge.commands.cli import main
from fedge.wire.connection.refusals import CHECK_REVOKED
from tests.support.federation import Federation, Running
from tests.support.identities import Authority, TlsBroker

DEVICES = ("cam0", "cam1", "cam2")
AWAY_S = 10.0
CUT_S = 60.0


async def test_a_revoked_device_is_cut_off_within_a_minute_and_the_others_are_back_within_seconds(
    mosquitto_program: str, tmp_path: Path
) -> None:
    authority = Authority(tmp_path / "provision")
    async with Federation(TlsBroker(authority, tmp_path / "unused"), tmp_path, devices=DEVICES) as federation:
        broker = await Running.start(
            tmp_path / "broker.log", "broker", "--port", 0, "--identity", authority.folder / "broker"
        )
        await broker.said("listening")
        federation.broker.port = broker.events[0]["port"]
        try:
            agents = {device: await federation.agent(device, **authority.client(device)) for device in DEVICES}
            rounds = {"method": "fedavg", "rounds": 400, "local_steps": 1, "deadline_s": 10}
            coordinator = await federation.coordinator(**rounds, **authority.client("coordinator"))
            await coordinator.said("round_done", round=2)
            began = time.monotonic()
            assert main(["provision", "revoke", "cam0", "--folder", str(authority.folder), "--json"]) == 0
            # Whoever is cut off says so in its log, whoever is back says "online" for the second time.
            await agents["cam0"].logged("event=disconnected")
            await agents["cam0"].logged("event=connect_failed")
            assert time.monotonic() - began < CUT_S
            for device in DEVICES[1:]:
                await agents[device].logged("event=disconnected")
                await agents[device].logged_again("event=connected", times=2)
            assert time.monotonic() - began < AWAY_S
            # A connection that is reset loses the broker's reason; a later attempt has it.
            await agents["cam0"].logged("certificate revoked")
            await agents["cam0"].logged(CHECK_REVOKED)
            await coordinator.logged_again("event=connected", times=2)
            n = max(event["round"] for event in coordinator.events if event["event"] == "round_done")
            await coordinator.said("round_done", round=n + 3)
            accepted = len([i for i in federation.accepted() if i.endswith(".cam0")])
            await coordinator.said("round_done", round=n + 5)
            assert len([i for i in federation.accepted() if i.endswith(".cam0")]) == accepted
            assert agents["cam0"].log.read_text().count("event=connected") == 1
            summary = json.loads((federation.home / "summary.json").read_bytes())
            assert summary["devices"].get("cam0") != "online"
            assert {summary["devices"][device] for device in DEVICES[1:]} == {"online"}
        finally:
            await broker.kill()
