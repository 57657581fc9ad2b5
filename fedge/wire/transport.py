"""MQTT for asyncio: paho-mqtt driven by the event loop, without its thread.

One `Transport` lives as long as its process; below it, one `_Connection` (one paho client) lives as long as one TCP
connection. The transport keeps what must outlive a connection: subscriptions and publishes without acknowledgement.
MQTT 5 is tried first, then 3.1.1 if the broker does not answer.

Delivery is at least once in both directions, and a broker may drop anything: users of this module repeat what matters
until it is answered. paho ignores the server's Maximum Packet Size and Receive Maximum, so both are enforced here.

Limits, worst case per process: `OUT_WINDOW` outgoing chunks of 512 KiB, `IN_WINDOW` incoming unacknowledged ones
(MQTT 5), and `HELD_BYTES` for each subscription whose handler is too slow for a sender that ignores windows.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import re
import ssl
import sys
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final, Self

import paho.mqtt.client as paho
from paho.mqtt.enums import MQTTProtocolVersion
from paho.mqtt.matcher import MQTTMatcher
from paho.mqtt.packettypes import PacketTypes
from paho.mqtt.properties import Properties
from paho.mqtt.reasoncodes import ReasonCode

from fedge.errors import ConfigError, ProtocolError, TooLargeError, TransportError
from fedge.identity.authority import trouble_with
from fedge.identity.tls import client_tls
from fedge.system.background import first_failure, in_daemon
from fedge.system.logs import Lines
from fedge.system.malloc import tune_malloc
from fedge.system.text import host_and_port
from fedge.wire.paho import Client
from fedge.wire.reasons import AGAIN, MEANINGS, NO_QOS, NO_SHARES, TAKEN_OVER, TOO_LARGE, in_words, lacking, meaning
from fedge.wire.route import Address, Proxy, ProxyError, other_than_mqtt, outage
from fedge.wire.topics import below, unshared, without

log = logging.getLogger("fedge.transport")

OUT_WINDOW: Final = 8
"""Unacknowledged publishes, unless the server's Receive Maximum is smaller. More gained nothing."""
IN_WINDOW: Final = 20
"""Our Receive Maximum: messages the broker may send before a handler has finished. Mosquitto's own limit is 20."""
MAX_INBOUND_BYTES: Final = 1024 * 1024
"""Our Maximum Packet Size: twice the largest chunk. Protects the memory of a small device."""
HELD_MESSAGES: Final = 256
HELD_BYTES: Final = 16 * 1024 * 1024
"""What waits for one handler, at most. Only QoS 0 floods and brokers without flow control (amqtt) can exceed it."""
PAUSE_BYTES: Final = 8 * 1024 * 1024
"""What waits for all handlers before the socket is left unread, so that TCP holds the broker back: Mosquitto 2.0.11
keeps our Receive Maximum only until the first acknowledgement, and amqtt knows none. Read again below half of it."""
LARGE_CHUNK: Final = 512 * 1024
SMALL_CHUNK: Final = 64 * 1024
"""Chunks where the broker announces no limit: nearly any broker takes 64 KiB; others are found out."""
PACKET_OVERHEAD: Final = 1024
"""Kept free of a packet for its header, topic and properties."""
LEAST_PACKET: Final = 4096
"""A broker that takes no such packet is refused: signed messages and certificates need as much."""
BROKE_UNDER: Final = 2
"""After so many connections in a row that broke under a chunk, chunks are halved: some brokers only hang up."""
CONNECT_TIMEOUT_S: Final = 10.0
"""Time for TCP, TLS and CONNACK each: a slow mobile link needs seconds for the TLS handshake alone."""
SILENCE_S: Final = 2.0
"""A broker that knows no MQTT 5 may leave our CONNECT without an answer (amqtt does); then 3.1.1 is tried."""
BACKOFF_BASE_S: Final = 0.25
BACKOFF_CAP_S: Final = 10.0
"""A restarted broker is found within seconds, and a thousand agents do not come back in one instant (full jitter)."""
SHORT_SESSION_S: Final = 300
"""How long the broker keeps what comes for a process that is away, if the next one has another client id."""
MISC_INTERVAL_S: Final = 1.0
"""How often the keep-alive is looked at; the smallest keep-alive is a second."""

SLOW_AFTER: Final = 3
SLOW_RETRY_S: Final = 60.0
"""After so many early closes a broker is asked again every 30 to 60 s: somebody must change something."""
CLOSED_EARLY: Final = "the broker closed the connection before it let us in"
CHECK_TLS: Final = (
    "over TLS a broker does so when it requires a client certificate (require_certificate) and gets none, or one that "
    "is expired or not signed by the CA that it trusts (cafile): check cert_file and key_file here and its own log"
)
CHECK_WEB: Final = (
    "check that this port speaks HTTP, which carries WebSockets (a port for plain MQTT is given without ws://), that "
    "the broker has room for one more (max_connections), and its log"
)
CHECK_REVOKED: Final = (
    "the federation's authority has revoked the certificate in cert_file: ask for a new start-up kit (fedge provision "
    "device), and enrol this machine with it"
)
CHECK_PLAIN: Final = (
    "check that this port speaks MQTT without TLS (with TLS, ca_file is needed), that the broker has room for one more "
    "(max_connections), and its log"
)

THROWN_OFF: Final = 3
"""After so many connections in a row that broke at once, the log says what that usually means; for a reason that trying
again does not cure, the transport ends."""
CHECK_TWICE: Final = (
    "a broker closes at once on one of two that have one client id: look for another process that speaks as this one, "
    "such as two devices of one --id, or one that was started twice"
)
CHECK_SENT: Final = (
    "a broker also hangs up, in place of an answer, on a message that its access list forbids or that is too large for "
    "it. See its log; unanswered were"
)

TOLD: Final = 3
"""Messages that a line of the log names."""
UNTOLD: Final = frozenset({0, 0x80, 0x81, 0x82, 0x83})
"""Codes of a connection's end that say nothing of its cause."""
AGAIN_S: Final = 1.0
"""Pause before a message that a busy broker did not take goes out again."""

LOST: Final = "the connection broke"
NO_ANSWER: Final = "nobody answered within the keep-alive: the network between us and the broker is gone, or it hangs"
NOT_MQTT: Final = "what came is neither MQTT 5 nor 3.1.1"
SILENT: Final = "nothing answers in MQTT (no CONNACK)"

_ALERT: Final = re.compile(r" alert ([a-z ]+) \(")
"""What a broker says when it ends TLS, in OpenSSL's words."""
_REVOKED: Final = "certificate revoked"
OTHER_NAME: Final = frozenset({62, 64})
"""OpenSSL's codes of a certificate that does not have this name or address."""

Handler = Callable[["Inbound"], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class BrokerSettings:
    """The broker's address and credentials. TLS is used if `ca_file` is given; cert and key identify this client.

    path, secure: as of `Address`. A `secure` broker is over TLS without `ca_file`, too; it is trusted as the system
    trusts web servers.
    topic_prefix: levels before all our topics at this broker. Nobody but the transport sees it.
    client_prefix: before our client id.
    """

    host: str
    port: int = 1883
    username: str | None = None
    password: str | None = field(default=None, repr=False)
    ca_file: str | None = None
    cert_file: str | None = None
    key_file: str | None = None
    keepalive_s: int = 30
    path: str | None = None
    secure: bool = False
    proxy: Proxy | None = None
    topic_prefix: str = ""
    client_prefix: str = ""

    @property
    def address(self) -> Address:
        """Where the broker listens."""
        return Address(self.host, self.port, self.path, self.secure)

    def tls(self) -> ssl.SSLContext | None:
        """What the files make; None: no TLS.

        Raises:
            ConfigError: one of them is unusable.
        """
        if self.ca_file is None and not self.secure:
            return None
        return client_tls(self.ca_file, self.cert_file, self.key_file)


@dataclass(frozen=True, slots=True)
class Inbound:
    """A message from the broker. `retained`: it was there before we subscribed.

    A request names a topic for its answer, and data to return with it (MQTT 5 only). One that is not below our topic
    prefix begins with `OUTSIDE`.
    """

    topic: str
    payload: bytes
    retained: bool
    response_topic: str | None = None
    correlation: bytes | None = None


@dataclass(frozen=True, slots=True)
class Will:
    """What the broker publishes for us (QoS 1, retained) after we vanish for `delay_s` (MQTT 5; 3.1.1: at once)."""

    topic: str
    payload: bytes
    delay_s: int = 10


def backoff_s(attempt: int, draw: float) -> float:
    """Full jitter: the wait before attempt 1, 2, ... in [0, min(cap, base * 2^attempt)); draw in [0, 1)."""
    return draw * min(BACKOFF_CAP_S, BACKOFF_BASE_S * 2.0 ** min(attempt, 16))


def chunk_bytes_for(max_packet_bytes: int | None) -> int:
    """Chunk payload size under the broker's packet limit, at least `LEAST_PACKET` (None: no limit announced)."""
    return SMALL_CHUNK if max_packet_bytes is None else min(LARGE_CHUNK, max_packet_bytes - PACKET_OVERHEAD)


# ------------------------------------------------------------------------------------------------ what waits to go out


@dataclass(slots=True, eq=False)
class _Publish:
    """An outgoing message. The broker's acknowledgement resolves `done`."""

    topic: str
    payload: bytes
    retain: bool
    expires_in_s: int | None
    correlation: bytes | None
    done: asyncio.Future[None]
    chunk: bool = False
    """Whether its caller can send the same in smaller pieces."""
    number: int = 0
    """Of the transport's messages, in the order of its callers."""

    @property
    def packet_bytes(self) -> int:
        # Fixed header 5, topic length 2, packet id 2, properties 9, and 3 more for an answer.
        return len(self.payload) + len(self.topic.encode()) + len(self.correlation or b"") + 21


class Window:
    """Publishes in order, at most `limit` of them unacknowledged. No IO: packet ids come from outside.

    A permit belongs to the packet, not to the caller, and returns with the acknowledgement: cancelling the caller of a
    publish in flight neither leaks the permit nor lends it out twice.
    """

    def __init__(self) -> None:
        self.limit = OUT_WINDOW
        self._waiting: deque[_Publish] = deque()
        self._in_flight: dict[int, _Publish] = {}

    def __len__(self) -> int:
        return len(self._waiting) + len(self._in_flight)

    def add(self, publish: _Publish) -> None:
        """Queue a publish at the end."""
        self._waiting.append(publish)

    def next(self) -> _Publish | None:
        """Take the next publish that may go out, if any; those whose caller gave up are skipped."""
        while self._waiting and len(self._in_flight) < self.limit:
            publish = self._waiting.popleft()
            if not publish.done.done():
                return publish
        return None

    def sent(self, packet_id: int, publish: _Publish) -> None:
        """Record that the publish went out under this id."""
        self._in_flight[packet_id] = publish

    def acknowledged(self, packet_id: int) -> _Publish | None:
        """Return a packet's permit; None if the id is unknown."""
        return self._in_flight.pop(packet_id, None)

    @property
    def in_flight(self) -> tuple[_Publish, ...]:
        """What went out and was not acknowledged, in order."""
        return tuple(self._in_flight.values())

    def again(self, publish: _Publish) -> None:
        """Send an acknowledged publish first of all once more: the broker did not take it."""
        self._waiting.appendleft(publish)

    def lost(self) -> None:
        """The connection is lost: unacknowledged publishes go first on the next one."""
        self._waiting.extendleft(p for p in reversed(self._in_flight.values()) if not p.done.done())
        self._in_flight.clear()


# --------------------------------------------------------------------------------------------------- what comes in


@dataclass(slots=True)
class _Delivery:
    """An inbound message, acknowledged once all `n_open` matching handlers are done."""

    message: Inbound
    packet_id: int
    connection: _Connection
    n_open: int

    def handled(self) -> None:
        self.n_open -= 1
        if self.n_open == 0 and self.packet_id:
            self.connection.acknowledge(self.packet_id)


class _Subscription:
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
        self._queue: deque[_Delivery] = deque()
        self._wake = asyncio.Event()
        self.task: asyncio.Task[None] | None = None

    def accept(self, delivery: _Delivery) -> bool:
        """Queue a message; False (and not queued) if the handler is too far behind."""
        size = len(delivery.message.payload)
        if len(self._queue) >= HELD_MESSAGES or self.held_bytes + size > HELD_BYTES:
            return False
        self._queue.append(delivery)
        self.held_bytes += size
        self._wake.set()
        return True

    async def serve(self) -> None:
        """Pass on the messages one at a time, in order. When cancelled, waiting ones count as handled."""
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
        delivery.handled()
        self._drained(len(delivery.message.payload))

    async def _handle(self, message: Inbound) -> None:
        try:
            await self._handler(message)
        except ProtocolError as error:
            self._lines.warning(log, "event=refused name=%s topic=%s detail=%s", error.name, message.topic, error)


# --------------------------------------------------------------------------------------------------- one connection


class _RefusedError(Exception):
    """The broker refused us.

    final: it always will. older: it may know MQTT 3.1.1 alone. closed_early: it gave no reason. alien: it may be none.
    """

    def __init__(
        self,
        reason: str,
        *,
        final: bool = False,
        older: bool = False,
        closed_early: bool = False,
        alien: bool = False,
    ) -> None:
        super().__init__(reason)
        self.final = final
        self.older = older or closed_early
        self.closed_early = closed_early
        self.alien = alien or closed_early


class _NotGrantedError(Exception):
    """The broker refused a subscription with this code."""

    def __init__(self, reason: str, code: int) -> None:
        super().__init__(reason)
        self.code = code


@dataclass(frozen=True, slots=True)
class _Ending:
    """Why a connection ended. `code`: the broker's (DISCONNECT of MQTT 5); 0: it said nothing."""

    reason: str
    code: int = 0
    final: bool = False


class _Connection:
    """One TCP connection: a paho client whose socket the event loop watches. Never reused once closed."""

    def __init__(self, transport: Transport, protocol: MQTTProtocolVersion, *, clean: bool) -> None:
        self._transport = transport
        self._loop = asyncio.get_running_loop()
        self.protocol = protocol
        self._clean = clean
        self._paused = False
        self.shares = True  # whether group subscriptions are shared; otherwise the client gets all messages
        self._awaits_room = False
        self._connack: asyncio.Future[Properties | None] = self._loop.create_future()
        self.closed: asyncio.Future[_Ending] = self._loop.create_future()
        self._grants: dict[int, asyncio.Future[None]] = {}
        self._client = self._make_client()

    @property
    def is_v5(self) -> bool:
        return self.protocol is MQTTProtocolVersion.MQTTv5

    def _make_client(self) -> paho.Client:
        settings, will = self._transport.settings, self._transport.will
        client = Client(
            settings.address,
            settings.proxy,
            self._transport.client_id,
            protocol=self.protocol,
            clean_session=None if self.is_v5 else True,
            reconnect_on_failure=False,
            manual_ack=True,
        )
        client.connect_timeout = CONNECT_TIMEOUT_S
        client.max_inflight_messages = 0  # we use our own window
        if settings.username is not None:
            client.username_pw_set(settings.username, settings.password)
        if (tls := settings.tls()) is not None:
            client.tls_set_context(tls)
        if will is not None:
            if self._transport.door is not None:
                self._transport.door(will.topic, will.payload)
            properties = self._properties(PacketTypes.WILLMESSAGE, WillDelayInterval=will.delay_s)
            topic = below(settings.topic_prefix, will.topic)
            client.will_set(topic, will.payload, qos=1, retain=True, properties=properties)
        client.on_log = self._on_log
        client.on_connect = self._on_connect
        client.on_disconnect = self._on_disconnect
        client.on_message = self._on_message
        client.on_publish = self._on_publish
        client.on_subscribe = self._on_subscribe
        return client

    def _properties(self, packet: int, **values: int | bytes | None) -> Properties | None:
        given = {name: value for name, value in values.items() if value is not None}
        if not self.is_v5 or not given:
            return None
        properties = Properties(packet)  # type: ignore[no-untyped-call]
        for name, value in given.items():
            setattr(properties, name, value)
        return properties

    # ------------------------------------------------------------------------------------------------- life

    async def open(self) -> Properties | None:
        """Connect and wait for CONNACK; returns its properties."""
        connecting = in_daemon(self._connect, self._drop_socket)
        try:
            await asyncio.shield(connecting)
        except asyncio.CancelledError:
            connecting.add_done_callback(self._forget)
            raise
        self._watch()
        try:
            async with asyncio.timeout(SILENCE_S if self.is_v5 else CONNECT_TIMEOUT_S):
                return await self._connack
        except TimeoutError as error:
            self.close(_Ending(SILENT))
            raise _RefusedError(SILENT, older=True, alien=True) from error
        except BaseException:
            self.close(_Ending("refused"))
            raise

    def _connect(self) -> None:
        """Blocking TCP and TLS handshake; runs in a thread, before the loop watches the socket."""
        settings = self._transport.settings
        self._client.connect(
            settings.address.name,
            settings.port,
            settings.keepalive_s,
            clean_start=self._clean if self.is_v5 else paho.MQTT_CLEAN_START_FIRST_ONLY,
            properties=self._properties(
                PacketTypes.CONNECT,
                SessionExpiryInterval=self._transport.session_expiry_s,
                ReceiveMaximum=IN_WINDOW,
                MaximumPacketSize=MAX_INBOUND_BYTES,
            ),
        )

    def _forget(self, connecting: asyncio.Future[None]) -> None:
        """Drop a connection attempt that nobody waits for any more."""
        if connecting.exception() is None:
            self._drop_socket()

    def _drop_socket(self) -> None:
        sock = self._client.socket()
        if sock is not None:
            sock.close()

    def _watch(self) -> None:
        sock = self._client.socket()
        if sock is None:
            self.close(_Ending("closed while connecting"))
            return
        self._client.on_socket_close = self._on_socket_close
        self._client.on_socket_register_write = self._on_register_write
        self._client.on_socket_unregister_write = self._on_unregister_write
        self._loop.add_reader(sock, self._read)
        self._flush()
        self._loop.call_later(MISC_INTERVAL_S, self._misc)

    def _read(self) -> None:
        self._client.loop_read()
        while _has_more(self._client.socket()):  # buffered bytes no longer wake the loop
            self._client.loop_read()

    def pause(self) -> None:
        """Stop reading, leaving incoming data to TCP until `resume`."""
        sock = self._client.socket()
        if not self._paused and sock is not None and not self.closed.done():
            self._paused = True
            self._loop.remove_reader(sock)

    def resume(self) -> None:
        sock = self._client.socket()
        if self._paused and sock is not None and not self.closed.done():
            self._paused = False
            self._loop.add_reader(sock, self._read)
            if _has_more(sock):
                self._loop.call_soon(self._read)

    def _misc(self) -> None:
        if not self.closed.done():
            self._client.loop_misc()
            self._loop.call_later(MISC_INTERVAL_S, self._misc)

    async def disconnect(self) -> None:
        """Disconnect cleanly: the will is not published, and the broker drops the session."""
        if not self.closed.done():
            self._client.disconnect(properties=self._properties(PacketTypes.DISCONNECT, SessionExpiryInterval=0))
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(CONNECT_TIMEOUT_S):
                    await asyncio.shield(self.closed)
        self.close(_Ending("disconnected"))

    def close(self, ending: _Ending, *, closed_early: bool = False) -> None:
        """Release the socket and fail all waiters; no effect if already closed."""
        if self.closed.done():
            return
        self.closed.set_result(ending)
        sock = self._client.socket()
        if sock is not None:
            self._unwatch(sock)
            self._loop.call_soon(self._drop_socket)  # paho, which may have called us, still uses it for a few lines
        if not self._connack.done():
            self._connack.set_exception(_RefusedError(ending.reason, closed_early=closed_early))
            self._connack.exception()  # nobody may be waiting
        for grant in self._grants.values():
            grant.cancel()

    # ---------------------------------------------------------------------------------------------- packets

    def send(self, publish: _Publish) -> int:
        values = {"MessageExpiryInterval": publish.expires_in_s, "CorrelationData": publish.correlation}
        properties = self._properties(PacketTypes.PUBLISH, **values)
        while True:
            info = self._client.publish(publish.topic, publish.payload, 1, publish.retain, properties)
            if info.rc != paho.MQTT_ERR_QUEUE_SIZE:  # otherwise this packet id is still in flight: try the next
                return info.mid

    def acknowledge(self, packet_id: int) -> None:
        if not self.closed.done():
            self._client.ack(packet_id, 1)

    async def subscribe(self, topic_filter: str) -> None:
        """Subscribe and wait for the grant.

        Raises:
            TransportError: the broker refused the filter.
        """
        try:
            await self._ask_for(topic_filter)
        except _NotGrantedError as error:
            if error.code in AGAIN:  # it is asked once more on the next connection
                self.close(_Ending(str(error)))
            elif error.code == NO_SHARES and self.shares:
                self.shares = False
                await self.subscribe(topic_filter)
            else:
                raise TransportError(str(error)) from error

    async def _ask_for(self, topic_filter: str) -> None:
        _, packet_id = self._client.subscribe(self._name(topic_filter), qos=1)
        if packet_id is None or self.closed.done():
            return
        grant = self._grants[packet_id] = self._loop.create_future()
        try:
            await asyncio.wait((grant, self.closed), return_when=asyncio.FIRST_COMPLETED)
        finally:
            del self._grants[packet_id]
        if grant.done() and not grant.cancelled():
            grant.result()

    def unsubscribe(self, topic_filter: str) -> None:
        """Unsubscribe without waiting for the answer: TCP keeps the order if the filter is subscribed to again."""
        self._client.unsubscribe(self._name(topic_filter))

    def _name(self, topic_filter: str) -> str:
        """A filter's name at this broker."""
        name = topic_filter if self.shares else unshared(topic_filter)
        return below(self._transport.settings.topic_prefix, name)

    # ----------------------------------------------------------------------------- callbacks, all on the loop

    def _on_connect(
        self, _client: paho.Client, _user: object, _flags: object, reason: ReasonCode, properties: Properties | None
    ) -> None:
        if self._connack.done():
            return
        self._client.on_log = None
        if reason.is_failure:
            what = meaning(reason)
            refusal = _RefusedError(in_words(reason, properties), final=what.final, older=what.older)
            self._connack.set_exception(refusal)
        else:
            self._connack.set_result(properties)

    def _on_disconnect(
        self,
        _client: paho.Client,
        _user: object,
        flags: paho.DisconnectFlags,
        reason: ReasonCode,
        properties: Properties | None,
    ) -> None:
        if flags.is_disconnect_packet_from_server:
            self.close(_Ending(in_words(reason, properties), reason.value, meaning(reason).final))
        elif str(reason) == "Protocol error":
            self.close(_Ending(NOT_MQTT), closed_early=True)
        elif not self._connack.done():  # paho's reason is "Unspecified error"
            alert = self._transport.alert
            self.close(_Ending(f"{CLOSED_EARLY}: {alert}" if alert else CLOSED_EARLY), closed_early=True)
        else:
            self.close(_Ending(NO_ANSWER if str(reason) == "Keep alive timeout" else LOST))

    def _on_log(self, _client: paho.Client, _user: object, _level: int, text: str) -> None:
        """Note why the broker ends TLS, which paho tells nowhere else."""
        if found := _ALERT.search(text):
            self._transport.alert = found[1]

    def _on_message(self, _client: paho.Client, _user: object, message: paho.MQTTMessage) -> None:
        try:
            topic = message.topic
        except UnicodeDecodeError:
            return
        prefix, answer = self._transport.settings.topic_prefix, getattr(message.properties, "ResponseTopic", None)
        inbound = Inbound(
            without(prefix, topic),
            bytes(message.payload),
            message.retain,
            None if answer is None else without(prefix, answer),
            getattr(message.properties, "CorrelationData", None),
        )
        self._transport.deliver(inbound, message.mid if message.qos else 0, self)

    def _on_publish(
        self, _client: paho.Client, _user: object, packet_id: int, reason: ReasonCode, properties: Properties
    ) -> None:
        self._transport.acknowledged(packet_id, reason, properties)

    def _on_subscribe(
        self, _client: paho.Client, _user: object, packet_id: int, reasons: list[ReasonCode], properties: Properties
    ) -> None:
        grant = self._grants.get(packet_id)
        if grant is None or grant.done():
            return
        reason = reasons[0]  # one filter in each packet
        if reason.is_failure:
            said = f"subscription refused: {in_words(reason, properties)}"
            grant.set_exception(_NotGrantedError(said, reason.value))
        elif reason.value == 0:
            grant.set_exception(_NotGrantedError(f"subscription refused: {MEANINGS[NO_QOS].do}", NO_QOS))
        else:
            grant.set_result(None)

    def _on_socket_close(self, _client: paho.Client, _user: object, sock: Any) -> None:
        if not self.closed.done():
            self._unwatch(sock)

    def _on_register_write(self, _client: paho.Client, _user: object, _sock: Any) -> None:
        self._loop.call_soon(self._flush)  # all of this turn's messages at once, without asking epoll first

    def _flush(self) -> None:
        """Send pending data; the rest follows when the socket has room."""
        if self.closed.done():
            return
        self._client.loop_write()
        sock = self._client.socket()
        if sock is not None and not self.closed.done() and self._client.want_write():
            self._awaits_room = True
            self._loop.add_writer(sock, self._client.loop_write)

    def _on_unregister_write(self, _client: paho.Client, _user: object, sock: Any) -> None:
        if self._awaits_room and not self.closed.done():
            self._awaits_room = False
            self._loop.remove_writer(sock)

    def _unwatch(self, sock: Any) -> None:
        self._loop.remove_reader(sock)
        self._loop.remove_writer(sock)


def _failure(error: _RefusedError | OSError | ConfigError, settings: BrokerSettings) -> _RefusedError:
    """Why there is no connection, in words."""
    if isinstance(error, _RefusedError):
        return error
    if isinstance(error, ssl.SSLCertVerificationError):
        reason = f"certificate: {error.verify_message}"
        if error.verify_code in OTHER_NAME:
            reason += f" (the broker's certificate does not name {settings.host}: call it as its certificate does)"
        return _RefusedError(reason, final=True)
    if isinstance(error, ProxyError):
        return _RefusedError(str(error), final=error.final)
    if isinstance(error, OSError):
        alien = isinstance(error, ssl.SSLError | paho.WebsocketConnectionError)
        return _RefusedError(outage(error, settings.host), alien=alien)
    return _RefusedError(str(error))


def _usual_check(settings: BrokerSettings) -> str:
    """Why a broker may have hung up without a word: a visible fault of our certificate, if any."""
    if settings.path is not None:
        return CHECK_WEB
    if settings.ca_file is None:
        return CHECK_PLAIN
    return ("" if settings.cert_file is None else trouble_with(settings.cert_file, settings.ca_file)) or CHECK_TLS


def _has_more(sock: Any) -> bool:
    """Whether a socket holds bytes that it has read already; of plain TCP the system holds all."""
    return bool(getattr(sock, "pending", bool)())


def _why_thrown_off(ending: _Ending, unanswered: Sequence[_Publish]) -> str:
    """What usually ends several connections in a row at once."""
    if ending.reason == NO_ANSWER or ending.code not in UNTOLD | {TAKEN_OVER}:
        return ending.reason
    if ending.code == TAKEN_OVER or not unanswered:
        return CHECK_TWICE
    sent = [f"{p.topic} ({len(p.payload)} bytes{', retained' if p.retain else ''})" for p in unanswered[:TOLD]]
    return f"{CHECK_TWICE}. {CHECK_SENT} {', '.join(sent)}"


# ----------------------------------------------------------------------------------------------------- the transport


class Transport:
    """A self-healing connection to the broker. Async context manager; all methods belong to its event loop.

    Entering connects: it waits for an absent broker and raises if the broker refuses us for good. Afterwards it
    reconnects for ever. If a handler or connect callback fails, other than with a ProtocolError (logged as
    `event=refused`, dropping the message), the `async with` body ends and the failure is raised from it.

    `door`: is called with topic and payload of everything about to leave, including the will; raises to hold it back.
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
        self.will = will
        self.session_expiry_s = session_expiry_s
        self.door = door
        self.alert = ""  # why the broker last ended TLS before it let us in; it is lost if the connection is reset
        self.bytes_sent = 0
        self.bytes_received = 0
        self.messages_dropped = 0
        self._lines = Lines()
        self.max_packet_bytes: int | None = None
        """Largest packet that the broker takes; None: it announced nothing."""
        self._chunk_limit = LARGE_CHUNK  # halved and doubled by what connections have taken (`_learn`)
        self._broke_under = 0  # connections in a row that broke under a chunk
        self.taken_bytes = 0
        """Size of the largest chunk that the broker took on this connection."""
        self._refused_bytes = sys.maxsize  # of the smallest packet that was too large
        self._unfit = ""
        self.protocol = ""
        """Of the current or last connection: "5" or "3.1.1"."""
        self._window = Window()
        self._n_published = 0
        self._retained: dict[str, int] = {}  # by topic, the number of the newest retained message that went out
        self._subscriptions: dict[str, _Subscription] = {}
        self._by_topic = MQTTMatcher()  # type: ignore[no-untyped-call]
        self._held_bytes = 0
        self._callbacks: list[Callable[[], Awaitable[None]]] = []
        self._connection: _Connection | None = None
        self._protocols = (MQTTProtocolVersion.MQTTv5, MQTTProtocolVersion.MQTTv311)
        self._was_connected = False
        self._online = asyncio.Event()
        self._tasks = asyncio.TaskGroup()
        self._supervisor: asyncio.Task[None] | None = None
        self._greeting: asyncio.Task[None] | None = None

    def speak_as(self, other: Transport) -> None:
        """Begin with the protocol that another transport to this broker has found; before entering."""
        self._protocols = other._protocols

    @property
    def connected(self) -> bool:
        """The broker has let us in and all subscriptions are in place."""
        return self._online.is_set()

    @property
    def chunk_bytes(self) -> int:
        """The chunk payload size for this broker. It is halved when a chunk is refused, and grows back slowly."""
        return min(chunk_bytes_for(self.max_packet_bytes), self._chunk_limit)

    def on_connect(self, callback: Callable[[], Awaitable[None]]) -> None:
        """Await `callback` after each (re)connect, when all subscriptions are in place. Register before entering.

        It runs in its own task and may publish; if still running at the next connection, it is cancelled and restarted.
        """
        self._callbacks.append(callback)

    # ------------------------------------------------------------------------------------------------- life

    async def __aenter__(self) -> Self:
        """Connect.

        Raises:
            TransportError: the broker refuses us for good; the text holds its reason.
        """
        tune_malloc()
        connection = await self._connect(patient=False)
        await self._tasks.__aenter__()
        for subscription in self._subscriptions.values():
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
        for task in (self._supervisor, self._greeting, *(s.task for s in self._subscriptions.values())):
            if task is not None:
                task.cancel()
        try:
            with first_failure():
                await self._tasks.__aexit__(*error)
        finally:
            self._online.clear()
            if self._connection is not None:
                await self._connection.disconnect()

    async def _supervise(self, connection: _Connection, ready: asyncio.Future[None]) -> None:
        """Bring each connection into service, wait for its end, make the next.

        Raises:
            TransportError: the broker is unfit for fedge, or ends each connection for what only a person can change.
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
            self._learn(ending, unanswered)
            self._window.lost()
            log.warning("event=disconnected client=%s reason=%r", self.client_id, ending.reason)
            # A connection that broke at once (a client id used twice) must not be retried at full speed.
            attempt = 0 if loop.time() - began > BACKOFF_CAP_S else attempt + 1
            if self._unfit or (ending.final and attempt == THROWN_OFF):
                raise TransportError(f"the broker at {self._where} disconnects us: {self._unfit or ending.reason}")
            if attempt == THROWN_OFF:
                log.error("event=thrown_off client=%s check=%r", self.client_id, _why_thrown_off(ending, unanswered))
            await asyncio.sleep(backoff_s(attempt, random.SystemRandom().random()))
            connection = await self._connect(patient=True)

    @property
    def _where(self) -> str:
        return host_and_port(self.settings.host, self.settings.port)

    def _learn(self, ending: _Ending, unanswered: Sequence[_Publish]) -> None:
        """Note what a connection that broke under these says of the broker's limits.

        If it took chunks of the present size, the next one tries the double: the cause may have been a bad network, or
        the broker may be another one by now. Where the limit is still there, that costs a refused chunk or two broken
        connections. To begin with the full size again would cost the whole way down, and to try more while a connection
        lasts could break what works.
        """
        chunk = max((len(publish.payload) for publish in unanswered if publish.chunk), default=0)
        taken = self.taken_bytes >= self.chunk_bytes
        if ending.code != TOO_LARGE:
            self._refused_bytes = sys.maxsize  # its limit may be another by now
            if taken:
                self._chunk_limit = min(LARGE_CHUNK, 2 * self._chunk_limit)
        elif unanswered:
            self._too_large(max(unanswered, key=lambda publish: publish.packet_bytes), ending.reason)
        if chunk and not taken and (ending.code in UNTOLD or ending.reason in (LOST, NOT_MQTT)):
            self._broke_under += 1
            if self._broke_under == BROKE_UNDER:
                self._halve(chunk, ending.reason)
        else:
            self._broke_under = 0

    def _too_large(self, publish: _Publish, reason: str) -> None:
        """Note that the broker refused this one for its size."""
        self._refused_bytes = min(self._refused_bytes, publish.packet_bytes)
        if publish.packet_bytes <= LEAST_PACKET:
            self._unfit = (
                f"it takes no packet of {publish.packet_bytes:,} bytes, fedge needs {LEAST_PACKET:,}; {reason}"
            )
        else:
            self._halve(len(publish.payload), reason)

    def _halve(self, n_bytes: int, reason: str) -> None:
        """Send chunks of half so many bytes at most from now on."""
        self._broke_under = 0
        if (limit := max(LEAST_PACKET - PACKET_OVERHEAD, n_bytes // 2)) < self.chunk_bytes:
            self._chunk_limit = limit
            log.warning("event=smaller_chunks broker=%s bytes=%d reason=%r", self._where, limit, reason)

    async def _take_into_service(self, connection: _Connection) -> None:
        self.taken_bytes = 0
        for topic_filter, subscription in tuple(self._subscriptions.items()):
            try:
                await connection.subscribe(topic_filter)
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

    async def _connect(self, *, patient: bool) -> _Connection:
        """Try until a broker lets us in. If not patient, a permanent refusal is raised as TransportError."""
        attempt = closed_early = 0
        told: set[str] = set()
        while True:
            attempt += 1
            try:
                return await self._connect_once()
            except (_RefusedError, OSError, ConfigError) as error:  # the last one: a file may just be renewed
                failure = _failure(error, self.settings)
            closed_early = closed_early + 1 if failure.closed_early else 0
            if failure.final and not patient:
                raise TransportError(f"the broker at {self._where} refused {self.client_id}: {failure}")
            log.warning("event=connect_failed broker=%s attempt=%d reason=%r", self._where, attempt, str(failure))
            if failure.alien and str(failure) not in told:
                told.add(str(failure))
                await self._say_what_to_check(patient=patient)
            draw = random.SystemRandom().random()
            slow = closed_early >= SLOW_AFTER
            await asyncio.sleep(SLOW_RETRY_S * (1 + draw) / 2 if slow else backoff_s(attempt, draw))

    async def _say_what_to_check(self, *, patient: bool) -> None:
        """Log why a broker may have hung up before it let us in, or answered in no MQTT.

        Raises:
            TransportError: what answers there is no broker; not if we are patient.
        """
        settings, check = self.settings, CHECK_REVOKED
        if self.alert != _REVOKED:
            check = await in_daemon(partial(other_than_mqtt, settings.address, settings.proxy, settings.tls))
            if check and not patient:
                raise TransportError(f"{self._where} does not speak MQTT with us: {check}")
        log.error("event=closed_early broker=%s check=%r", self._where, check or _usual_check(settings))

    async def _connect_once(self) -> _Connection:
        """Try the protocol that worked last (at first MQTT 5), then the other one."""
        first, second = self._protocols
        try:
            return await self._connect_with(first)
        except _RefusedError as error:
            if error.final or not error.older:
                raise
            log.info("event=fallback client=%s reason=%r", self.client_id, str(error))
        connection = await self._connect_with(second)
        self._protocols = (second, first)
        return connection

    async def _connect_with(self, protocol: MQTTProtocolVersion) -> _Connection:
        """One attempt. A process's first connection starts a clean session: queued messages are not for us."""
        connection = self._connection = _Connection(self, protocol, clean=not self._was_connected)
        properties = await connection.open()
        if lack := lacking(properties, LEAST_PACKET):
            await connection.disconnect()
            raise _RefusedError(lack, final=True)
        connection.shares = connection.is_v5 and getattr(properties, "SharedSubscriptionAvailable", 1) == 1
        self._was_connected, self.alert = True, ""
        self.protocol = "5" if connection.is_v5 else "3.1.1"
        self.max_packet_bytes = getattr(properties, "MaximumPacketSize", None)
        self._window.limit = min(OUT_WINDOW, getattr(properties, "ReceiveMaximum", OUT_WINDOW))
        log.info("event=connected client=%s protocol=%s", self.client_id, self.protocol)
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
        """Publish with QoS 1; returns when the broker has acknowledged.

        Waits while the window is full or the broker is away, if need be for ever; it survives reconnects (and may then
        arrive twice). If the caller is cancelled, a message already under way still arrives. A retained one that has to
        be sent again is dropped once a newer one of its topic went out, which would otherwise be replaced by it.

        Args:
            topic: without wildcards.
            payload: the bytes.
            retain: whether the broker keeps it for later subscribers.
            expires_in_s: seconds after which the broker drops it undelivered (MQTT 5 only).
            correlation: data that came with the request that this answers (MQTT 5 only).
            chunk: whether the caller can send the same in pieces of `chunk_bytes`, if that has become less.

        Raises:
            TooLargeError: the packet exceeds the broker's limit, as announced or found out.
            TransportError: the broker refused the message (the text holds the reason code), or the door held it back.
        """
        if self.door is not None:
            self.door(topic, payload)
        done = asyncio.get_running_loop().create_future()
        name = below(self.settings.topic_prefix, topic)
        self._n_published += 1
        publish = _Publish(name, payload, retain, expires_in_s, correlation, done, chunk, self._n_published)
        self._check_size(publish)
        self._window.add(publish)
        self._pump()
        await done
        self.bytes_sent += len(payload)

    def _pump(self) -> None:
        while self._online.is_set() and self._connection is not None:
            publish = self._window.next()
            if publish is None:
                return
            try:
                self._check_size(publish)  # again: the broker may have changed
            except TooLargeError as error:
                publish.done.set_exception(error)
                continue
            if publish.retain and publish.number < self._retained.setdefault(publish.topic, publish.number):
                publish.done.set_result(None)
                continue
            if publish.retain:
                self._retained[publish.topic] = publish.number
            self._window.sent(self._connection.send(publish), publish)

    def _check_size(self, publish: _Publish) -> None:
        size = publish.packet_bytes
        if self.max_packet_bytes is not None and size > self.max_packet_bytes:
            raise TooLargeError(
                f"{publish.topic}: packet of {size} bytes, the broker takes {self.max_packet_bytes}: "
                f"{MEANINGS[TOO_LARGE].do}"
            )
        if size >= self._refused_bytes or (publish.chunk and len(publish.payload) > self.chunk_bytes):
            raise TooLargeError(f"{publish.topic}: packet of {size} bytes; the broker refused one of that size")

    def acknowledged(self, packet_id: int, reason: ReasonCode, properties: Properties) -> None:
        """Handle a PUBACK (internal)."""
        publish = self._window.acknowledged(packet_id)
        if publish is not None and not publish.done.done():
            if not reason.is_failure:
                if publish.chunk:
                    self.taken_bytes = max(self.taken_bytes, len(publish.payload))
                publish.done.set_result(None)
            elif reason.value in AGAIN:
                log.warning("event=publish_again topic=%s reason=%r", publish.topic, in_words(reason, properties))
                asyncio.get_running_loop().call_later(AGAIN_S, self._publish_again, publish)
            else:
                self._refused(publish, reason, in_words(reason, properties))
        self._pump()

    def _refused(self, publish: _Publish, reason: ReasonCode, words: str) -> None:
        if reason.value != TOO_LARGE:
            publish.done.set_exception(TransportError(f"{publish.topic}: {words}"))
            return
        publish.done.set_exception(TooLargeError(f"{publish.topic}, packet of {publish.packet_bytes} bytes: {words}"))
        self._too_large(publish, words)
        if self._unfit and self._connection is not None:
            self._connection.close(_Ending(words))

    def _publish_again(self, publish: _Publish) -> None:
        self._window.again(publish)
        self._pump()

    # ----------------------------------------------------------------------------------------------- inwards

    async def subscribe(
        self, topic_filter: str, handler: Handler, *, refused: Callable[[str], None] | None = None
    ) -> None:
        """Have `handler` awaited for each matching message, one at a time and in order.

        A shared filter ($share/GROUP/FILTER) is used without its group if the broker does not support groups.

        A message is acknowledged when its handler returns, so a slow handler holds the broker back (at most `IN_WINDOW`
        messages of all subscriptions are open). A handler must therefore not wait for another inbound message, such as
        a whole transfer, but start a task for it. It may publish. Returns when the broker has granted it; before the
        transport is entered, at once (granted while connecting; a filter that is refused then ends the transport,
        unless `refused` takes the reason).

        Raises:
            TransportError: the broker refused the filter.
            ValueError: the filter is already subscribed to.
        """
        if topic_filter in self._subscriptions:
            raise ValueError(f"{topic_filter} is already subscribed to")
        subscription = _Subscription(topic_filter, handler, self._drained, self._lines, refused)
        self._subscriptions[topic_filter] = subscription
        self._by_topic[unshared(topic_filter)] = subscription
        if self._supervisor is None:
            return
        self._serve(subscription)
        try:
            await self._granted(topic_filter)
        except TransportError:
            await self.unsubscribe(topic_filter)
            raise

    async def _granted(self, topic_filter: str) -> None:
        """Wait until the filter is granted, on a later connection if this one breaks."""
        await self._online.wait()
        connection = self._connection
        if connection is not None:
            await connection.subscribe(topic_filter)
        await self._online.wait()

    async def unsubscribe(self, topic_filter: str) -> None:
        """Stop receiving; queued messages are dropped. Unknown filters are ignored."""
        subscription = self._subscriptions.pop(topic_filter, None)
        if subscription is None:
            return
        del self._by_topic[unshared(topic_filter)]  # type: ignore[no-untyped-call]
        if subscription.task is not None:
            subscription.task.cancel()
        if self._connection is not None and self._online.is_set():
            self._connection.unsubscribe(topic_filter)

    def _serve(self, subscription: _Subscription) -> None:
        """Start its handler.

        Raises:
            asyncio.CancelledError: the transport is at its end, and so is whoever still uses it.
        """
        serving = subscription.serve()
        try:
            subscription.task = self._tasks.create_task(serving, name=f"handler {unshared(subscription.topic_filter)}")
        except RuntimeError as error:
            serving.close()
            raise asyncio.CancelledError from error

    def _drained(self, n_bytes: int) -> None:
        self._held_bytes -= n_bytes
        if self._connection is not None and self._held_bytes <= PAUSE_BYTES // 2:
            self._connection.resume()

    def deliver(self, message: Inbound, packet_id: int, connection: _Connection) -> None:
        """Queue an inbound message for every matching handler (internal)."""
        self.bytes_received += len(message.payload)
        takers: list[_Subscription] = [*self._by_topic.iter_match(message.topic)]  # type: ignore[no-untyped-call]
        delivery = _Delivery(message, packet_id, connection, n_open=len(takers) + 1)
        for subscription in takers:
            if subscription.accept(delivery):
                self._held_bytes += len(message.payload)
            else:
                self.messages_dropped += 1
                name = unshared(subscription.topic_filter)  # its group is a secret
                self._lines.warning(log, "event=dropped topic=%s filter=%s", message.topic, name)
                delivery.handled()
        if self._held_bytes > PAUSE_BYTES:
            connection.pause()
        delivery.handled()  # our own hold: messages that nobody wants are acknowledged at once
