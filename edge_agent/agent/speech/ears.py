"""What an agent hears: orders, acknowledgements, requests for its updates, and whether it has a twin."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from edge_agent.agent.events import Events
from edge_agent.agent.speech.voice import Voice
from fedge.errors import ProtocolError
from fedge.identity.names import Role
from fedge.membership.signed_messages import Plain, Signed, unsealed
from fedge.wire.connection.broker import Inbound
from fedge.wire.messages import Ack, Order, Presence, Status, Want, decode
from fedge.wire.topics import Topics
from fedge.wire.transfer.sender import Sender
from fedge.wire.transport import Transport


class Ears:
    """Hears for one device, and drops what violates the contract.

    Args:
        device_id: of the device.
        incarnation: of this process.
        topics: of the federation.
        signed: opens each message.
        voice: falls silent when another process speaks as this device.
        sender: serves the updates that are wanted.
        events: told of what happens.
        feed: takes orders and acknowledgements.
        speak_again: called when it is for this process to speak.
    """

    def __init__(
        self,
        device_id: str,
        incarnation: str,
        topics: Topics,
        signed: Signed | Plain,
        *,
        voice: Voice,
        sender: Sender,
        events: Events,
        feed: Callable[[Order | Ack], None],
        speak_again: Callable[[], None],
    ) -> None:
        self._device_id = device_id
        self._incarnation = incarnation
        self._topics = topics
        self._signed = signed
        self._voice = voice
        self._sender = sender
        self._events = events
        self._feed = feed
        self._speak_again = speak_again

    async def attach(self, transport: Transport) -> None:
        """Subscribe to what is for this device."""
        topics, me = self._topics, self._device_id
        await transport.subscribe(topics.agent(me, "status"), self._on_own_status, refused=self._cannot_overhear)
        await transport.subscribe(topics.agent(me, "orders"), self._on_order)
        await transport.subscribe(topics.agent(me, "acks"), self._on_ack)
        await transport.subscribe(topics.coordinator_wants(me), self._on_want)

    async def _on_own_status(self, inbound: Inbound) -> None:
        """Look whether another process speaks as this device; if it came later than this one, give way for a while."""
        if not inbound.payload:
            return
        with suppress(ProtocolError):
            if decode(unsealed(inbound.payload), Status).incarnation == self._incarnation:
                return
        with self._refusing(inbound):
            said = self._signed.overhear(inbound.topic, inbound.payload, self._device_id)
            if said is None:
                return
            other, past = decode(said, Status), inbound.retained
            if other.presence is Presence.ONLINE and not past:
                self._voice.give_way(other.incarnation)
            elif self._signed.behind or not past:  # a past life's, or it has gone: it is for us to speak
                self._speak_again()

    def _cannot_overhear(self, reason: str) -> None:
        self._events.say("cannot_overhear", logging.WARNING, detail=reason)

    async def _on_order(self, inbound: Inbound) -> None:
        if self._voice.silent:  # it is for the other process
            return
        with self._refusing(inbound):
            self._feed(decode(self._open(inbound), Order))

    async def _on_ack(self, inbound: Inbound) -> None:
        with self._refusing(inbound):
            self._feed(decode(self._open(inbound, Role.INTAKE), Ack))

    async def _on_want(self, inbound: Inbound) -> None:
        with self._refusing(inbound):
            want, me = decode(self._open(inbound, Role.INTAKE), Want), self._device_id
            if want.device_id != me:
                raise ProtocolError("foreign-id", f"want for {want.device_id}")
            self._sender.want(want.digest, want.ranges, chunks=self._topics.update_chunk(me, want.digest))

    def _open(self, inbound: Inbound, *others: Role) -> bytes:
        """A message from the coordinator, or another permitted sender, to this incarnation of the agent."""
        return self._signed.open(inbound.topic, inbound.payload, Role.COORDINATOR, *others, to=self._incarnation)

    @contextmanager
    def _refusing(self, inbound: Inbound) -> Iterator[None]:
        """Drop messages that violate the contract: one log line, one count, no change."""
        try:
            yield
        except ProtocolError as error:
            self._events.refuse(error, inbound.topic)
