"""Our client in place of paho's: frames, and MQTT through a WebSocket of a real broker."""

from __future__ import annotations

import asyncio
import os

import pytest

from fedge.mqtt_client import _WebSocket
from fedge.transport import BrokerSettings, Transport
from tests.support.broker import OwnBroker

WAIT_S = 20.0


def unmasked(frame: bytes) -> tuple[int, bytes]:
    """Opcode and content, read as RFC 6455 (5.2) has it."""
    size, start = frame[1] & 127, 2
    if size > 125:
        start += 2 if size == 126 else 8
        size = int.from_bytes(frame[2:start])
    mask = frame[start : start + 4]
    assert frame[0] & 0x80
    assert frame[1] & 0x80
    assert len(frame) == start + 4 + size
    return frame[0] & 15, bytes(byte ^ mask[i % 4] for i, byte in enumerate(frame[start + 4 :]))


@pytest.mark.parametrize("size", [0, 1, 3, 4, 125, 126, 127, 65535, 65536, 70001])
def test_a_frame_is_what_went_in(size: int) -> None:
    data = os.urandom(size)
    assert unmasked(_WebSocket._create_frame(None, 2, bytearray(data))) == (2, data)


def test_a_pong_is_masked_too() -> None:
    assert unmasked(_WebSocket._create_frame(None, 10, bytearray(b"ping"), 0)) == (10, b"ping")


async def test_messages_of_all_sizes_go_through_a_websocket(tmp_path) -> None:
    lines = "listener {other} 127.0.0.1", "allow_anonymous true", "listener {port}", "protocol websockets"
    heard: asyncio.Queue[bytes] = asyncio.Queue()

    async def take(message) -> None:
        await heard.put(message.payload)

    async with OwnBroker(tmp_path, *lines) as broker, asyncio.timeout(WAIT_S):
        settings = BrokerSettings(broker.host, broker.port, path="/mqtt")
        async with Transport(settings, "one") as one, Transport(settings, "two") as two:
            await one.subscribe("t", take)
            sent = [os.urandom(size) for size in (0, 1, 100, 126, 70_000, 512 * 1024)]
            await asyncio.gather(*(two.publish("t", payload) for payload in sent))
            assert [await heard.get() for _ in sent] == sent
            assert one.protocol == "5"
