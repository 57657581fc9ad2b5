"""Certificates with an hour to live: a coordinator names its own, its broker's and its devices' before they end."""

from __future__ import annotations

import asyncio
import datetime as dt
from pathlib import Path
from typing import Any

from cryptography.hazmat.primitives.serialization import Encoding

from coordinator.watch.state import read_summary
from fedge.identity.certificates import load_certificate
from fedge.wire.connection.broker import BrokerSettings
from fedge.wire.connection.route import read_peer_certificate
from tests.support.federation import Federation
from tests.support.identities import DAY, Authority, TlsBroker
from tests.support.waiting import until


async def test_whatever_was_not_renewed_is_named_while_there_is_time(mosquitto_program: str, tmp_path: Path) -> None:
    authority = Authority(tmp_path / "provision", days=30, ago=30 * DAY - dt.timedelta(hours=1))
    async with (
        TlsBroker(authority, tmp_path / "broker") as broker,
        Federation(broker, tmp_path, devices=("cam0",)) as federation,
    ):
        await federation.agent("cam0", **authority.client("cam0"))
        coordinator = await federation.coordinator(method="fedavg", rounds=400, **authority.client("coordinator"))
        await coordinator.said("round_done", round=1)

        def find_expiring() -> dict[tuple[str, str], dict[str, Any]]:
            items = read_summary(federation.home)["attention"]
            return {(item["device"], item["text"].split(" expires on ")[0]): item for item in items}

        own = f"the certificate {authority.folder / 'coordinator' / 'own.crt'}"
        where = f"the certificate of the broker {broker.host}:{broker.port}"
        wanted = {("", own), ("", where), ("cam0", "its certificate")}
        await until(lambda: find_expiring().keys() >= wanted)
        found = [find_expiring()[name] for name in wanted]
        assert {(item["kind"], item["severity"]) for item in found} == {("expiring", "warning")}
        assert all("`fedge provision renew` on the server" in item["do"] for item in found)
        assert all(item["since"] for item in found)
        at = BrokerSettings(
            broker.host, broker.port, **{name: str(file) for name, file in authority.client("cam0").items()}
        )
        tls = at.make_tls()
        assert tls is not None
        shown = await asyncio.to_thread(read_peer_certificate, at.address, at.proxy, tls)
        assert shown == load_certificate(authority.folder / "broker" / "own.crt").public_bytes(Encoding.DER)
