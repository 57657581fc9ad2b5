"""A subclass of paho's client, with the changes that fedge needs.

It overrides private methods of paho; tests over real brokers show whether a newer paho still calls them.
"""

from __future__ import annotations

import os
import ssl
from socket import socket
from typing import Any, Final

import paho.mqtt.client as paho
from paho.mqtt.enums import CallbackAPIVersion, MQTTErrorCode, MQTTProtocolVersion
from paho.mqtt.packettypes import PacketTypes
from paho.mqtt.properties import Properties
from paho.mqtt.reasoncodes import ReasonCode

from fedge.system.text import format_address
from fedge.wire.connection.reasons import TOO_LARGE
from fedge.wire.connection.route import Address, Proxy, open_socket

_REASON_AT: Final = 2
"""Index of the reason code's byte in a PUBACK, after the packet id."""


class Client(paho.Client):
    """Connects by `fedge.wire.connection.route`, and masks WebSocket data 500 times as fast as paho.

    Mosquitto answers a message over its `message_size_limit` by a PUBACK with "packet too large", a code that MQTT 5
    does not allow there. paho would hang up; this client treats it as an answer.
    """

    def __init__(self, address: Address, proxy: Proxy | None, client_id: str, **settings: Any) -> None:
        transport = "tcp" if address.path is None else "websockets"
        super().__init__(CallbackAPIVersion.VERSION2, client_id, transport=transport, **settings)  # type: ignore[arg-type]
        self._address, self._proxy_server = address, proxy
        self.peer_certificate: bytes | None = None
        """The broker's certificate (DER), once a TLS handshake has shown it."""

    def _create_socket_connection(self) -> socket:
        return open_socket(self._address.host, self._address.port, self._proxy_server, self.connect_timeout)

    def _create_socket(self) -> Any:
        sock: Any = self._create_socket_connection()
        try:
            if self._ssl_context is not None:
                name = self._address.name
                sock = self._ssl_context.wrap_socket(sock, server_hostname=name, do_handshake_on_connect=False)
                sock.do_handshake()
                self.peer_certificate = sock.getpeercert(binary_form=True)
            return sock if self._address.path is None else _WebSocket(sock, self._address)
        except BaseException:
            sock.close()
            raise

    def _handle_pubackcomp(self, cmd: Any) -> MQTTErrorCode:
        packet = self._in_packet["packet"]
        if self._protocol != MQTTProtocolVersion.MQTTv5 or packet[_REASON_AT : _REASON_AT + 1] != bytes([TOO_LARGE]):
            return super()._handle_pubackcomp(cmd)
        packet_id = int.from_bytes(packet[:_REASON_AT], "big")
        with self._out_message_mutex:
            if packet_id not in self._out_messages:
                return MQTTErrorCode.MQTT_ERR_SUCCESS
            reason = ReasonCode(PacketTypes.DISCONNECT, identifier=TOO_LARGE)
            properties = Properties(PacketTypes.PUBACK)  # type: ignore[no-untyped-call]
            return self._do_on_publish(packet_id, reason, properties)


class _WebSocket(paho._WebsocketWrapper):  # noqa: SLF001 - paho has no other
    def __init__(self, sock: socket, address: Address) -> None:
        secure = isinstance(sock, ssl.SSLSocket)
        name, port = address.name, address.port
        where = format_address(name, port)
        if port == (443 if secure else 80):
            where = where.removesuffix(f":{port}")
        headers = {"Host": where, "Origin": f"{'https' if secure else 'http'}://{where}"}
        assert address.path is not None
        super().__init__(sock, name, port, secure, address.path, headers)

    def _create_frame(self, opcode: int, data: bytearray, _do_masking: int = 1) -> bytearray:
        """Mask every frame, as RFC 6455 (5.1) requires of a client; paho would not mask a pong."""
        n, mask = len(data), os.urandom(4)
        size = bytes([128 | n]) if n < 126 else b"\xfe" + n.to_bytes(2) if n < 2**16 else b"\xff" + n.to_bytes(8)
        stretched = (mask * (n // 4 + 1))[:n]
        masked = (int.from_bytes(data) ^ int.from_bytes(stretched)).to_bytes(n)
        return bytearray(bytes([128 | opcode]) + size + mask + masked)
