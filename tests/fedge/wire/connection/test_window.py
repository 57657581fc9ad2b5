"""The window of unacknowledged messages, without IO."""

from __future__ import annotations

import asyncio

from fedge.wire.connection.window import OUT_WINDOW, Publish, Window


async def publishes(n: int) -> list[Publish]:
    loop = asyncio.get_running_loop()
    return [Publish(f"t/{i}", b"", False, None, None, loop.create_future()) for i in range(n)]


async def test_window_is_never_exceeded_and_keeps_the_order():
    window = Window()
    all_of_them = await publishes(20)
    for publish in all_of_them:
        window.add(publish)
    sent = []
    while publish := window.take_next():
        sent.append(publish)
        window.record_sent(len(sent), publish)
    assert sent == all_of_them[:OUT_WINDOW]
    assert window.take_acknowledged(3) is all_of_them[2]
    assert window.take_next() is all_of_them[OUT_WINDOW]


async def test_permit_of_a_cancelled_publish_returns_with_its_acknowledgement():
    window = Window()
    window.limit = 1
    first, second = await publishes(2)
    window.add(first)
    window.add(second)
    window.record_sent(1, window.take_next())
    first.done.cancel()
    assert window.take_next() is None  # the packet is still under way
    window.take_acknowledged(1)
    assert window.take_next() is second


async def test_cancelled_while_waiting_is_never_sent():
    window = Window()
    first, second = await publishes(2)
    window.add(first)
    window.add(second)
    first.done.cancel()
    assert window.take_next() is second


async def test_lost_connection_repeats_what_was_not_acknowledged_in_order():
    window = Window()
    sent = await publishes(4)
    (waiting,) = await publishes(1)
    for i, publish in enumerate(sent):
        window.record_sent(i, publish)
    window.add(waiting)
    window.take_acknowledged(1)
    sent[2].done.cancel()
    window.record_lost()
    assert not window._in_flight
    assert [window.take_next(), window.take_next(), window.take_next(), window.take_next()] == [
        sent[0],
        sent[3],
        waiting,
        None,
    ]


def test_unknown_acknowledgement_changes_nothing():
    assert Window().take_acknowledged(7) is None
