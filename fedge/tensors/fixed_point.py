"""Model changes as integers of a ring, so that sums are exact and a mask that is uniform in the ring hides the changes.

A device of weight n sends a number v as round(n * v * 2^s) modulo 2^b. The scale 2^s is the largest power of two, at
least 1, with

    cohort * (heaviest * limit + 1/2) * 2^s < 2^(b-1),      |v| <= limit,  n <= heaviest

No sum of the cohort can then overflow, as rounding adds at most 1/2 to a number. Both sides use this formula although
one more bit would at times fit, because it needs only the size of the cohort and its largest weight. Values above the
limit are clipped. Rounding moves the weighted mean of a number by at most cohort / 2 units of 2^-s / (sum of n).

    ring      numbers                                limit
    2^32      the change of parameters               8
    2^64      the change of buffers and counters     2^20
    2^64      n itself, unscaled
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from fedge.errors import ProtocolError
from fedge.tensors.layout import Layout, Model


@dataclass(frozen=True, slots=True)
class Ring:
    """The integers modulo 2^bits for numbers of at most `limit`."""

    bits: int
    limit: float

    def compute_fraction_bits(self, cohort: int, heaviest: int) -> int:
        """Return the exponent s of the scale; negative if no scale fits."""
        return math.floor(math.log2((2 ** (self.bits - 1) - 1) / (cohort * (heaviest * self.limit + 0.5))))


PARAMS: Final = Ring(32, 8.0)
OTHERS: Final = Ring(64, 2.0**20)


@dataclass(frozen=True, slots=True)
class Summand:
    """A device's contribution, a mask, or their sum: params (d,) uint32, others (b + c + 1,) uint64, n last."""

    params: NDArray[np.uint32]
    others: NDArray[np.uint64]

    def add(self, other: Summand) -> None:
        """Add another summand in place, modulo the rings."""
        np.add(self.params, other.params, out=self.params)
        np.add(self.others, other.others, out=self.others)

    def subtract(self, other: Summand) -> None:
        """Subtract another summand in place, modulo the rings."""
        np.subtract(self.params, other.params, out=self.params)
        np.subtract(self.others, other.others, out=self.others)

    def to_bytes(self) -> bytes:
        """Return the numbers as little-endian bytes, 4 d + 8 (b + c + 1) of them."""
        return self.params.astype("<u4").tobytes() + self.others.astype("<u8").tobytes()


def count_elements(layout: Layout) -> tuple[int, int]:
    """Return the numbers of a summand's elements in the two rings."""
    return layout.n_params, sum(t.size for t in layout.tensors if t.kind != "param") + 1


def count_bytes(layout: Layout) -> int:
    """Return the size of a summand in bytes."""
    params, others = count_elements(layout)
    return 4 * params + 8 * others


def from_bytes(data: bytes | bytearray, layout: Layout) -> Summand:
    """Parse `Summand.to_bytes`; uniformly random bytes give a uniform summand.

    Raises:
        ProtocolError: `malformed` if the length is wrong.
    """
    if len(data) != count_bytes(layout):
        raise ProtocolError("malformed", f"a masked update has {len(data)} bytes; {count_bytes(layout)} are needed")
    params, others = count_elements(layout)
    return Summand(
        np.frombuffer(data, "<u4", params).astype(np.uint32, copy=False),
        np.frombuffer(data, "<u8", others, 4 * params).astype(np.uint64, copy=False),
    )


def make_zero(layout: Layout) -> Summand:
    """Return the empty sum."""
    params, others = count_elements(layout)
    return Summand(np.zeros(params, np.uint32), np.zeros(others, np.uint64))


def compute_heaviest(cohort: int) -> int:
    """Return the largest weight for which a cohort of this size has a scale of at least 1."""
    return int(((2 ** (PARAMS.bits - 1) - 1) / cohort - 0.5) / PARAMS.limit)


def make_summand(change: Model, weight: int, cohort: int, heaviest: int) -> Summand:
    """Make a device's contribution from its model change (with buffers and counters).

    Raises:
        ValueError: the weight is above `heaviest`, or 0, or the scale would be below 1.
    """
    if not 0 < weight <= heaviest:
        raise ValueError(f"the weight is {weight}; it must be 1 to {heaviest}")
    others = np.concatenate([change.buffers.astype(np.float64), change.counters.astype(np.float64)])
    return Summand(
        _scale_to_units(change.params, PARAMS, weight, cohort, heaviest).astype(np.uint32),
        np.append(_scale_to_units(others, OTHERS, weight, cohort, heaviest), weight).astype(np.uint64),
    )


def compute_mean_change(total: Summand, layout: Layout, cohort: int, heaviest: int) -> Model:
    """Return the weighted mean of the changes in an unmasked sum, with counters rounded.

    Raises:
        ValueError: the weights sum to a value impossible for the cohort.
    """
    weights = int(total.others[-1])
    if not 0 < weights <= cohort * heaviest:
        raise ValueError(f"weights that sum to {weights}, {cohort} devices have at most {cohort * heaviest}")
    n_buffers = sum(t.size for t in layout.select_kind("buffer"))
    params = total.params.view(np.int32) / (weights * 2.0 ** _compute_bits(PARAMS, cohort, heaviest))
    others = total.others[:-1].view(np.int64) / (weights * 2.0 ** _compute_bits(OTHERS, cohort, heaviest))
    return Model(
        params.astype(np.float32), others[:n_buffers].astype(np.float32), np.rint(others[n_buffers:]).astype(np.int64)
    )


def _scale_to_units(values: NDArray[Any], ring: Ring, weight: int, cohort: int, heaviest: int) -> NDArray[np.int64]:
    clipped = np.clip(values.astype(np.float64), -ring.limit, ring.limit)
    return np.rint(clipped * (weight * 2.0 ** _compute_bits(ring, cohort, heaviest))).astype(np.int64)


def _compute_bits(ring: Ring, cohort: int, heaviest: int) -> int:
    bits = ring.compute_fraction_bits(cohort, heaviest)
    if bits < 0:
        raise ValueError(f"weights up to {heaviest} of {cohort} devices do not fit into 2^{ring.bits}")
    return bits
