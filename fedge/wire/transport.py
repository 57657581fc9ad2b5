"""MQTT for asyncio: paho-mqtt driven by the event loop, without its thread.

One `Transport` lives as long as its process; below it, one `Connection` (one paho client) lives as long as one TCP
connection. The transport keeps what must outlive a connection: subscriptions and unacknowledged publishes.
MQTT 5 is tried first, then 3.1.1 if the broker does not answer.

Delivery is at least once in both directions, and a broker may drop anything. So users of this module repeat what
matters until it is answered. paho ignores the server's Maximum Packet Size and Receive Maximum, so both are enforced
here.

Memory in the worst case, per process: `OUT_WINDOW` outgoing chunks of 512 KiB, `IN_WINDOW` incoming unacknowledged
chunks (MQTT 5), and `HELD_BYTES` for each subscription whose handler is too slow for a sender that ignores windows.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable
from typing import Any, Final, Self

from paho.mqtt.properties import Properties
from paho.mqtt.reasoncodes import ReasonCode

from fedge.errors import TooLargeError, TransportError
from fedge.system.background import raise_first_failure
from fedge.system.malloc import tune_malloc
from fedge.wire.connection.broker import BrokerSettings, Caller, Handler, Inbound, Will
from fedge.wire.connection.connection import Connection
from fedge.wire.connection.connector import BACKOFF_CAP_S, Connector, compute_backoff_s
from fedge.wire.connection.packet_limits import PacketLimits
from fedge.wire.connection.reasons import AGAIN, TOO_LARGE, describe_reason
from fedge.wire.connection.refusals import Ending, explain_endings
from fedge.wire.connection.subscription import Subscription, Subscriptions
from fedge.wire.connection.window import OUT_WINDOW, Publish, Window
from fedge.wire.topics import add_prefix, strip_share

log = logging.getLogger("fedge.transport")

SHORT_SESSION_S: Final = 300
"""Session expiry for a process whose successor has another client id: how long the broker keeps messages for it."""
THROWN_OFF: Final = 3
"""Connections in a row that break at once before the log says what that usually means. If trying again cannot help, the
transport then ends."""

AGAIN_S: Final = 1.0
"""Pause before a message that a busy broker did not take is sent again."""


class Transport:
    """A self-healing connection to the broker. Async context manager; all methods belong to its event loop.

    Entering connects; it waits for an absent broker and raises if the broker refuses us for good. Afterwards the
    transport reconnects for ever. If a handler or connect callback fails, the `async with` body ends and the failure is
    raised from it. A ProtocolError is the exception: it is logged as `event=refused`, and the message is dropped.

    `door` is called with topic and payload of everything about to leave, including the will; it raises to hold the
    message back.
    """

    def __init__(
        self,
        settings: BrokerSettings,
        client_id: str,
        *,
        will: Will | None = None,
        session_expiry_s: int = 3600,
        door: Callable[[str, bytes], None] | None = None,
    ) -> None:
        self.settings = settings
        self.client_id = settings.client_prefix + client_id
        self._caller = Caller(settings, self.client_id, will, session_expiry_s, door)
        self.bytes_sent = 0
        self._limits = PacketLimits(self._caller.broker)
        self._connector = Connector(self._caller, self)
        self._window = Window()
        self._n_published = 0
        self._retained: dict[str, int] = {}  # number of the newest retained message that was sent, by topic
        self._subscriptions = Subscriptions()
        self._callbacks: list[Callable[[], Awaitable[None]]] = []
        self._online = asyncio.Event()
        self._tasks = asyncio.TaskGroup()
        self._supervisor: asyncio.Task[None] | None = None
        self._greeting: asyncio.Task[None] | None = None

    def adopt_protocol(self, other: Transport) -> None:
        """Begin with the MQTT version that another transport to this broker has found. Call it before entering."""
        self._connector.protocols = other._connector.protocols

    @property
    def _connection(self) -> Connection | None:
        return self._connector.connection

    @property
    def bytes_received(self) -> int:
        """The number of bytes of all payloads so far."""
        return self._subscriptions.bytes_received

    @property
    def messages_dropped(self) -> int:
        """The number of messages dropped because their handlers were too far behind."""
        return self._subscriptions.messages_dropped

    @property
    def connected(self) -> bool:
        """Whether the broker has let us in and all subscriptions are in place."""
        return self._online.is_set()

    @property
    def peer_certificate(self) -> bytes | None:
        """The broker's certificate (DER) as the present or last connection saw it; None without TLS."""
        return None if self._connection is None else self._connection.peer_certificate

    @property
    def chunk_bytes(self) -> int:
        """The chunk payload size in bytes, which is halved when a chunk is refused and grows back slowly."""
        return self._limits.chunk_bytes

    @property
    def max_packet_bytes(self) -> int | None:
        """The size of the largest packet that the broker takes, or None if it announced no limit."""
        return self._limits.max_packet_bytes

    @property
    def taken_bytes(self) -> int:
        """Size of the largest chunk that the broker took on this connection."""
        return self._limits.taken_bytes

    @property
    def protocol(self) -> str:
        """The MQTT version of the current or last connection: "5" or "3.1.1"."""
        return self._connector.protocol

    def on_connect(self, callback: Callable[[], Awaitable[None]]) -> None:
        """Await `callback` after each (re)connect, when all subscriptions are in place. Register before entering.

        The callback runs in its own task and may publish; if it still runs at the next connection, it is cancelled and
        restarted.
        """
        self._callbacks.append(callback)

    # ------------------------------------------------------------------------------------------------- life

    async def __aenter__(self) -> Self:
        """Connect to the broker and subscribe.

        Raises:
            TransportError: the broker refuses us for good; the text holds the broker's reason.
        """
        tune_malloc()
        connection = await self._connect(patient=False)
        await self._tasks.__aenter__()
        for subscription in self._subscriptions:
            self._serve(subscription)
        ready = asyncio.get_running_loop().create_future()
        self._supervisor = self._tasks.create_task(self._supervise(connection, ready), name="transport")
        try:
            await ready
        except BaseException as error:
            await self.__aexit__(type(error), error, error.__traceback__)
            raise
        return self

    async def __aexit__(self, *error: Any) -> None:
        for task in (self._supervisor, self._greeting, *(s.task for s in self._subscriptions)):
            if task is not None:
                task.cancel()
        try:
            with raise_first_failure():
                await self._tasks.__aexit__(*error)
        finally:
            self._online.clear()
            if self._connection is not None:
                await self._connection.disconnect()

    async def _supervise(self, connection: Connection, ready: asyncio.Future[None]) -> None:
        """Bring each connection into service, wait until it ends, and make the next one.

        Raises:
            TransportError: the broker is unfit for fedge, or ends each connection for a reason that only a person can
                change.
        """
        loop = asyncio.get_running_loop()
        attempt = 0
        while True:
            began = loop.time()
            await self._take_into_service(connection)
            if not ready.done():
                ready.set_result(None)
            ending = await asyncio.shield(connection.closed)
            self._online.clear()
            unanswered = self._window.in_flight
            self._limits.record_ending(ending, unanswered)
            self._window.record_lost()
            log.warning("event=disconnected client=%s reason=%r", self.client_id, ending.reason)
            # A connection that broke at once (a client id used twice) must not be retried at full speed.
            attempt = 0 if loop.time() - began > BACKOFF_CAP_S else attempt + 1
            if self._limits.unfit or (ending.final and attempt == THROWN_OFF):
                raise TransportError(
                    f"the broker at {self._caller.broker} disconnects us: {self._limits.unfit or ending.reason}"
                )
            if attempt == THROWN_OFF:
                log.error("event=thrown_off client=%s check=%r", self.client_id, explain_endings(ending, unanswered))
            await asyncio.sleep(compute_backoff_s(attempt, random.SystemRandom().random()))
            connection = await self._connect(patient=True)

    async def _take_into_service(self, connection: Connection) -> None:
        self._limits.taken_bytes = 0
        for subscription in tuple(self._subscriptions):
            try:
                await connection.subscribe(subscription.topic_filter)
            except TransportError as error:
                if subscription.refused is None:
                    raise
                subscription.refused(str(error))
        if connection.closed.done():
            return
        self._online.set()
        self._pump()
        if self._greeting is not None:
            self._greeting.cancel()
        self._greeting = self._tasks.create_task(self._greet(), name="transport-on-connect")

    async def _greet(self) -> None:
        for callback in self._callbacks:
            await callback()

    async def _connect(self, *, patient: bool) -> Connection:
        """Wait until the broker lets us in, and adopt the limits that it announces.

        Raises:
            TransportError: the broker refuses us for good, and `patient` is false.
        """
        connection = await self._connector.connect(patient=patient)
        self._limits.max_packet_bytes = getattr(connection.announced, "MaximumPacketSize", None)
        self._window.limit = min(OUT_WINDOW, getattr(connection.announced, "ReceiveMaximum", OUT_WINDOW))
        return connection

    # ---------------------------------------------------------------------------------------------- outwards

    async def publish(
        self,
        topic: str,
        payload: bytes,
        *,
        retain: bool = False,
        expires_in_s: int | None = None,
        correlation: bytes | None = None,
        chunk: bool = False,
    ) -> None:
        """Publish with QoS 1; return when the broker has acknowledged the message.

        This waits while the window is full or the broker is away, if need be for ever. The message survives reconnects
        and may then arrive twice. If the caller is cancelled, a message already under way still arrives. A retained
        message that must be sent again is dropped if a newer one on its topic has gone out, since it would replace the
        newer one.

        Args:
            topic: topic without wildcards.
            payload: the bytes.
            retain: whether the broker keeps the message for later subscribers.
            expires_in_s: seconds after which the broker drops the message undelivered (MQTT 5 only).
            correlation: correlation data of the request that this message answers (MQTT 5 only).
            chunk: whether the caller can send the payload in smaller pieces if `chunk_bytes` has shrunk.

        Raises:
            TooLargeError: the packet exceeds the broker's announced or detected limit.
            TransportError: the broker refused the message (the text holds the reason code), or the door held it back.
        """
        if self._caller.door is not None:
            self._caller.door(topic, payload)
        done = asyncio.get_running_loop().create_future()
        name = add_prefix(self.settings.topic_prefix, topic)
        self._n_published += 1
        publish = Publish(name, payload, retain, expires_in_s, correlation, done, chunk, self._n_published)
        self._limits.check(publish)
        self._window.add(publish)
        self._pump()
        await done
        self.bytes_sent += len(payload)

    def _pump(self) -> None:
        while self._online.is_set() and self._connection is not None:
            publish = self._window.take_next()
            if publish is None:
                return
            try:
                self._limits.check(publish)  # check again, since the broker may be another one now
            except TooLargeError as error:
                publish.done.set_exception(error)
                continue
            if publish.retain and publish.number < self._retained.setdefault(publish.topic, publish.number):
                publish.done.set_result(None)
                continue
            if publish.retain:
                self._retained[publish.topic] = publish.number
            self._window.record_sent(self._connection.send(publish), publish)

    def on_acknowledged(self, packet_id: int, reason: ReasonCode, properties: Properties) -> None:
        """Handle a PUBACK (internal)."""
        publish = self._window.take_acknowledged(packet_id)
        if publish is not None and not publish.done.done():
            if not reason.is_failure:
                self._limits.record_taken(publish)
                publish.done.set_result(None)
            elif reason.value in AGAIN:
                log.warning(
                    "event=publish_again topic=%s reason=%r", publish.topic, describe_reason(reason, properties)
                )
                asyncio.get_running_loop().call_later(AGAIN_S, self._publish_again, publish)
            else:
                self._handle_refused(publish, reason, describe_reason(reason, properties))
        self._pump()

    def _handle_refused(self, publish: Publish, reason: ReasonCode, words: str) -> None:
        if reason.value != TOO_LARGE:
            publish.done.set_exception(TransportError(f"{publish.topic}: {words}"))
            return
        publish.done.set_exception(TooLargeError(f"{publish.topic}, packet of {publish.packet_bytes} bytes: {words}"))
        self._limits.record_refused(publish, words)
        if self._limits.unfit and self._connection is not None:
            self._connection.close(Ending(words))

    def _publish_again(self, publish: Publish) -> None:
        self._window.repeat(publish)
        self._pump()

    # ----------------------------------------------------------------------------------------------- inwards

    async def subscribe(
        self, topic_filter: str, handler: Handler, *, refused: Callable[[str], None] | None = None
    ) -> None:
        """Await `handler` for each matching message, one at a time and in order.

        A shared filter ($share/GROUP/FILTER) is used without its group if the broker does not support groups.

        A message is acknowledged when its handler returns, so a slow handler holds the broker back (at most `IN_WINDOW`
        messages of all subscriptions are open). Therefore a handler must not wait for another inbound message, such as
        a whole transfer, but start a task for that. A handler may publish.

        This method returns when the broker has granted the subscription. Before the transport is entered, it returns at
        once, and the subscription is requested while connecting. If the broker then refuses it, the transport ends,
        unless `refused` is given, which is then called with the reason.

        Raises:
            TransportError: the broker refused the filter.
            ValueError: the filter is already subscribed to.
        """
        subscription = self._subscriptions.add(topic_filter, handler, refused)
        if self._supervisor is None:
            return
        self._serve(subscription)
        try:
            await self._wait_for_grant(topic_filter)
        except TransportError:
            await self.unsubscribe(topic_filter)
            raise

    async def _wait_for_grant(self, topic_filter: str) -> None:
        """Wait until the filter is granted, on a later connection if this one breaks."""
        await self._online.wait()
        connection = self._connection
        if connection is not None:
            await connection.subscribe(topic_filter)
        await self._online.wait()

    async def unsubscribe(self, topic_filter: str) -> None:
        """Stop receiving; queued messages are dropped. Unknown filters are ignored."""
        subscription = self._subscriptions.remove(topic_filter)
        if subscription is None:
            return
        if subscription.task is not None:
            subscription.task.cancel()
        if self._connection is not None and self._online.is_set():
            self._connection.unsubscribe(topic_filter)

    def _serve(self, subscription: Subscription) -> None:
        """Start the subscription's handler.

        Raises:
            asyncio.CancelledError: the transport is ending, and so must its users.
        """
        serving = subscription.serve()
        try:
            subscription.task = self._tasks.create_task(
                serving, name=f"handler {strip_share(subscription.topic_filter)}"
            )
        except RuntimeError as error:
            serving.close()
            raise asyncio.CancelledError from error

    def deliver(self, message: Inbound, packet_id: int, connection: Connection) -> None:
        """Queue an inbound message for every matching handler (internal)."""
        self._subscriptions.deliver(message, packet_id, connection)
