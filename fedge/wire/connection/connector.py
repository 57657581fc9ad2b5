"""Attempts to connect, one after the other and with pauses, until the broker lets us in."""

from __future__ import annotations

import asyncio
import logging
import random
from functools import partial
from typing import Final

from paho.mqtt.enums import MQTTProtocolVersion

from fedge.errors import ConfigError, TransportError
from fedge.system.background import run_in_daemon
from fedge.wire.connection.broker import Caller
from fedge.wire.connection.connection import Connection, Owner
from fedge.wire.connection.packet_limits import LEAST_PACKET
from fedge.wire.connection.reasons import explain_lacking
from fedge.wire.connection.refusals import CHECK_REVOKED, REVOKED, RefusedError, explain_hang_up, make_refusal
from fedge.wire.connection.route import explain_other_protocol

log = logging.getLogger("fedge.transport")

BACKOFF_BASE_S: Final = 0.25
BACKOFF_CAP_S: Final = 10.0
"""Longest pause between attempts, so that a restarted broker is found within seconds. Full jitter keeps a thousand
agents from returning at the same moment."""
SLOW_AFTER: Final = 3
SLOW_RETRY_S: Final = 60.0
"""Longest pause (30 to 60 s) after `SLOW_AFTER` early closes in a row, since somebody must change something first."""


def compute_backoff_s(attempt: int, draw: float) -> float:
    """Return the wait in seconds after failed attempt 1, 2, ...: `draw` in [0, 1) times min(cap, base * 2^attempt)."""
    return draw * min(BACKOFF_CAP_S, BACKOFF_BASE_S * 2.0 ** min(attempt, 16))


class Connector:
    """Makes the connections of one caller to one broker, for an owner that gets their messages."""

    def __init__(self, caller: Caller, owner: Owner) -> None:
        self._caller = caller
        self._owner = owner
        self.protocols = (MQTTProtocolVersion.MQTTv5, MQTTProtocolVersion.MQTTv311)
        """Both MQTT versions, the one that worked last first."""
        self.connection: Connection | None = None
        """The present connection, the last one, or one that is being tried."""
        self.protocol = ""
        """MQTT version of the current or last connection: "5" or "3.1.1"."""
        self._was_connected = False

    async def connect(self, *, patient: bool) -> Connection:
        """Try until a broker lets us in. If not `patient`, raise TransportError on a permanent refusal."""
        attempt = closed_early = 0
        warned: set[str] = set()
        while True:
            attempt += 1
            try:
                return await self._connect_once()
            except (RefusedError, OSError, ConfigError) as error:  # ConfigError if a file is just being renewed
                failure = make_refusal(error, self._caller.settings)
            closed_early = closed_early + 1 if failure.closed_early else 0
            if failure.final and not patient:
                raise TransportError(f"the broker at {self._caller.broker} refused {self._caller.client_id}: {failure}")
            log.warning(
                "event=connect_failed broker=%s attempt=%d reason=%r", self._caller.broker, attempt, str(failure)
            )
            if failure.alien and str(failure) not in warned:
                warned.add(str(failure))
                check = await self._find_what_to_check(patient=patient)
                if check not in warned:
                    warned.add(check)
                    log.error("event=closed_early broker=%s check=%r", self._caller.broker, check)
            draw = random.SystemRandom().random()
            slow = closed_early >= SLOW_AFTER
            await asyncio.sleep(SLOW_RETRY_S * (1 + draw) / 2 if slow else compute_backoff_s(attempt, draw))

    async def _find_what_to_check(self, *, patient: bool) -> str:
        """Find why a broker may have hung up before it let us in, or did not answer in MQTT.

        Raises:
            TransportError: what answers is no broker, and `patient` is false.
        """
        settings, check = self._caller.settings, CHECK_REVOKED
        if self._caller.alert != REVOKED:
            check = await run_in_daemon(
                partial(explain_other_protocol, settings.address, settings.proxy, settings.make_tls)
            )
            if check and not patient:
                raise TransportError(f"{self._caller.broker} does not speak MQTT with us: {check}")
        return check or explain_hang_up(settings)

    async def _connect_once(self) -> Connection:
        """Try the MQTT version that worked last (at first MQTT 5), then the other version."""
        first, second = self.protocols
        try:
            return await self._connect_with(first)
        except RefusedError as error:
            if error.final or not error.older:
                raise
            log.info("event=fallback client=%s reason=%r", self._caller.client_id, str(error))
        connection = await self._connect_with(second)
        self.protocols = (second, first)
        return connection

    async def _connect_with(self, protocol: MQTTProtocolVersion) -> Connection:
        """Try once. A process's first connection starts a clean session, since no old messages are for this process."""
        connection = self.connection = Connection(self._caller, self._owner, protocol, clean=not self._was_connected)
        await connection.open()
        if lack := explain_lacking(connection.announced, LEAST_PACKET):
            await connection.disconnect()
            raise RefusedError(lack, final=True)
        self._was_connected, self._caller.alert = True, ""
        self.protocol = "5" if connection.is_v5 else "3.1.1"
        log.info("event=connected client=%s protocol=%s", self._caller.client_id, self.protocol)
        return connection
