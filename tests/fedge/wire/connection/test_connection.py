"""One connection: grants, its end, and a thread that nobody waits for."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading

from fedge.wire.connection.broker import BrokerSettings
from fedge.wire.connection.connection import Ending
from fedge.wire.connection.refusals import NO_ANSWER
from fedge.wire.transport import Transport
from tests.deploy.tcp import TcpServer, answering, read_packet
from tests.support.broker import Inbox, transport
from tests.support.waiting import WAIT_S, until


async def test_busy_thread_does_not_starve_the_keep_alive(mosquitto, caplog):
    """Training in pure Python in another thread, with a keep-alive of one second: nobody is thrown out."""
    stop = threading.Event()

    def train() -> None:
        while not stop.is_set():
            sum(i * i for i in range(1000))

    async with transport(mosquitto, "one", keepalive_s=1):
        worker = threading.Thread(target=train)
        worker.start()
        await asyncio.sleep(4)
        stop.set()
        worker.join()
    assert "event=disconnected" not in caplog.text


async def test_a_broker_without_shares_that_does_not_say_so(tmp_path):
    """SUBACK with 0x9E: the filter is asked for without its group."""
    filters = []

    async def no_shares(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_packet(reader)
        writer.write(bytes([0x20, 3, 0, 0, 0]))
        for code in (0x9E, 1):
            _, body = await read_packet(reader)
            filters.append(body[5:-1])
            writer.write(bytes([0x90, 4]) + body[:2] + bytes([0, code]))
        await reader.read()

    async with TcpServer(no_shares) as server, asyncio.timeout(WAIT_S), transport(server, "one") as one:
        await one.subscribe("$share/g/t/+", Inbox())
    assert filters == [b"$share/g/t/+", b"t/+"]


async def test_a_network_that_is_gone_is_told_as_such(caplog):
    """CONNACK with a keep-alive of one second, and then nothing any more."""
    async with answering(bytes([0x20, 6, 0, 0, 3, 0x13, 0, 1])) as server, transport(server, "one"):
        await until(lambda: "event=disconnected" in caplog.text)
    assert NO_ANSWER in caplog.text


async def test_a_socket_that_is_closed_already_ends_the_connection(mosquitto):
    """As TLS closes one after an error."""
    async with transport(mosquitto, "one") as one:
        connection = one._connection
        connection._client.socket().close()
        connection.close(Ending("broken"))
        assert connection.closed.done()


async def test_reason_of_a_disconnect_is_logged(caplog):
    """CONNACK, then DISCONNECT with 0x8E."""
    async with answering(bytes([0x20, 3, 0, 0, 0, 0xE0, 1, 0x8E])) as server, transport(server, "one"):
        await until(lambda: "Session taken over" in caplog.text)
    assert "event=disconnected client=one" in caplog.text


def test_nobody_waits_for_a_broker_that_does_not_answer():
    """Stopped while it connects, a program ends, although the connection still has its time."""

    async def stopped() -> None:
        away = Transport(BrokerSettings("127.0.0.1", port), "waits")
        entering = asyncio.ensure_future(away.__aenter__())
        while not any(thread.name == "connecting" for thread in threading.enumerate()):  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        entering.cancel()
        await asyncio.gather(entering, return_exceptions=True)
        assert entering.cancelled()

    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(socket.socket())
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        port = listener.getsockname()[1]
        for _ in range(4):  # its queue is full: who comes now hears nothing
            waiting = stack.enter_context(socket.socket())
            waiting.setblocking(False)
            waiting.connect_ex(("127.0.0.1", port))
        asyncio.run(stopped())
        assert any(thread.name == "connecting" for thread in threading.enumerate())
    for thread in threading.enumerate():
        if thread.name == "connecting":
            thread.join()
