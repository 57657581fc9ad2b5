"""Rounding of numbers to 8 bits with a scale or to the upper 16 bits, and choice of the largest, block by block."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Sequence
from itertools import chain, pairwise
from typing import TYPE_CHECKING, Final, TypeVar

import numpy as np
from numpy.typing import NDArray

from fedge.tensors.layout import Floats

if TYPE_CHECKING:
    from concurrent.futures import ThreadPoolExecutor

Found = TypeVar("Found")

BLOCK: Final = 65_536  # numbers rounded at a time, so that they stay in the CPU cache between operations
LARGEST_BFLOAT16: Final = np.uint32(0x7F7F)  # magnitude bits; a finite number must not be rounded to infinity
_LARGEST_SCALE: Final = np.nextafter(np.finfo(np.float32).max / np.float32(127), np.float32(0))  # x 127 is finite


class NotFiniteError(ValueError):
    """A tensor to be stored holds NaN or infinity."""


def find_largest(numbers: Floats, k: int) -> NDArray[np.int64]:
    """Return the ascending positions of the k numbers of largest magnitude; on ties, the first ones."""
    magnitudes = np.abs(numbers)
    least = np.partition(magnitudes, -k)[-k] if k else np.inf
    larger = np.flatnonzero(magnitudes > least)
    return np.sort(np.concatenate([larger, np.flatnonzero(magnitudes == least)[: k - len(larger)]]))


def to_int8(numbers: Floats) -> tuple[NDArray[np.int8], Floats]:
    """Return a vector as whole steps of a scale, and the scale, shape ()."""
    scale = scale_of(map_blocks(numbers.size, lambda part: compute_largest(numbers[part])))
    steps = np.empty(numbers.size, np.int8)
    map_blocks(numbers.size, lambda part: round_into(numbers[part], scale, steps[part]))
    return steps, scale


def compute_largest(block: Floats) -> np.float32:
    """Return the largest magnitude; NaN if a number is NaN."""
    return np.float32(np.maximum(np.max(block), -np.min(block)))


def scale_of(largest: Sequence[np.float32]) -> Floats:
    """Return the scale, shape (), for blocks with these largest magnitudes."""
    found = np.max(largest, initial=np.float32(0))
    if not np.isfinite(found):
        raise NotFiniteError("numbers that are to be rounded are not finite")
    return np.asarray(np.minimum(found / np.float32(127), _LARGEST_SCALE), dtype=np.float32)


def round_into(block: Floats, scale: Floats, steps: NDArray[np.int8]) -> None:
    """Write a block into `steps` as whole steps of the scale."""
    if scale == 0:  # all zero, or so small that the scale underflows
        steps[:] = 0
        return
    quotient = block / scale
    np.rint(quotient, out=quotient)
    np.clip(quotient, -127, 127, out=quotient)  # a denormal scale is too coarse for the quotient
    steps[:] = quotient


def map_blocks(size: int, work: Callable[[slice], Found], *, threaded: bool = False) -> list[Found]:
    """Apply `work` to each block of a vector, in order; if `threaded`, each processor gets a share of the blocks."""

    @np.errstate(over="ignore", invalid="ignore")  # a scale that is not finite is refused
    def map_share(share: list[slice]) -> list[Found]:
        return [work(part) for part in share]

    parts = [slice(start, start + BLOCK) for start in range(0, size, BLOCK)]
    n = min(len(os.sched_getaffinity(0)), len(parts)) if threaded else 1
    if n <= 1:
        return map_share(parts)
    bounds = [len(parts) * k // n for k in range(n + 1)]
    return list(chain.from_iterable(get_threads().map(map_share, [parts[a:b] for a, b in pairwise(bounds)])))


@functools.cache
def get_threads() -> ThreadPoolExecutor:
    """Return threads for long vectors; numpy lets them work in parallel."""
    from concurrent.futures import ThreadPoolExecutor

    return ThreadPoolExecutor(len(os.sched_getaffinity(0)), thread_name_prefix="fedge-vectors")


def to_bfloat16(tensor: Floats) -> NDArray[np.uint16]:
    """Return the upper 16 bits of each number, rounded to nearest, ties to even."""
    bits: NDArray[np.uint32] = np.asarray(tensor, order="C").view(np.uint32)
    odd = (bits >> np.uint32(16)) & np.uint32(1)
    rounded = (bits + np.uint32(0x7FFF) + odd) >> np.uint32(16)  # no carry beyond the sign: the number is finite
    magnitude: NDArray[np.uint32] = np.minimum(rounded & np.uint32(0x7FFF), LARGEST_BFLOAT16)
    return (magnitude | (rounded & np.uint32(0x8000))).astype(np.uint16)
