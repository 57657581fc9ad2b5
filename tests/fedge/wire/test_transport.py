"""The transport over real brokers, and the faults that other MQTT clients have, one test each."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading

import pytest
from aiohttp import web
from hypothesis import given
from hypothesis import strategies as st

from fedge.errors import ProtocolError, StoreError, TooLargeError, TransportError
from fedge.wire.transport import (
    BACKOFF_CAP_S,
    CHECK_PLAIN,
    HELD_MESSAGES,
    IN_WINDOW,
    LEAST_PACKET,
    NO_ANSWER,
    OUT_WINDOW,
    PAUSE_BYTES,
    SLOW_AFTER,
    BrokerSettings,
    Inbound,
    Transport,
    Will,
    Window,
    _Publish,
    backoff_s,
    chunk_bytes_for,
)
from tests.support.broker import OwnBroker, ask, open_broker, say, transport
from tests.support.tcp import TcpServer
from tests.support.waiting import until

WAIT_S = 20.0


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


# ------------------------------------------------------------------------------------------------ pure parts


@given(st.integers(1, 10_000), st.floats(0, 1, exclude_max=True))
def test_backoff_grows_to_its_cap_and_uses_all_the_range_below(attempt, draw):
    most = backoff_s(attempt, 1.0)
    assert backoff_s(attempt, draw) == draw * most
    assert 0 < most <= backoff_s(attempt + 1, 1.0) <= backoff_s(50, 1.0) == BACKOFF_CAP_S


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
    assert chunk_bytes_for(announced) == chunk


def test_password_is_not_shown():
    assert "secret" not in repr(BrokerSettings("h", username="u", password="secret"))


async def publishes(n: int) -> list[_Publish]:
    loop = asyncio.get_running_loop()
    return [_Publish(f"t/{i}", b"", False, None, None, loop.create_future()) for i in range(n)]


async def test_window_is_never_exceeded_and_keeps_the_order():
    window = Window()
    all_of_them = await publishes(20)
    for publish in all_of_them:
        window.add(publish)
    sent = []
    while publish := window.next():
        sent.append(publish)
        window.sent(len(sent), publish)
    assert sent == all_of_them[:OUT_WINDOW]
    assert window.acknowledged(3) is all_of_them[2]
    assert window.next() is all_of_them[OUT_WINDOW]


async def test_permit_of_a_cancelled_publish_returns_with_its_acknowledgement():
    window = Window()
    window.limit = 1
    first, second = await publishes(2)
    window.add(first)
    window.add(second)
    window.sent(1, window.next())
    first.done.cancel()
    assert window.next() is None  # the packet is still under way
    window.acknowledged(1)
    assert window.next() is second


async def test_cancelled_while_waiting_is_never_sent():
    window = Window()
    first, second = await publishes(2)
    window.add(first)
    window.add(second)
    first.done.cancel()
    assert window.next() is second


async def test_lost_connection_repeats_what_was_not_acknowledged_in_order():
    window = Window()
    sent = await publishes(4)
    (waiting,) = await publishes(1)
    for i, publish in enumerate(sent):
        window.sent(i, publish)
    window.add(waiting)
    window.acknowledged(1)
    sent[2].done.cancel()
    window.lost()
    assert not window._in_flight
    assert [window.next(), window.next(), window.next(), window.next()] == [sent[0], sent[3], waiting, None]


def test_unknown_acknowledgement_changes_nothing():
    assert Window().acknowledged(7) is None


# --------------------------------------------------------------------------------------------- both brokers


async def test_round_trip(broker):
    inbox = Inbox()
    async with transport(broker, "one") as one:
        await one.subscribe("a/+/c", inbox)
        await one.publish("a/b/c", b"hello")
        await one.publish("a/b/d", b"not for us")
        await one.publish("a/x/c", b"")
        assert await inbox.next() == Inbound("a/b/c", b"hello", retained=False)
        assert (await inbox.next()).topic == "a/x/c"
        assert one.connected
        assert one.protocol == ("5" if broker.name == "mosquitto" else "3.1.1")
        assert (one.bytes_sent, one.bytes_received) == (len(b"hello" + b"not for us"), len(b"hello"))
    assert not one.connected


async def test_order_is_kept_and_nothing_is_lost(broker):
    inbox = Inbox()
    async with transport(broker, "one") as one:
        await one.subscribe("n", inbox)
        await asyncio.gather(*(one.publish("n", b"%d" % i) for i in range(300)))
        assert await inbox.payloads(300) == [b"%d" % i for i in range(300)]


async def test_subscribed_before_entering(broker):
    inbox = Inbox()
    one = transport(broker, "one")
    await one.subscribe("early", inbox)

    async def greet() -> None:
        await one.publish("early", b"from on_connect")

    one.on_connect(greet)
    async with one:
        assert await inbox.payloads(1) == [b"from on_connect"]


async def test_broker_killed_and_restarted(broker):
    """Publishes of the dark time arrive, subscriptions are in force again, on_connect is called again."""
    inbox, greetings = Inbox(), []

    async def greet() -> None:
        greetings.append(1)

    one = transport(broker, "one")
    one.on_connect(greet)
    async with one:
        await one.subscribe("t", inbox)
        await broker.kill()
        await until(lambda: not one.connected)
        late = [asyncio.create_task(one.publish("t", b"%d" % i)) for i in range(20)]
        await broker.start()
        async with asyncio.timeout(WAIT_S):
            await asyncio.gather(*late)
        assert await inbox.payloads(20) == [b"%d" % i for i in range(20)]
        assert len(greetings) == 2


async def test_waits_for_a_broker_that_is_not_there_yet(broker):
    await broker.kill()
    one = transport(broker, "one")
    entering = asyncio.create_task(one.__aenter__())
    await asyncio.sleep(0)
    await broker.start()
    async with asyncio.timeout(WAIT_S):
        await entering
    assert one.connected
    await one.__aexit__(None, None, None)


async def test_cancelled_while_connecting_leaves_nothing(broker):
    await broker.kill()
    one = transport(broker, "one")
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(one.__aenter__(), 0.2)
    assert not one.connected


async def test_cancelled_publishes_do_not_use_up_the_window(broker):
    inbox = Inbox()
    async with transport(broker, "one") as one:
        await one.subscribe("t", inbox)
        for _ in range(3 * OUT_WINDOW):
            task = asyncio.create_task(one.publish("t", b"given up"))
            await asyncio.sleep(0)
            task.cancel()
        async with asyncio.timeout(WAIT_S):
            await one.publish("t", b"last")
        while (await inbox.next()).payload != b"last":
            pass


async def test_refused_message_is_logged_and_the_next_one_handled(broker, caplog):
    inbox = Inbox()

    async def picky(message: Inbound) -> None:
        if message.payload == b"bad":
            raise ProtocolError("malformed", "not what we agreed on")
        await inbox(message)

    async with transport(broker, "one") as one:
        await one.subscribe("t", picky)
        await one.publish("t", b"bad")
        await one.publish("t", b"good")
        assert await inbox.payloads(1) == [b"good"]
    assert "event=refused name=malformed topic=t" in caplog.text


async def test_failing_handler_ends_the_body_with_its_error(broker):
    async def broken(message: Inbound) -> None:
        raise StoreError("disk full")

    async def body() -> None:
        async with transport(broker, "one") as one:
            await one.subscribe("t", broken)
            await one.publish("t", b"x")
            await asyncio.Event().wait()

    with pytest.raises(StoreError, match="disk full"):
        await asyncio.wait_for(body(), WAIT_S)


async def test_error_of_the_body_passes_through(broker):
    with pytest.raises(KeyError):
        async with transport(broker, "one"):
            raise KeyError("mine")


async def test_whoever_subscribes_at_its_end_ends_too(broker):
    async with transport(broker, "one") as one:
        pass
    with pytest.raises(asyncio.CancelledError):
        await one.subscribe("t", Inbox())


async def test_unsubscribed_hears_nothing(broker):
    gone, kept = Inbox(), Inbox()
    async with transport(broker, "one") as one:
        await one.subscribe("t", gone)
        await one.subscribe("u", kept)
        await one.unsubscribe("t")
        await one.unsubscribe("never subscribed")
        await one.publish("t", b"x")
        await one.publish("u", b"y")
        assert await kept.payloads(1) == [b"y"]
        assert gone.queue.empty()


async def test_unsubscribing_with_messages_waiting_frees_their_permits(broker):
    started, kept = asyncio.Event(), Inbox()

    async def stuck(message: Inbound) -> None:
        started.set()
        await asyncio.Event().wait()

    async with asyncio.timeout(WAIT_S), transport(broker, "one") as one, transport(broker, "two") as two:
        await one.subscribe("t", stuck)
        await one.subscribe("u", kept)
        for _ in range(2 * IN_WINDOW):
            await two.publish("t", b"x")
        await started.wait()
        await one.unsubscribe("t")
        await two.publish("u", b"y")
        assert await kept.payloads(1) == [b"y"]


async def test_same_filter_twice_is_refused(broker):
    async with transport(broker, "one") as one:
        await one.subscribe("t", Inbox())
        with pytest.raises(ValueError, match="already"):
            await one.subscribe("t", Inbox())


async def test_overlapping_filters_all_hear(broker):
    narrow, wide = Inbox(), Inbox()
    async with transport(broker, "one") as one:
        await one.subscribe("a/b", narrow)
        await one.subscribe("a/#", wide)
        await one.publish("a/b", b"x")
        assert await narrow.payloads(1) == await wide.payloads(1) == [b"x"]


async def test_will_is_published_when_the_connection_breaks_and_not_on_good_bye(broker):
    inbox = Inbox()
    async with transport(broker, "watcher") as watcher:
        await watcher.subscribe("will/+", inbox)
        async with transport(broker, "polite", will=Will("will/polite", b"dead", delay_s=0)):
            pass
        rude = transport(broker, "rude", will=Will("will/rude", b"dead", delay_s=0))
        async with rude:
            rude._connection._client.socket().shutdown(2)
            assert (await inbox.next()).topic == "will/rude"
        await watcher.publish("will/end", b"")
        assert (await inbox.next()).topic == "will/end"


# ------------------------------------------------------------------------------------------------ MQTT 5 only


async def test_announced_limits_are_kept(mosquitto):
    inbox = Inbox()
    async with transport(mosquitto, "one") as one:
        assert one.max_packet_bytes == 2 * 1024 * 1024
        assert one.chunk_bytes == 512 * 1024
        await one.subscribe("t", inbox)
        with pytest.raises(TooLargeError, match="broker takes 2097152: raise its limit"):
            await one.publish("t", bytes(2 * 1024 * 1024))
        await one.publish("t", bytes(one.chunk_bytes))
        assert len((await inbox.next()).payload) == one.chunk_bytes


async def test_slow_handler_holds_the_broker_back(mosquitto):
    go, handled = asyncio.Event(), []

    async def slow(message: Inbound) -> None:
        await go.wait()
        handled.append(message.payload)

    async with transport(mosquitto, "one") as one, transport(mosquitto, "two") as two:
        await one.subscribe("t", slow)
        for i in range(5 * IN_WINDOW):
            await two.publish("t", b"%03d" % i)
        await two.publish("t", b"end")
        assert one.bytes_received <= 3 * IN_WINDOW  # the rest waits in the broker
        assert one.messages_dropped == 0
        go.set()
        await until(lambda: b"end" in handled)
        assert handled == [*(b"%03d" % i for i in range(5 * IN_WINDOW)), b"end"]


async def test_large_messages_wait_in_the_broker_while_a_handler_is_slow(broker):
    """Also after the first acknowledgement, where Mosquitto 2.0.11 forgets our Receive Maximum, and with amqtt."""
    handled = []

    async with transport(broker, "one") as one, transport(broker, "two") as two:

        async def slow(message: Inbound) -> None:
            await asyncio.sleep(0.001)
            handled.append(message.payload[0])

        await one.subscribe("t", slow)
        n, size = 64, one.chunk_bytes
        held = []
        for start in range(0, n, 8):
            await asyncio.gather(*(two.publish("t", bytes([i]) * size) for i in range(start, start + 8)))
            held.append(one._held_bytes)
        await until(lambda: len(handled) >= n)
        assert set(handled) == set(range(n))
        assert one.messages_dropped == 0
        assert max(held) <= PAUSE_BYTES + 2 * size


async def test_flood_of_qos0_is_bounded(mosquitto, caplog):
    go = asyncio.Event()

    async def slow(message: Inbound) -> None:
        await go.wait()

    async with transport(mosquitto, "one") as one:
        await one.subscribe("$share/secret/t", slow)
        await say(mosquitto, *[{"topic": "t", "payload": b"x"}] * (2 * HELD_MESSAGES))
        await until(lambda: one.messages_dropped == HELD_MESSAGES)
        go.set()
    assert "event=dropped topic=t filter=t" in caplog.text
    assert "secret" not in caplog.text


async def test_session_survives_a_broken_connection(mosquitto):
    """QoS 1 messages of the time between two connections are delivered by the broker."""
    inbox = Inbox()
    async with transport(mosquitto, "one") as one, transport(mosquitto, "two") as two:
        await one.subscribe("t", inbox)
        one._connection._client.socket().shutdown(2)
        await until(lambda: not one.connected)
        await two.publish("t", b"meanwhile")
        assert await inbox.payloads(1) == [b"meanwhile"]


async def test_restarted_client_gets_nothing_of_its_former_life(mosquitto):
    async with transport(mosquitto, "two") as two:
        first = transport(mosquitto, "one")
        await first.__aenter__()
        await first.subscribe("old", Inbox())
        first._supervisor.cancel()  # as if the process died
        first._connection._client.socket().shutdown(2)
        await two.publish("old", b"x")
        inbox = Inbox()
        async with transport(mosquitto, "one") as again:
            await again.subscribe("new", inbox)
            await two.publish("new", b"y")
            assert await inbox.payloads(1) == [b"y"]
            assert again.bytes_received == 1
        await first.__aexit__(None, None, None)


async def test_message_that_expired_is_not_delivered(mosquitto):
    inbox = Inbox()
    async with transport(mosquitto, "two") as two:
        await two.publish("t", b"old", retain=True, expires_in_s=1)
        await two.publish("u", b"fresh", retain=True, expires_in_s=100)
        await asyncio.sleep(2.1)  # Mosquitto counts whole seconds
        async with transport(mosquitto, "one") as one:
            await one.subscribe("t", inbox)
            await one.subscribe("u", inbox)
            assert await inbox.next() == Inbound("u", b"fresh", retained=True)


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


# ------------------------------------------------------------------------------------- brokers that say strange things


def answering(connack: bytes):
    """A server that answers each CONNECT with these bytes."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1)
        writer.write(connack)
        await reader.read()

    return TcpServer(serve)


@pytest.mark.parametrize(
    ("code", "reason"), [(0x86, "Bad user name or password"), (0x87, "Not authorized"), (0x85, "Client identifier")]
)
async def test_final_refusal_is_raised_with_its_reason(code, reason):
    async with answering(bytes([0x20, 3, 0, code, 0])) as server:
        with pytest.raises(TransportError, match=reason):
            await transport(server, "one").__aenter__()


async def test_refused_by_a_broker_of_3_1_1():
    """It does not know MQTT 5 (code 1), and then not our password (code 4)."""
    codes = iter([1, 4])

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1)
        writer.write(bytes([0x20, 2, 0, next(codes)]))
        await reader.read()

    async with TcpServer(serve) as server:
        with pytest.raises(TransportError, match="Bad user name or password"):
            await asyncio.wait_for(transport(server, "one").__aenter__(), WAIT_S)


async def test_a_broker_that_closes_on_us_is_explained_once_and_then_left_in_peace(no_back_off, caplog):
    """As Mosquitto does to a client without a certificate: the TLS handshake succeeds, then it hangs up."""
    connections = 0

    async def hang_up(reader: asyncio.StreamReader, _: asyncio.StreamWriter) -> None:
        nonlocal connections
        connections += 1
        await reader.read(1)

    async with TcpServer(hang_up) as server:
        trying = asyncio.create_task(transport(server, "one").__aenter__())
        await until(lambda: connections >= 2 * SLOW_AFTER)
        await asyncio.sleep(0.5)
        assert not trying.done()
        trying.cancel()
    assert connections == 2 * SLOW_AFTER + 1  # MQTT 5 and 3.1.1 each, and once to see what else it may be
    assert caplog.text.count("event=connect_failed") == SLOW_AFTER
    assert caplog.text.count(CHECK_PLAIN) == 1


# --------------------------------------------------------------------------------- brokers that fedge cannot work with


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("retain_available false", r"Retain not supported \(0x9a\): it keeps no retained messages"),
        ("max_qos 0", r"QoS not supported \(0x9b\): it knows QoS 0 alone"),
        ("max_packet_size 1024", "it takes packets of 1,024 bytes at most, and fedge needs 4,096: raise its limit"),
    ],
)
@pytest.mark.parametrize("will", [None, Will("will", b"")])
async def test_a_broker_that_cannot_do_what_fedge_needs_is_refused(mosquitto_program, tmp_path, line, told, will):
    async with open_broker(tmp_path, line) as broker, asyncio.timeout(WAIT_S):
        if will is None and "packet" not in line:
            told = told.partition(": ")[2]  # by what it announces; its own reason comes with a will
        with pytest.raises(TransportError, match=f"refused one: {told}"):
            await transport(broker, "one", will=will).__aenter__()


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


async def read_packet(reader: asyncio.StreamReader) -> tuple[int, bytes]:
    """Kind and body of an MQTT packet."""
    kind, size, shift = (await reader.readexactly(1))[0] >> 4, 0, 0
    while True:
        (byte,) = await reader.readexactly(1)
        size |= (byte & 127) << shift
        shift += 7
        if byte < 128:
            return kind, await reader.readexactly(size)


async def test_a_message_that_a_busy_broker_did_not_take_goes_out_again(caplog, monkeypatch):
    """PUBACK with Quota exceeded (0x97), as of Mosquitto at its memory_limit; then success."""
    monkeypatch.setattr("fedge.wire.transport.AGAIN_S", 0.0)
    answers = iter([bytes([0x40, 3, 0, 1, 0x97]), bytes([0x40, 3, 0, 2, 0])])

    async def busy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_packet(reader)
        writer.write(bytes([0x20, 3, 0, 0, 0]))
        for answer in answers:
            await read_packet(reader)
            writer.write(answer)
        await reader.read()

    async with TcpServer(busy) as server, asyncio.timeout(WAIT_S), transport(server, "one") as one:
        await one.publish("t", b"x")
    assert "event=publish_again topic=t reason='Quota exceeded (0x97): we come again" in caplog.text


async def test_an_old_retained_message_does_not_go_out_again_after_a_newer_one(caplog, monkeypatch):
    monkeypatch.setattr("fedge.wire.transport.AGAIN_S", 0.01)
    seen: list[tuple[bytes, bytes]] = []

    async def busy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_packet(reader)
        writer.write(bytes([0x20, 3, 0, 0, 0]))
        while True:
            kind, body = await read_packet(reader)
            if kind != 3:
                continue
            packet_id = body[3:5]  # after the topic of one letter
            seen.append((body[2:3], body[-3:]))
            writer.write(bytes([0x40, 3, *packet_id, 0x97 if len(seen) == 1 else 0]))

    async with TcpServer(busy) as server, asyncio.timeout(WAIT_S), transport(server, "one") as one:
        await asyncio.gather(*(one.publish("t", payload, retain=True) for payload in (b"old", b"new")))
        await one.publish("u", b"end")
    assert seen == [(b"t", b"old"), (b"t", b"new"), (b"u", b"end")]
    assert caplog.text.count("event=publish_again topic=t") == 1


async def test_a_broker_that_ends_each_connection_for_good_ends_us(no_back_off, caplog):
    """DISCONNECT with Not authorized, whenever we are in."""
    async with answering(bytes([0x20, 3, 0, 0, 0, 0xE0, 1, 0x87])) as server, asyncio.timeout(WAIT_S):
        with pytest.raises(TransportError, match=r"disconnects us: Not authorized \(0x87\): see the broker's access"):
            async with transport(server, "one"):
                await asyncio.Event().wait()
    assert caplog.text.count("event=disconnected") == 3


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


async def test_a_port_for_websockets_is_named_as_such(mosquitto_program, tmp_path):
    lines = "listener {other} 127.0.0.1", "allow_anonymous true", "listener {port}", "protocol websockets"
    async with OwnBroker(tmp_path, *lines) as broker, asyncio.timeout(WAIT_S):
        with pytest.raises(
            TransportError, match=f"MQTT over WebSockets: give the address ws://127.0.0.1:{broker.port}"
        ):
            await transport(broker, "one").__aenter__()


async def test_a_web_server_is_named_as_such():
    server = web.AppRunner(web.Application())
    await server.setup()
    site = web.TCPSite(server, "127.0.0.1", 0)
    await site.start()
    try:
        settings = BrokerSettings("127.0.0.1", server.addresses[0][1])
        with pytest.raises(TransportError, match=r"a web server answers at this port \(HTTP/1.1 404 Not Found\)"):
            await asyncio.wait_for(Transport(settings, "one").__aenter__(), WAIT_S)
    finally:
        await server.cleanup()


async def test_a_broker_that_is_full_says_nothing_and_the_log_does(mosquitto_program, tmp_path, no_back_off, caplog):
    async def stay(name: str) -> None:
        async with transport(broker, name):
            await asyncio.Event().wait()

    async with open_broker(tmp_path, "max_connections 1") as broker:
        clients = [asyncio.create_task(stay(f"client{i}")) for i in range(4)]  # this Mosquitto miscounts by one or two
        await until(lambda: "event=closed_early" in caplog.text)
        assert not any(client.done() for client in clients)
        for client in clients:
            client.cancel()
        await asyncio.gather(*clients, return_exceptions=True)
    assert "max_connections" in caplog.text


async def test_a_network_that_is_gone_is_told_as_such(caplog):
    """CONNACK with a keep-alive of one second, and then nothing any more."""
    async with answering(bytes([0x20, 6, 0, 0, 3, 0x13, 0, 1])) as server, transport(server, "one"):
        await until(lambda: "event=disconnected" in caplog.text)
    assert NO_ANSWER in caplog.text


async def test_receive_maximum_of_the_server_narrows_the_window():
    """CONNACK with Receive Maximum 2: two publishes come, the third waits for an acknowledgement."""
    connack = bytes([0x20, 6, 0, 0, 3, 0x21, 0, 2])
    async with answering(connack) as server:
        one = transport(server, "one")
        await one.__aenter__()
        tasks = [asyncio.create_task(one.publish("t", b"x")) for _ in range(5)]
        await asyncio.sleep(0)
        assert len(one._window._in_flight) == 2
        for task in tasks:
            task.cancel()
        await one.__aexit__(None, None, None)


async def test_reason_of_a_disconnect_is_logged(caplog):
    """CONNACK, then DISCONNECT with 0x8E."""
    async with answering(bytes([0x20, 3, 0, 0, 0, 0xE0, 1, 0x8E])) as server, transport(server, "one"):
        await until(lambda: "Session taken over" in caplog.text)
    assert "event=disconnected client=one" in caplog.text


async def test_lost_for_good_while_closing_does_not_hang(broker):
    one = transport(broker, "one")
    async with one:
        await broker.kill()


async def test_who_asks_says_where_to_answer(mosquitto):
    asked = asyncio.Queue()
    async with transport(mosquitto, "device") as device, transport(mosquitto, "sensor") as sensor:
        await device.subscribe("ask", asked.put)
        await sensor.subscribe("answer", asked.put)
        await ask(mosquitto, "ask", b"?", "answer", b"\x00\xff")
        question = await asyncio.wait_for(asked.get(), 10)
        assert (question.response_topic, question.correlation) == ("answer", b"\x00\xff")
        await device.publish(question.response_topic, b"!", correlation=question.correlation)
        answer = await asyncio.wait_for(asked.get(), 10)
        assert (answer.payload, answer.response_topic, answer.correlation) == (b"!", None, b"\x00\xff")


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
