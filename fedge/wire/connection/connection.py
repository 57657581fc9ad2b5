"""One TCP connection: paho-mqtt driven by the event loop, without its thread."""

from __future__ import annotations

import asyncio
import contextlib
import re
from typing import Any, Final, Protocol

import paho.mqtt.client as paho
from paho.mqtt.enums import MQTTProtocolVersion
from paho.mqtt.packettypes import PacketTypes
from paho.mqtt.properties import Properties
from paho.mqtt.reasoncodes import ReasonCode

from fedge.errors import TransportError
from fedge.system.background import run_in_daemon
from fedge.wire.connection.broker import Caller, Inbound
from fedge.wire.connection.paho import Client
from fedge.wire.connection.reasons import AGAIN, MEANINGS, NO_QOS, NO_SHARES, describe_reason, find_meaning
from fedge.wire.connection.refusals import CLOSED_EARLY, LOST, NO_ANSWER, NOT_MQTT, SILENT, Ending, RefusedError
from fedge.wire.connection.window import Publish
from fedge.wire.topics import add_prefix, remove_prefix, strip_share

IN_WINDOW: Final = 20
"""Our Receive Maximum: most messages that the broker may send before their handlers have finished. Mosquitto's own
limit is 20."""
MAX_INBOUND_BYTES: Final = 1024 * 1024
"""Our Maximum Packet Size: twice the largest chunk. It protects the memory of a small device."""
CONNECT_TIMEOUT_S: Final = 10.0
"""Time limit for each of TCP, TLS and CONNACK; a slow mobile link needs seconds for the TLS handshake alone."""
SILENCE_S: Final = 2.0
"""Wait for an answer to our MQTT 5 CONNECT before MQTT 3.1.1 is tried. A broker that knows no MQTT 5 may not answer at
all (amqtt does not)."""
MISC_INTERVAL_S: Final = 1.0
"""Pause between two checks of the keep-alive, which is at least a second."""
_ALERT: Final = re.compile(r" alert ([a-z ]+) \(")
"""Pattern of the TLS alert with which a broker ends TLS, as OpenSSL words it."""


class NotGrantedError(Exception):
    """The broker refused a subscription; `code` is its reason code."""

    def __init__(self, reason: str, code: int) -> None:
        super().__init__(reason)
        self.code = code


class Owner(Protocol):
    """The callbacks through which a connection passes on what it receives."""

    def deliver(self, message: Inbound, packet_id: int, connection: Connection) -> None:
        """Handle a message, then call `Connection.acknowledge`, which tells the broker that it is handled."""

    def on_acknowledged(self, packet_id: int, reason: ReasonCode, properties: Properties) -> None:
        """Handle a PUBACK."""


class Connection:
    """One TCP connection: a paho client whose socket the event loop watches. Never reused once closed."""

    def __init__(self, caller: Caller, owner: Owner, protocol: MQTTProtocolVersion, *, clean: bool) -> None:
        self._caller = caller
        self._owner = owner
        self._loop = asyncio.get_running_loop()
        self.protocol = protocol
        self._clean = clean
        self._paused = False
        self.announced: Properties | None = None
        """The properties of the broker's CONNACK, in MQTT 5."""
        self.shares = True  # whether the broker shares group subscriptions; otherwise this client gets all messages
        self._awaits_room = False
        self._connack: asyncio.Future[Properties | None] = self._loop.create_future()
        self.closed: asyncio.Future[Ending] = self._loop.create_future()
        self._grants: dict[int, asyncio.Future[None]] = {}
        self._client = self._make_client()

    @property
    def is_v5(self) -> bool:
        """Whether the connection speaks MQTT 5."""
        return self.protocol is MQTTProtocolVersion.MQTTv5

    @property
    def peer_certificate(self) -> bytes | None:
        """The broker's certificate (DER); None without TLS."""
        return self._client.peer_certificate

    def _make_client(self) -> Client:
        settings, will = self._caller.settings, self._caller.will
        client = Client(
            settings.address,
            settings.proxy,
            self._caller.client_id,
            protocol=self.protocol,
            clean_session=None if self.is_v5 else True,
            reconnect_on_failure=False,
            manual_ack=True,
        )
        client.connect_timeout = CONNECT_TIMEOUT_S
        client.max_inflight_messages = 0  # we use our own window
        if settings.username is not None:
            client.username_pw_set(settings.username, settings.password)
        if (tls := settings.make_tls()) is not None:
            client.tls_set_context(tls)
        if will is not None:
            if self._caller.door is not None:
                self._caller.door(will.topic, will.payload)
            properties = self._make_properties(PacketTypes.WILLMESSAGE, WillDelayInterval=will.delay_s)
            topic = add_prefix(settings.topic_prefix, will.topic)
            client.will_set(topic, will.payload, qos=1, retain=True, properties=properties)
        client.on_log = self._on_log
        client.on_connect = self._on_connect
        client.on_disconnect = self._on_disconnect
        client.on_message = self._on_message
        client.on_publish = self._on_publish
        client.on_subscribe = self._on_subscribe
        return client

    def _make_properties(self, packet: int, **values: int | bytes | None) -> Properties | None:
        given = {name: value for name, value in values.items() if value is not None}
        if not self.is_v5 or not given:
            return None
        properties = Properties(packet)  # type: ignore[no-untyped-call]
        for name, value in given.items():
            setattr(properties, name, value)
        return properties

    # ------------------------------------------------------------------------------------------------- life

    async def open(self) -> None:
        """Connect and wait for CONNACK."""
        connecting = run_in_daemon(self._connect, self._drop_socket)
        try:
            await asyncio.shield(connecting)
        except asyncio.CancelledError:
            connecting.add_done_callback(self._forget)
            raise
        self._watch()
        try:
            async with asyncio.timeout(SILENCE_S if self.is_v5 else CONNECT_TIMEOUT_S):
                self.announced = await self._connack
        except TimeoutError as error:
            self.close(Ending(SILENT))
            raise RefusedError(SILENT, older=True, alien=True) from error
        except BaseException:
            self.close(Ending("refused"))
            raise
        self.shares = self.is_v5 and getattr(self.announced, "SharedSubscriptionAvailable", 1) == 1

    def _connect(self) -> None:
        """Connect, including TCP and TLS handshake, before the loop watches the socket. Blocks, so runs in a thread."""
        settings = self._caller.settings
        self._client.connect(
            settings.address.name,
            settings.port,
            settings.keepalive_s,
            clean_start=self._clean if self.is_v5 else paho.MQTT_CLEAN_START_FIRST_ONLY,
            properties=self._make_properties(
                PacketTypes.CONNECT,
                SessionExpiryInterval=self._caller.session_expiry_s,
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
            self.close(Ending("closed while connecting"))
            return
        self._client.on_socket_close = self._on_socket_close
        self._client.on_socket_register_write = self._on_register_write
        self._client.on_socket_unregister_write = self._on_unregister_write
        self._loop.add_reader(sock, self._read)
        self._flush()
        self._loop.call_later(MISC_INTERVAL_S, self._run_misc)

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
        """Read again after `pause`."""
        sock = self._client.socket()
        if self._paused and sock is not None and not self.closed.done():
            self._paused = False
            self._loop.add_reader(sock, self._read)
            if _has_more(sock):
                self._loop.call_soon(self._read)

    def _run_misc(self) -> None:
        if not self.closed.done():
            self._client.loop_misc()
            self._loop.call_later(MISC_INTERVAL_S, self._run_misc)

    async def disconnect(self) -> None:
        """Disconnect cleanly, so that the broker publishes no will and drops the session."""
        if not self.closed.done():
            self._client.disconnect(properties=self._make_properties(PacketTypes.DISCONNECT, SessionExpiryInterval=0))
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(CONNECT_TIMEOUT_S):
                    await asyncio.shield(self.closed)
        self.close(Ending("disconnected"))

    def close(self, ending: Ending, *, closed_early: bool = False) -> None:
        """Release the socket and fail all waiters; no effect if already closed."""
        if self.closed.done():
            return
        self.closed.set_result(ending)
        sock = self._client.socket()
        if sock is not None:
            self._unwatch(sock)
            self._loop.call_soon(self._drop_socket)  # later, since paho may have called us and still use the socket
        if not self._connack.done():
            self._connack.set_exception(RefusedError(ending.reason, closed_early=closed_early))
            self._connack.exception()  # nobody may be waiting
        for grant in self._grants.values():
            grant.cancel()

    # ---------------------------------------------------------------------------------------------- packets

    def send(self, publish: Publish) -> int:
        """Send a message; return its packet id, with which `Owner.on_acknowledged` is called later."""
        values = {"MessageExpiryInterval": publish.expires_in_s, "CorrelationData": publish.correlation}
        properties = self._make_properties(PacketTypes.PUBLISH, **values)
        while True:
            info = self._client.publish(publish.topic, publish.payload, 1, publish.retain, properties)
            if info.rc != paho.MQTT_ERR_QUEUE_SIZE:  # otherwise this packet id is still in flight: try the next
                return info.mid

    def acknowledge(self, packet_id: int) -> None:
        """Tell the broker that a message is handled."""
        if not self.closed.done():
            self._client.ack(packet_id, 1)

    async def subscribe(self, topic_filter: str) -> None:
        """Subscribe and wait for the grant.

        Raises:
            TransportError: the broker refused the filter.
        """
        try:
            await self._request_grant(topic_filter)
        except NotGrantedError as error:
            if error.code in AGAIN:  # the next connection subscribes again
                self.close(Ending(str(error)))
            elif error.code == NO_SHARES and self.shares:
                self.shares = False
                await self.subscribe(topic_filter)
            else:
                raise TransportError(str(error)) from error

    async def _request_grant(self, topic_filter: str) -> None:
        _, packet_id = self._client.subscribe(self._get_broker_name(topic_filter), qos=1)
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
        """Unsubscribe without waiting for the answer; if we subscribe to the filter again, TCP keeps the order."""
        self._client.unsubscribe(self._get_broker_name(topic_filter))

    def _get_broker_name(self, topic_filter: str) -> str:
        """Return the filter as this broker needs it: with the topic prefix, and without a group if it has no groups."""
        name = topic_filter if self.shares else strip_share(topic_filter)
        return add_prefix(self._caller.settings.topic_prefix, name)

    # ----------------------------------------------------------------------------- callbacks, all on the loop

    def _on_connect(
        self, _client: paho.Client, _user: object, _flags: object, reason: ReasonCode, properties: Properties | None
    ) -> None:
        if self._connack.done():
            return
        self._client.on_log = None
        if reason.is_failure:
            what = find_meaning(reason)
            refusal = RefusedError(describe_reason(reason, properties), final=what.final, older=what.older)
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
            self.close(Ending(describe_reason(reason, properties), reason.value, find_meaning(reason).final))
        elif str(reason) == "Protocol error":
            self.close(Ending(NOT_MQTT), closed_early=True)
        elif not self._connack.done():  # paho's reason is "Unspecified error"
            alert = self._caller.alert
            self.close(Ending(f"{CLOSED_EARLY}: {alert}" if alert else CLOSED_EARLY), closed_early=True)
        else:
            self.close(Ending(NO_ANSWER if str(reason) == "Keep alive timeout" else LOST))

    def _on_log(self, _client: paho.Client, _user: object, _level: int, text: str) -> None:
        """Record why the broker ends TLS, which paho reports only in its log."""
        if found := _ALERT.search(text):
            self._caller.alert = found[1]

    def _on_message(self, _client: paho.Client, _user: object, message: paho.MQTTMessage) -> None:
        try:
            topic = message.topic
        except UnicodeDecodeError:
            return
        prefix, answer = self._caller.settings.topic_prefix, getattr(message.properties, "ResponseTopic", None)
        inbound = Inbound(
            remove_prefix(prefix, topic),
            bytes(message.payload),
            message.retain,
            None if answer is None else remove_prefix(prefix, answer),
            getattr(message.properties, "CorrelationData", None),
        )
        self._owner.deliver(inbound, message.mid if message.qos else 0, self)

    def _on_publish(
        self, _client: paho.Client, _user: object, packet_id: int, reason: ReasonCode, properties: Properties
    ) -> None:
        self._owner.on_acknowledged(packet_id, reason, properties)

    def _on_subscribe(
        self, _client: paho.Client, _user: object, packet_id: int, reasons: list[ReasonCode], properties: Properties
    ) -> None:
        grant = self._grants.get(packet_id)
        if grant is None or grant.done():
            return
        reason = reasons[0]  # one filter in each packet
        if reason.is_failure:
            said = f"subscription refused: {describe_reason(reason, properties)}"
            grant.set_exception(NotGrantedError(said, reason.value))
        elif reason.value == 0:
            grant.set_exception(NotGrantedError(f"subscription refused: {MEANINGS[NO_QOS].do}", NO_QOS))
        else:
            grant.set_result(None)

    def _on_socket_close(self, _client: paho.Client, _user: object, sock: Any) -> None:
        if not self.closed.done():
            self._unwatch(sock)

    def _on_register_write(self, _client: paho.Client, _user: object, _sock: Any) -> None:
        self._loop.call_soon(self._flush)  # sends all messages of this loop turn at once, without asking epoll first

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
        if sock.fileno() >= 0:  # TLS may have closed it already, after an error
            self._loop.remove_reader(sock)
            self._loop.remove_writer(sock)


def _has_more(sock: Any) -> bool:
    """Return whether a TLS socket has buffered bytes that wake no loop; a plain TCP socket never has any."""
    return bool(getattr(sock, "pending", bool)())
