"""What comes in, for handlers that are many, slow, or gone."""

from __future__ import annotations

import asyncio

import pytest

from fedge.wire.connection.broker import Inbound
from fedge.wire.connection.connection import IN_WINDOW
from fedge.wire.connection.subscription import HELD_MESSAGES, PAUSE_BYTES
from tests.support.broker import Inbox, say, transport
from tests.support.waiting import WAIT_S, until


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
            held.append(one._subscriptions.held_bytes)
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
