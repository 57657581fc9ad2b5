"""Limits that a broker announces, and those that are found out."""

from __future__ import annotations

import asyncio
import contextlib

import pytest

from fedge.errors import TooLargeError, TransportError
from fedge.wire.connection.packet_limits import LEAST_PACKET, compute_chunk_bytes
from fedge.wire.transport import Transport
from tests.deploy.tcp import TcpServer, read_packet
from tests.support.broker import open_broker, transport
from tests.support.waiting import WAIT_S, until


@pytest.mark.parametrize(
    ("announced", "chunk"),
    [
        (None, 64 * 1024),
        (128 * 1024, 127 * 1024),
        (1024 * 1024, 512 * 1024),
        (2**28, 512 * 1024),
        (512 * 1024, 511 * 1024),
        (LEAST_PACKET, 3 * 1024),
    ],
)
def test_chunk_fits_the_announced_packet(announced, chunk):
    assert compute_chunk_bytes(announced) == chunk


async def test_a_limit_below_what_fedge_needs_ends_it_with_the_first_message(mosquitto_program, tmp_path):
    async with open_broker(tmp_path, "message_size_limit 500") as broker, asyncio.timeout(WAIT_S):
        with pytest.raises(TransportError, match="takes no packet of 1,022 bytes, fedge needs 4,096; Packet too large"):
            await say_too_much(transport(broker, "one"))


async def say_too_much(one: Transport) -> None:
    async with one:
        with contextlib.suppress(TooLargeError):
            await one.publish("t", bytes(1000))
        await asyncio.Event().wait()


async def test_a_message_over_a_hidden_limit_fails_alone(mosquitto_program, tmp_path, caplog):
    async with open_broker(tmp_path, "message_size_limit 10000") as broker, transport(broker, "one") as one:
        with pytest.raises(TooLargeError, match=r"t, packet of 20022 bytes: Packet too large .* message_size_limit"):
            await one.publish("t", bytes(20_000))
        await one.publish("t", bytes(9_000))
        assert one.chunk_bytes == 10_000
        with pytest.raises(TooLargeError, match="packet of 10023 bytes: Packet too large"):
            await one.publish("t", bytes(10_001))
        assert one.chunk_bytes == 5_000
        with pytest.raises(TooLargeError, match="packet of 64022 bytes; the broker refused one of that size"):
            await one.publish("t", bytes(64_000))
    assert "event=disconnected" not in caplog.text


class HangsUp:
    """A broker that says nothing on a packet that is too large and hangs up, as some do. `sizes`: what it was sent."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.sizes: list[int] = []
        self.clients: list[asyncio.StreamWriter] = []

    async def __call__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.clients.append(writer)
        with contextlib.suppress(asyncio.IncompleteReadError, OSError):
            await read_packet(reader)
            writer.write(bytes([0x20, 3, 0, 0, 0]))
            while True:
                kind, body = await read_packet(reader)
                if kind != 3:
                    continue
                self.sizes.append(len(body))
                if len(body) > self.limit:
                    break
                start = 2 + int.from_bytes(body[:2])
                writer.write(bytes([0x40, 2]) + body[start : start + 2])


async def test_chunks_are_halved_when_connections_break_under_them(caplog, no_back_off):
    broker = HangsUp(20_000)
    async with TcpServer(broker) as server, asyncio.timeout(WAIT_S), transport(server, "one") as one:
        for _ in range(2):
            with pytest.raises(TooLargeError):
                await one.publish("t", bytes(one.chunk_bytes), chunk=True)
        await one.publish("t", bytes(one.chunk_bytes), chunk=True)
        assert one.chunk_bytes == 16 * 1024
    assert [size // 1024 for size in broker.sizes] == [64, 64, 32, 32, 16]
    assert caplog.text.count("event=smaller_chunks") == 2


async def test_chunks_grow_back_by_one_step_for_each_connection_that_took_them(no_back_off):
    broker = HangsUp(20_000)

    async def reconnected() -> int:
        """The size of chunks on the next connection."""
        before = len(broker.clients)
        broker.clients[-1].close()
        await until(lambda: len(broker.clients) > before and one.connected)
        return one.chunk_bytes // 1024

    async with TcpServer(broker) as server, asyncio.timeout(WAIT_S), transport(server, "one") as one:
        for _ in range(2):
            with pytest.raises(TooLargeError):
                await one.publish("t", bytes(one.chunk_bytes), chunk=True)
        assert await reconnected() == 16, "none was taken"
        await one.publish("t", bytes(16 * 1024), chunk=True)
        assert await reconnected() == 32
        with pytest.raises(TooLargeError):
            await one.publish("t", bytes(32 * 1024), chunk=True)
        assert one.chunk_bytes == 16 * 1024, "the limit is still there"
        broker.limit = 1 << 20
        for size in (16, 32, 64):
            assert one.chunk_bytes == size * 1024
            await one.publish("t", bytes(one.chunk_bytes), chunk=True)
            after = await reconnected()
        assert after == 64
