"""What a sender publishes, for wants in any order."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedge.errors import ProtocolError
from fedge.wire.transfer.ranges import MAX_PIECES, MAX_RANGES
from fedge.wire.transfer.sending import LISTENERS, SENT_BLOBS, Sending
from tests.fedge.wire.transfer.test_ranges import offsets, small_ranges

KEY, OTHER = ("digest", "chunks/+"), ("other", "chunks/+")
ONE, TWO = ("one", 1), ("two", 7)


def drain(sending: Sending, chunk: int) -> list[tuple[str, int, int]]:
    out = []
    while (found := sending.take_next(chunk)) is not None:
        out.append((found[0][0], found[1], found[2]))
    return out


def test_overlapping_wants_are_published_once():
    sending = Sending()
    assert not sending.add_want(KEY, [(0, 60)])
    assert not sending.add_want(KEY, [(30, 100)])
    assert drain(sending, 40) == [("digest", 0, 40), ("digest", 40, 80), ("digest", 80, 100)]


def test_what_was_published_before_waits_for_more_who_want_it():
    sending = Sending()
    sending.add_want(KEY, [(0, 50)])
    assert drain(sending, 50) == [("digest", 0, 50)]
    assert sending.add_want(KEY, [(0, 80)])
    assert sending.add_want(KEY, [(20, 50)])
    assert drain(sending, 50) == [("digest", 50, 80)]
    sending.release(KEY)
    assert drain(sending, 50) == [("digest", 0, 50)]


def test_what_others_wanted_is_not_published_again_for_who_listens_already():
    sending = Sending()
    sending.add_want(KEY, [(0, 40)], ONE)
    sending.add_want(KEY, [(0, 40)], TWO)
    assert drain(sending, 40) == [("digest", 0, 40)]
    sending.add_want(KEY, [(40, 80)], ONE)
    assert drain(sending, 40) == [("digest", 40, 80)]
    assert not sending.add_want(KEY, [(40, 100)], TWO)  # it lags: [40, 80) is on its way to it
    assert drain(sending, 40) == [("digest", 80, 100)]


@pytest.mark.parametrize("newcomer", [("three", 3), ("one", 2), None])
def test_who_was_not_listening_is_sent_it_again(newcomer):
    """Another device; the same one with a new subscription, or after a stall; and one that does not say."""
    sending = Sending()
    sending.add_want(KEY, [(0, 40)], ONE)
    drain(sending, 40)
    assert sending.add_want(KEY, [(0, 40)], newcomer)
    sending.release(KEY)
    assert drain(sending, 40) == [("digest", 0, 40)]


def test_who_is_forgotten_is_sent_it_again():
    sending = Sending()
    for i in range(LISTENERS + 1):
        sending.add_want(KEY, [(0, 1)], ("device", i + 1))
    drain(sending, 1)
    assert not sending.add_want(KEY, [(0, 1)], ("device", LISTENERS + 1))
    assert sending.add_want(KEY, [(0, 1)], ("device", 1))
    assert len(sending._blobs[KEY].on_the_way) == LISTENERS


@given(st.lists(st.one_of(st.tuples(st.integers(1, 3), small_ranges), st.none())), st.integers(1, 20))
def test_every_listener_gets_what_it_wants(steps, chunk):
    """Since its first want; None publishes one chunk."""
    sending, wanted, got = Sending(), {}, {}

    def publish() -> bool:
        found = sending.take_next(chunk)
        for listener in got:
            got[listener] |= offsets([found[1:]]) if found else set()
        return found is not None

    for step in steps:
        if step is None:
            publish()
        else:
            listener = ("device", step[0])
            sending.add_want(KEY, [step[1]], listener)
            wanted[listener] = wanted.get(listener, set()) | offsets([step[1]])
            got.setdefault(listener, set())
    sending.release(KEY)
    while publish():
        pass
    assert all(wanted[listener] <= got[listener] for listener in wanted)


def test_blobs_take_turns():
    sending = Sending()
    sending.add_want(KEY, [(0, 30)])
    sending.add_want(OTHER, [(0, 20)])
    assert [d for d, _, _ in drain(sending, 10)] == ["digest", "other", "digest", "other", "digest"]


def test_dropped_and_unknown_blobs_are_nobodys():
    sending = Sending()
    sending.add_want(KEY, [(0, 30)])
    sending.drop(KEY)
    sending.drop(OTHER)
    sending.release(OTHER)
    assert drain(sending, 10) == []


def test_memory_of_a_sender_is_bounded():
    sending = Sending()
    for i in range(5 * SENT_BLOBS):
        sending.add_want((str(i), "+"), [(0, 1)])
        drain(sending, 1)
    assert len(sending._blobs) <= SENT_BLOBS + 1


@pytest.mark.parametrize("served", [True, False])
def test_wants_of_single_bytes_leave_no_more_pieces_than_can_be_looked_through(served):
    sending, listener = Sending(), ("cam1", 1)
    refused = []
    for first in range(0, 6 * MAX_PIECES, 2 * MAX_RANGES):
        wanted = [(i, i + 1) for i in range(first, first + 2 * MAX_RANGES, 2)]
        try:
            sending.add_want(KEY, wanted, listener)
        except ProtocolError as error:
            refused.append(error.name)
        if served:
            drain(sending, 1)
        blob = sending._blobs[KEY]
        pieces = (blob.due, blob.held, blob.published, *blob.on_the_way.values())
        assert all(len(piece) <= MAX_PIECES + MAX_RANGES for piece in pieces)
    assert set(refused) == (set() if served else {"fragmented"})

    drain(sending, 1)
    sending.add_want(KEY, [(1, 5)], listener)  # whoever it is goes on
    sending.release(KEY)
    assert offsets([(1, 5)]) <= offsets(chunk[1:] for chunk in drain(sending, 10))


@given(st.lists(st.one_of(st.lists(small_ranges, max_size=3), st.none())), st.integers(1, 20))
def test_every_want_is_served(steps, chunk):
    """After each want there is at least one publication of each of its bytes; None publishes one chunk."""
    sending, open_bytes = Sending(), set()
    for wanted in steps:
        if wanted is None:
            sending.release(KEY)
            found = sending.take_next(chunk)
            if found is not None:
                assert found[2] - found[1] <= chunk
                open_bytes -= offsets([found[1:]])
        else:
            sending.add_want(KEY, wanted)
            open_bytes |= offsets(wanted)
    sending.release(KEY)
    for _, start, end in drain(sending, chunk):
        open_bytes -= offsets([(start, end)])
    assert not open_bytes
