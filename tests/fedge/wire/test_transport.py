"""The transport over real brokers, and the faults that other MQTT clients have, one test each."""

from __future__ import annotations

import asyncio

import pytest

from fedge.errors import ProtocolError, StoreError, TooLargeError, TransportError
from fedge.wire.connection.broker import Inbound, Will
from fedge.wire.connection.window import OUT_WINDOW
from tests.deploy.tcp import TcpServer, answering, read_packet
from tests.support.broker import Inbox, ask, transport
from tests.support.waiting import WAIT_S, until

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


# ------------------------------------------------------------------------------ brokers that say strange things


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
