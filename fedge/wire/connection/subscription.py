"""Inbound messages: topic filters, their handlers, and the queues of messages that wait for the handlers."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final

from paho.mqtt.matcher import MQTTMatcher

from fedge.errors import ProtocolError
from fedge.system.logs import Lines
from fedge.wire.connection.broker import Handler, Inbound
from fedge.wire.connection.connection import Connection
from fedge.wire.topics import strip_share

log = logging.getLogger("fedge.transport")

HELD_MESSAGES: Final = 256
HELD_BYTES: Final = 16 * 1024 * 1024
"""Most bytes that wait for one handler. Only QoS 0 floods and brokers without flow control (amqtt) can reach it."""
PAUSE_BYTES: Final = 8 * 1024 * 1024
"""Bytes waiting for all handlers from which the socket is left unread, so that TCP holds the broker back, until half of
them are handled. Mosquitto 2.0.11 keeps to our Receive Maximum only until the first acknowledgement; amqtt ignores
it."""


@dataclass(slots=True)
class Delivery:
    """An inbound message, acknowledged once all `n_open` matching handlers are done."""

    message: Inbound
    packet_id: int
    connection: Connection
    n_open: int

    def mark_handled(self) -> None:
        """Record that one of the message's handlers is done."""
        self.n_open -= 1
        if self.n_open == 0 and self.packet_id:
            self.connection.acknowledge(self.packet_id)


class Subscription:
    """A topic filter, its handler, and a bounded queue of messages."""

    def __init__(
        self,
        topic_filter: str,
        handler: Handler,
        drained: Callable[[int], None],
        lines: Lines,
        refused: Callable[[str], None] | None = None,
    ) -> None:
        self.topic_filter = topic_filter
        self.refused = refused
        self.held_bytes = 0
        self._handler = handler
        self._drained = drained
        self._lines = lines
        self._queue: deque[Delivery] = deque()
        self._wake = asyncio.Event()
        self.task: asyncio.Task[None] | None = None

    def accept(self, delivery: Delivery) -> bool:
        """Queue a message; return False, without queueing it, if the handler is too far behind."""
        size = len(delivery.message.payload)
        if len(self._queue) >= HELD_MESSAGES or self.held_bytes + size > HELD_BYTES:
            return False
        self._queue.append(delivery)
        self.held_bytes += size
        self._wake.set()
        return True

    async def serve(self) -> None:
        """Pass the messages to the handler one at a time, in order. When cancelled, waiting ones count as handled."""
        try:
            while True:
                while self._queue:
                    await self._handle(self._queue[0].message)
                    self._drop_first()
                self._wake.clear()
                await self._wake.wait()
        finally:
            while self._queue:
                self._drop_first()

    def _drop_first(self) -> None:
        delivery = self._queue.popleft()
        self.held_bytes -= len(delivery.message.payload)
        delivery.mark_handled()
        self._drained(len(delivery.message.payload))

    async def _handle(self, message: Inbound) -> None:
        try:
            await self._handler(message)
        except ProtocolError as error:
            self._lines.warning(log, "event=refused name=%s topic=%s detail=%s", error.name, message.topic, error)


class Subscriptions:
    """All subscriptions of a transport. When too much waits for their handlers, the socket is left unread."""

    def __init__(self) -> None:
        self._by_filter: dict[str, Subscription] = {}
        self._by_topic = MQTTMatcher()  # type: ignore[no-untyped-call]
        self._lines = Lines()
        self._paused: Connection | None = None
        self.held_bytes = 0
        """Payload bytes that wait for all handlers."""
        self.bytes_received = 0
        self.messages_dropped = 0

    def __iter__(self) -> Iterator[Subscription]:
        return iter(self._by_filter.values())

    def add(self, topic_filter: str, handler: Handler, refused: Callable[[str], None] | None) -> Subscription:
        """Pass matching messages to `handler` from now on.

        Raises:
            ValueError: the filter is already subscribed to.
        """
        if topic_filter in self._by_filter:
            raise ValueError(f"{topic_filter} is already subscribed to")
        subscription = Subscription(topic_filter, handler, self._record_drained, self._lines, refused)
        self._by_filter[topic_filter] = self._by_topic[strip_share(topic_filter)] = subscription
        return subscription

    def remove(self, topic_filter: str) -> Subscription | None:
        """Remove and return a filter's subscription, whose handler gets no more messages; None for unknown filters."""
        subscription = self._by_filter.pop(topic_filter, None)
        if subscription is not None:
            del self._by_topic[strip_share(topic_filter)]  # type: ignore[no-untyped-call]
        return subscription

    def _record_drained(self, n_bytes: int) -> None:
        self.held_bytes -= n_bytes
        if self._paused is not None and self.held_bytes <= PAUSE_BYTES // 2:
            self._paused.resume()

    def deliver(self, message: Inbound, packet_id: int, connection: Connection) -> None:
        """Queue an inbound message for every matching handler."""
        self.bytes_received += len(message.payload)
        takers: list[Subscription] = [*self._by_topic.iter_match(message.topic)]  # type: ignore[no-untyped-call]
        delivery = Delivery(message, packet_id, connection, n_open=len(takers) + 1)
        for subscription in takers:
            if subscription.accept(delivery):
                self.held_bytes += len(message.payload)
            else:
                self.messages_dropped += 1
                name = strip_share(subscription.topic_filter)  # its group is a secret
                self._lines.warning(log, "event=dropped topic=%s filter=%s", message.topic, name)
                delivery.mark_handled()
        if self.held_bytes > PAUSE_BYTES:
            self._paused = connection
            connection.pause()
        delivery.mark_handled()  # our own hold, so that messages that nobody wants are acknowledged at once
