"""What an agent hears: orders, acknowledgements, requests for its updates, and whether it has a twin."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

from edge_agent.agent.identity import Member
from edge_agent.agent.speech.voice import Voice
from fedge.errors import ProtocolError
from fedge.identity.names import Role
from fedge.membership.signed_messages import unsealed
from fedge.wire.connection.broker import Inbound
from fedge.wire.messages import Ack, Order, Presence, Status, Want, decode
from fedge.wire.transfer.sender import Sender
from fedge.wire.transport import Transport


@dataclass(eq=False)
class Ears:
    """Hears for one device, and drops what violates the contract.

    Args:
        me: the device.
        incarnation: of this process.
        voice: falls silent when another process speaks as this device.
        sender: serves the updates that are wanted.
        feed: takes orders and acknowledgements.
        speak_again: called when it is for this process to speak.
    """

    me: Member
    incarnation: str
    voice: Voice
    sender: Sender
    feed: Callable[[Order | Ack], None]
    speak_again: Callable[[], None]

    async def attach(self, transport: Transport) -> None:
        """Subscribe to what is for this device."""
        await transport.subscribe(self.me.topic("status"), self._on_own_status, refused=self._cannot_overhear)
        await transport.subscribe(self.me.topic("orders"), self._on_order)
        await transport.subscribe(self.me.topic("acks"), self._on_ack)
        await transport.subscribe(self.me.topics.coordinator_wants(self.me.device_id), self._on_want)

    async def _on_own_status(self, inbound: Inbound) -> None:
        """Look whether another process speaks as this device; if it came later than this one, give way for a while."""
        if not inbound.payload:
            return
        with suppress(ProtocolError):
            if decode(unsealed(inbound.payload), Status).incarnation == self.incarnation:
                return
        with self._refusing(inbound):
            said = self.me.signed.overhear(inbound.topic, inbound.payload, self.me.device_id)
            if said is None:
                return
            other, past = decode(said, Status), inbound.retained
            if other.presence is Presence.ONLINE and not past:
                self.voice.give_way(other.incarnation)
            elif self.me.signed.behind or not past:  # a past life's, or it has gone: it is for us to speak
                self.speak_again()

    def _cannot_overhear(self, reason: str) -> None:
        self.me.events.say("cannot_overhear", logging.WARNING, detail=reason)

    async def _on_order(self, inbound: Inbound) -> None:
        if self.voice.silent:  # it is for the other process
            return
        with self._refusing(inbound):
            self.feed(decode(self._open(inbound), Order))

    async def _on_ack(self, inbound: Inbound) -> None:
        with self._refusing(inbound):
            self.feed(decode(self._open(inbound, Role.INTAKE), Ack))

    async def _on_want(self, inbound: Inbound) -> None:
        with self._refusing(inbound):
            want, me = decode(self._open(inbound, Role.INTAKE), Want), self.me.device_id
            if want.device_id != me:
                raise ProtocolError("foreign-id", f"want for {want.device_id}")
            self.sender.want(want.digest, want.ranges, chunks=self.me.topics.update_chunk(me, want.digest))

    def _open(self, inbound: Inbound, *others: Role) -> bytes:
        """A message from the coordinator, or another permitted sender, to this incarnation of the agent."""
        return self.me.signed.open(inbound.topic, inbound.payload, Role.COORDINATOR, *others, to=self.incarnation)

    @contextmanager
    def _refusing(self, inbound: Inbound) -> Iterator[None]:
        """Drop messages that violate the contract: one log line, one count, no change."""
        try:
            yield
        except ProtocolError as error:
            self.me.events.refuse(error, inbound.topic)
