"""Receives an agent's messages: orders, acknowledgements, requests for its updates, and signs of a twin."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

from edge_agent.agent.identity import Member
from edge_agent.agent.speech.voice import Publisher
from fedge.errors import ProtocolError
from fedge.identity.names import Role
from fedge.membership.signed_messages import open_unverified
from fedge.wire.connection.broker import Inbound
from fedge.wire.messages import Ack, Beacon, Order, Presence, Status, Want, decode_message
from fedge.wire.transfer.sender import Sender
from fedge.wire.transport import Transport


@dataclass(eq=False)
class Listener:
    """A listener for one device, which drops messages that violate the contract.

    Args:
        me: the device.
        incarnation: the incarnation of this process.
        voice: the publisher, which is silent while another process speaks as this device.
        sender: serves the updates that are wanted.
        feed: takes orders and acknowledgements.
        speak_again: called when this process is to speak.
        hear: takes what the coordinator says to all.
    """

    me: Member
    incarnation: str
    voice: Publisher
    sender: Sender
    feed: Callable[[Order | Ack], None]
    speak_again: Callable[[], None]
    hear: Callable[[Beacon], None]

    async def attach(self, transport: Transport) -> None:
        """Subscribe to the messages for this device."""
        await transport.subscribe(self.me.make_topic("status"), self._on_own_status, refused=self._on_status_refused)
        await transport.subscribe(self.me.make_topic("orders"), self._on_order)
        await transport.subscribe(self.me.make_topic("acks"), self._on_ack)
        await transport.subscribe(self.me.topics.make_wants_topic(self.me.device_id), self._on_want)
        await transport.subscribe(self.me.topics.beacon, self._on_beacon, refused=self._on_beacon_refused)

    async def _on_own_status(self, inbound: Inbound) -> None:
        """Give way for a while if another process speaks as this device and came later than this one."""
        if not inbound.payload:
            return
        with suppress(ProtocolError):
            if decode_message(open_unverified(inbound.payload), Status).incarnation == self.incarnation:
                return
        with self._drop_invalid(inbound):
            said = self.me.signed.open_overheard(inbound.topic, inbound.payload, self.me.device_id)
            if said is None:
                return
            other, past = decode_message(said, Status), inbound.retained
            if other.presence is Presence.ONLINE and not past:
                self.voice.pause(other.incarnation)
            elif self.me.signed.is_behind or not past:  # the status of a past life, or the twin has gone, so we speak
                self.speak_again()

    def _on_status_refused(self, reason: str) -> None:
        self.me.events.log_event("cannot_overhear", logging.WARNING, detail=reason)

    def _on_beacon_refused(self, reason: str) -> None:
        self.me.events.log_event("cannot_hear_beacon", logging.WARNING, detail=reason)

    async def _on_beacon(self, inbound: Inbound) -> None:
        if not inbound.payload:
            return
        with self._drop_invalid(inbound):
            payload = self.me.signed.open(inbound.topic, inbound.payload, Role.COORDINATOR)
            self.hear(decode_message(payload, Beacon))

    async def _on_order(self, inbound: Inbound) -> None:
        if self.voice.silent:  # the message is for the other process
            return
        with self._drop_invalid(inbound):
            self.feed(decode_message(self._unseal(inbound), Order))

    async def _on_ack(self, inbound: Inbound) -> None:
        with self._drop_invalid(inbound):
            self.feed(decode_message(self._unseal(inbound, Role.INTAKE), Ack))

    async def _on_want(self, inbound: Inbound) -> None:
        with self._drop_invalid(inbound):
            want, me = decode_message(self._unseal(inbound, Role.INTAKE), Want), self.me.device_id
            if want.device_id != me:
                raise ProtocolError("foreign-id", f"want for {want.device_id}")
            self.sender.add_want(want.digest, want.ranges, chunks=self.me.topics.make_update_topic(me, want.digest))

    def _unseal(self, inbound: Inbound, *others: Role) -> bytes:
        """Open a message to this incarnation from the coordinator, or another permitted sender."""
        return self.me.signed.open(inbound.topic, inbound.payload, Role.COORDINATOR, *others, to=self.incarnation)

    @contextmanager
    def _drop_invalid(self, inbound: Inbound) -> Iterator[None]:
        """Drop messages that violate the contract, with a log line and a count, but no change."""
        try:
            yield
        except ProtocolError as error:
            self.me.events.record_refusal(error, inbound.topic)
