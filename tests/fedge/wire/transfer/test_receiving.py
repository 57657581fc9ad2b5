"""What a receiver asks for, under any order, loss and duplication."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedge.errors import ProtocolError
from fedge.wire.connection.packet_limits import LARGE_CHUNK
from fedge.wire.transfer.ranges import MAX_PIECES, MAX_RANGES
from fedge.wire.transfer.receiving import ASK_BYTES, LEAST_CHUNK, STALL_CAP_S, STEP_BYTES, Receiving


@given(st.lists(st.tuples(st.integers(1, 60), st.lists(st.integers(0, 200), max_size=6)), max_size=8))
def test_any_order_loss_and_duplication_ends_in_the_right_bytes(rounds):
    """A network that loses, repeats, reorders and cuts chunks as it likes, and at last behaves."""
    blob = bytes(range(1, 201))
    receiving, got = Receiving(len(blob)), bytearray(len(blob))

    def arrive(start: int, end: int) -> None:
        for low, high in receiving.record_arrived(start, end - start):
            got[low:high] = blob[low:high]
            receiving.record_stored(low, high)

    for cut, picks in rounds:
        asked = receiving.request_ranges(ASK_BYTES)
        chunks = [(i, min(i + cut, end)) for start, end in asked for i in range(start, end, cut)]
        for pick in picks if chunks else ():
            arrive(*chunks[pick % len(chunks)])
        receiving.record_stalled()
    while not receiving.complete:
        for start, end in reversed(receiving.request_ranges(ASK_BYTES)):
            arrive(start, end)
    assert bytes(got) == blob
    assert receiving.under_way == 0


def test_asks_for_a_part_and_for_more_when_half_of_it_came():
    receiving = Receiving(3 * ASK_BYTES)
    assert receiving.request_ranges(10 * ASK_BYTES) == ((0, ASK_BYTES),)
    assert receiving.request_ranges(10 * ASK_BYTES) == ()
    receiving.record_arrived(0, ASK_BYTES // 2)
    receiving.record_stored(0, ASK_BYTES // 2)
    assert receiving.request_ranges(10 * ASK_BYTES) == ((ASK_BYTES, ASK_BYTES + ASK_BYTES // 2),)
    assert receiving.under_way == ASK_BYTES


def test_without_budget_one_chunk_is_still_asked_for():
    receiving = Receiving(ASK_BYTES)
    assert receiving.request_ranges(-5) == ((0, LARGE_CHUNK),)


def test_after_a_stall_it_begins_with_one_chunk_and_grows_again():
    receiving = Receiving(4 * ASK_BYTES)
    receiving.request_ranges(ASK_BYTES)
    patience = receiving.patience_s
    receiving.record_stalled()
    assert receiving.under_way == 0
    assert receiving.patience_s == 2 * patience
    assert receiving.request_ranges(ASK_BYTES) == ((0, LARGE_CHUNK),)
    receiving.record_arrived(0, LARGE_CHUNK)
    receiving.record_stored(0, LARGE_CHUNK)
    assert receiving.request_ranges(ASK_BYTES) == ((LARGE_CHUNK, 3 * LARGE_CHUNK),)
    for _ in range(10):
        receiving.record_stalled()
    assert receiving.patience_s == STALL_CAP_S


def test_a_few_bytes_are_no_progress():
    receiving = Receiving(ASK_BYTES)
    receiving.request_ranges(ASK_BYTES)
    for length, advanced in ((STEP_BYTES, True), (1, False), (STEP_BYTES - 2, False), (1, True), (1, False)):
        assert progress(receiving, length) is advanced
    assert progress(receiving, ASK_BYTES - receiving.missing[0][0]), "all that was asked for"


def test_chunks_as_small_as_those_that_came_are_progress():
    """Of a broker that takes no larger ones, which the sender alone finds out; smaller ones no sender cuts."""
    receiving = Receiving(ASK_BYTES)
    receiving.request_ranges(ASK_BYTES)
    assert not progress(receiving, 1)
    assert not progress(receiving, LEAST_CHUNK - 2)
    assert progress(receiving, LEAST_CHUNK)
    assert [progress(receiving, length) for length in (8192, 4096, 4096, 8191)] == [True, False, True, False]
    assert [progress(receiving, length) for length in (LARGE_CHUNK, STEP_BYTES - 1, 1)] == [True, False, True]


def progress(receiving: Receiving, length: int) -> bool:
    """Whether the next bytes, in one chunk, are."""
    start = receiving.missing[0][0]
    receiving.record_arrived(start, length)
    receiving.record_stored(start, start + length)
    return receiving.has_advanced()


def test_resumes_with_what_is_missing():
    receiving = Receiving(100, have=[(0, 40), (60, 100)])
    assert receiving.missing == ((40, 60),)
    assert receiving.request_ranges(ASK_BYTES) == ((40, 60),)


def test_a_want_never_has_too_many_ranges():
    receiving = Receiving(4 * MAX_RANGES, have=[(i, i + 1) for i in range(0, 4 * MAX_RANGES, 2)])
    assert len(receiving.request_ranges(ASK_BYTES)) == MAX_RANGES


def test_chunks_of_one_byte_leave_no_more_pieces_than_can_be_looked_through():
    size = 4 * MAX_PIECES
    receiving = Receiving(size)
    for offset in range(1, 2 * MAX_PIECES - 1, 2):
        receiving.record_stored(*receiving.record_arrived(offset, 1)[0])
    before = receiving.missing

    with pytest.raises(ProtocolError) as caught:
        receiving.record_arrived(size - 2, 1)

    assert caught.value.name == "fragmented"
    assert receiving.missing == before
    assert len(before) == MAX_PIECES
    while not receiving.complete:  # from the start of a gap on, as senders send it
        start, end = receiving.missing[0]
        for piece in receiving.record_arrived(start, min(end, start + 7) - start):
            receiving.record_stored(*piece)


def test_bytes_that_are_there_are_not_new():
    receiving = Receiving(100, have=[(10, 20)])
    assert receiving.record_arrived(0, 30) == [(0, 10), (20, 30)]
    assert receiving.record_arrived(12, 5) == []


@pytest.mark.parametrize(("offset", "length"), [(0, 0), (-1, 5), (96, 5), (100, 1), (2**60, 1)])
def test_chunks_beyond_the_blob_are_refused(offset, length):
    receiving = Receiving(100)
    with pytest.raises(ProtocolError) as caught:
        receiving.record_arrived(offset, length)
    assert caught.value.name == "out-of-range"
    assert receiving.missing == ((0, 100),)
