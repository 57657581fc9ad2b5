"""What tests of the wire share: brokers to choose from, and transports to them."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from paho.mqtt import publish
from paho.mqtt.enums import MQTTProtocolVersion
from paho.mqtt.packettypes import PacketTypes
from paho.mqtt.properties import Properties

from fedge.commands.broker import LocalBroker, find_free_port, find_mosquitto, make_mosquitto_config
from fedge.system import child
from fedge.wire.connection.broker import BrokerSettings, Inbound, Will
from fedge.wire.transport import Transport
from tests.deploy.tcp import TcpServer
from tests.support.waiting import WAIT_S

BROKERS = [
    pytest.param(
        "mosquitto",
        marks=pytest.mark.skipif(find_mosquitto() is None, reason="mosquitto is not installed"),
    ),
    "amqtt",
]


class OwnBroker(LocalBroker):
    """Mosquitto with these lines in its configuration; {port} and {other} stand for two free ports."""

    def __init__(self, home: Path, *lines: str, host: str = "127.0.0.1") -> None:
        super().__init__("mosquitto", home=home, host=host, port=find_free_port("127.0.0.1"))
        self.other = find_free_port("127.0.0.1")
        self._lines = lines

    def _make_command(self, home: Path) -> list[str]:
        config = home / "own.conf"
        config.write_text(make_mosquitto_config("\n".join(self._lines).format(port=self.port, other=self.other)))
        return child.make_tethered_command(find_mosquitto() or "mosquitto", "-c", str(config))


def open_broker(home: Path, *lines: str) -> OwnBroker:
    """Mosquitto that lets in everybody, with these further lines about its listener."""
    return OwnBroker(home / "broker", "listener {port} 127.0.0.1", "allow_anonymous true", *lines)


def settings(broker: LocalBroker | TcpServer, **changes: object) -> BrokerSettings:
    """How to reach a broker that a test started."""
    return BrokerSettings(broker.host, broker.port, **changes)


def transport(
    broker: LocalBroker | TcpServer, client_id: str, will: Will | None = None, **changes: object
) -> Transport:
    """A transport to a broker that a test started; not entered yet."""
    return Transport(settings(broker, **changes), client_id, will=will)


def local_broker(kind: str, home: Path) -> LocalBroker:
    """A broker whose files lie in the test's own folder; not entered yet."""
    return LocalBroker(kind, home=home / "broker")


async def say(broker: LocalBroker, *messages: dict[str, Any], client_id: str = "") -> None:
    """Publish as foreign programs do, with what our transport never uses: QoS 0, a topic for the answer."""
    await asyncio.to_thread(
        publish.multiple, list(messages), broker.host, broker.port, client_id, protocol=MQTTProtocolVersion.MQTTv5
    )


async def ask(
    broker: LocalBroker, topic: str, payload: bytes, answer_to: str, correlation: bytes = b"", client_id: str = ""
) -> None:
    """Publish a request with a topic for its answer, as a sensor does."""
    properties = Properties(PacketTypes.PUBLISH)
    properties.ResponseTopic, properties.CorrelationData = answer_to, correlation
    await say(broker, {"topic": topic, "payload": payload, "qos": 1, "properties": properties}, client_id=client_id)


class Inbox:
    """A handler that keeps what it gets."""

    def __init__(self) -> None:
        self.queue: asyncio.Queue[Inbound] = asyncio.Queue()

    async def __call__(self, message: Inbound) -> None:
        await self.queue.put(message)

    async def next(self) -> Inbound:
        async with asyncio.timeout(WAIT_S):
            return await self.queue.get()

    async def payloads(self, n: int) -> list[bytes]:
        return [(await self.next()).payload for _ in range(n)]
