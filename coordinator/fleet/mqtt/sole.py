"""Ensures one coordinator for each federation at a broker: a second coordinator is told to end.

A coordinator retains a `Claim` while it is connected; its last will removes the claim. A coordinator that starts looks
for such a claim under a client id of its own, since a copy of a home has the client id of the original. If there is a
claim, it asks, and ends if it gets an answer. Two coordinators that start at the same moment, or whose brokers were
apart, hear each other later, and the one that began later ends. An answer names who asked, so that no old answer ends
anybody.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Final

from msgspec.structs import replace

from fedge.errors import ConfigError, ProtocolError, TransportError
from fedge.identity.names import Role
from fedge.membership.signed_messages import Plain, Signed, open_unverified
from fedge.system.text import escape_controls, format_time
from fedge.wire.connection.broker import BrokerSettings, Inbound
from fedge.wire.messages import Claim, decode_message, encode_message
from fedge.wire.topics import Topics
from fedge.wire.transport import Transport

log = logging.getLogger("fedge.coordinator")

ANSWER_S: Final = 3.0
"""Time for the coordinator that left a claim to answer. A coordinator that is gone leaves its claim if the broker went,
too."""
AGAIN_S: Final = 10.0
"""Pause between two claims for the same coordinator."""
TO: Final = "coordinators"
"""Addressee in the envelope of a claim. Message numbers then count for each life of a process by itself, so that two
processes with one key hear each other."""


def describe_claim(claim: Claim) -> str:
    """Describe which coordinator made a claim, for people."""
    where = claim.where or "somewhere"
    return escape_controls(f"{where}, incarnation {claim.incarnation}, which began at {format_time(claim.since)}")


class FederationClaim:
    """A coordinator's claim to be the only one of its federation at the broker.

    Args:
        topics: the federation's topics.
        signed: signs the coordinator's messages and checks those of others.
        home: the coordinator's home, which claims name.
        end: called with the error to end with, if another coordinator has precedence.
        notice: called with the claim of another coordinator that has to end.
    """

    def __init__(
        self,
        topics: Topics,
        signed: Plain | Signed,
        home: Path,
        *,
        end: Callable[[ConfigError], None],
        notice: Callable[[Claim], None],
    ) -> None:
        where = f"{socket.gethostname()}:{home.absolute()}"[:1000]
        self._own = Claim(incarnation=uuid.uuid4().hex, since=time.time(), where=where)
        self._topics, self._signed = topics, signed
        self._end, self._notice = end, notice
        self._transport: Transport | None = None
        self._spoke: dict[str, float] = {}  # when, to each other coordinator

    async def require_sole(self, broker: BrokerSettings) -> Transport:
        """Check that no other coordinator is at the broker; return the transport that checked, which is closed.

        Raises:
            ConfigError: another coordinator is at the broker.
            TransportError: the broker refused us for good.
        """
        me = self._own.incarnation
        retained: list[Claim] = []
        ourselves = asyncio.Event()
        answer: asyncio.Future[Claim] = asyncio.get_running_loop().create_future()

        async def record_claim(inbound: Inbound) -> None:
            claim = self._read_claim(inbound)
            if claim is None:
                return
            if claim.incarnation == me:
                ourselves.set()
            elif claim.to == me:
                if not answer.done():
                    answer.set_result(claim)
            else:
                retained.append(claim)

        transport = Transport(broker, self._topics.make_client_id("coordinator", uuid.uuid4().hex), session_expiry_s=0)
        await transport.subscribe(self._topics.claims, record_claim)
        async with transport:
            await self._publish_claim(transport, to=me)  # what is retained comes before what we say to ourselves
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(ANSWER_S):
                    await ourselves.wait()
            if retained:
                await self._publish_claim(transport, to=retained[-1].incarnation)
                await asyncio.wait((answer,), timeout=ANSWER_S)
        if answer.done():
            raise self._make_refusal(answer.result())
        return transport

    async def attach(self, transport: Transport) -> None:
        """Claim the federation on this transport from now on. Call it before the transport is entered."""
        self._transport = transport
        self._own = replace(self._own, works=True)
        await transport.subscribe(self._topics.claims, self._on_claim)
        transport.on_connect(self.publish_claim)

    async def publish_claim(self) -> None:
        """Publish our claim at the broker, unless it was removed."""
        if self._transport is not None:
            await self._publish_claim(self._transport, to="")

    async def remove_claim(self) -> None:
        """Remove the claim from the broker."""
        transport, self._transport = self._transport, None
        if transport is not None and transport.connected:
            with contextlib.suppress(TransportError):
                await transport.publish(self._topics.claims, b"", retain=True)

    async def _on_claim(self, inbound: Inbound) -> None:
        if not inbound.payload:  # another coordinator removed its claim, and ours takes its place
            await self._publish_at_times(to="")
            return
        claim = self._read_claim(inbound)
        if claim is None or claim.incarnation == self._own.incarnation:
            return
        await self._publish_at_times(to=claim.incarnation)
        if claim.to != self._own.incarnation:  # the answer may be an old one
            return
        if claim.works and (claim.since, claim.incarnation) < (self._own.since, self._own.incarnation):
            self._end(self._make_refusal(claim))
        else:
            self._notice(claim)

    async def _publish_at_times(self, *, to: str) -> None:
        now = time.monotonic()
        if self._transport is not None and now - self._spoke.get(to, -AGAIN_S) >= AGAIN_S:
            self._spoke = {i: at for i, at in self._spoke.items() if now - at < AGAIN_S} | {to: now}
            await self._publish_claim(self._transport, to=to)

    def _make_refusal(self, claim: Claim) -> ConfigError:
        return ConfigError(
            f"another coordinator of federation {self._topics.federation} is at this broker: {describe_claim(claim)}; "
            "stop that one before you start this one, or give this one a federation of its own"
        )

    async def _publish_claim(self, transport: Transport, *, to: str) -> None:
        topic = self._topics.claims
        payload = self._signed.seal(topic, encode_message(replace(self._own, to=to)), to=TO)
        try:
            await transport.publish(topic, payload, retain=not to)
        except TransportError as error:
            log.warning("event=not_claimed reason=%r", str(error))

    def _read_claim(self, inbound: Inbound) -> Claim | None:
        """Read the claim in a message; None if there is no valid claim."""
        try:
            if not inbound.payload:
                return None
            ours = decode_message(open_unverified(inbound.payload), Claim)
            if ours.incarnation == self._own.incarnation:
                return ours
            return decode_message(self._signed.open(inbound.topic, inbound.payload, Role.COORDINATOR, to=TO), Claim)
        except ProtocolError as error:
            log.warning("event=refused name=%s topic=%s detail=%r", error.name, inbound.topic, str(error))
            return None
