"""Ranges are sets of offsets."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from fedge.wire.transfer.ranges import Ranges

small_ranges = st.tuples(st.integers(0, 40), st.integers(0, 40)).map(sorted).map(tuple)


def offsets(ranges) -> set[int]:
    return {i for start, end in ranges for i in range(start, end)}


@given(st.lists(st.tuples(st.sampled_from(["add", "remove"]), small_ranges)), small_ranges)
def test_ranges_are_a_set_of_offsets(steps, probe):
    ranges, model = Ranges(), set()
    for verb, (start, end) in steps:
        getattr(ranges, verb)(start, end)
        model = model | offsets([(start, end)]) if verb == "add" else model - offsets([(start, end)])
    held = list(ranges)
    assert offsets(held) == model
    assert ranges.n_bytes == len(model)
    assert len(ranges) == len(held)
    assert all(a[1] < b[0] for a, b in pairwise(held))  # disjoint, sorted, merged
    assert offsets(ranges.find_overlap(*probe)) == model & offsets([probe])
