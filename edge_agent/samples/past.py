"""What of a device's past still holds: a pure function of its labelled samples in order of arrival (docs/samples.md).

A device's world may change: a camera is turned or moved, or classes get another meaning. Its old samples then
contradict its newest ones, and as there are more of them, they would decide in training and validation alike.
Contradiction is found by the nearest of the samples that came before: it has the same class less than half as often as
before the change (beyond agreement by chance). Wrong labels alone are no contradiction, for they change no inputs and
do not agree among themselves.

What came before a change is the past. Square images are compared in all quarter turns. If a turn of the past explains
the newest samples, the device goes on as if nothing had changed, and what it sees from now on is turned back. Otherwise
the past is set aside.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise
from typing import Final, Protocol, Self

import numpy as np
from numpy.typing import NDArray

from fedge.bundle.formula import compute_gate_features
from fedge.data.preprocessing import is_square_image, turn_images

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]

SET_ASIDE: Final = -1
"""In place of a number of quarter turns: the sample takes part in nothing."""
MIN_TESTED: Final = 8
"""Fewest samples on each side of a change that must have been compared."""
KNOWN: Final = 4
"""Fewest samples of a class that must have come before, so that another one of it can be compared."""
FALSE_ALARM: Final = 1e-3
"""Highest probability of each piece of evidence for a change if there is none."""
UNSURE: Final = 0.05
"""Highest probability of the evidence for one quarter turn against each other, if both explain equally much."""
MOVED: Final = 0.75
"""Probability from which on a sample after the change is farther from what came before it than one before the change
is."""
COMPARED: Final = 1024
"""Most samples that are compared: the newest half of them, and an even choice of what came before."""
FORGOTTEN: Final = 40
"""With fewer samples than this from before a known change, there is no telling any more whether it was one."""


class Rows(Protocol):
    """Model inputs, (n, *input_shape), of which some are taken by number."""

    def __getitem__(self, numbers: Ints, /) -> NDArray[np.float32]: ...


def examine_past(x: Rows, y: Ints, sensitive: Bools, *, begun_with: int = 0, known: int = 0) -> Ints:
    """Examine whether old samples hold; return by how many quarters each one matches the newest, or `SET_ASIDE`, (n,).

    Sensitive samples decide nothing: they go with those that came at their time.

    Args:
        x: model inputs in order of arrival, (n, *input_shape); few of them are taken.
        y: labels, (n,).
        sensitive: marks, (n,).
        begun_with: the first so many came without an order, so nothing changes among them.
        known: so many came before a change that was found earlier, and are compared first; 0 without one.
    """
    shared = np.flatnonzero(~sensitive)
    begun = int((shared < begun_with).sum())
    chosen = _choose_compared(len(shared), int((shared < known).sum()))
    rows = shared[chosen]
    if len(rows) < 2 * MIN_TESTED:
        return np.zeros(len(y), np.int64)
    images, labels = x[rows], y[rows]
    ends = [0, *find_changes(_describe(images), labels, begun_with=int((chosen < begun).sum())), len(rows)]
    quarters = np.zeros(len(y), np.int64)
    newest = slice(ends[-2], ends[-1])
    for first, last in pairwise(ends[:-1]):
        past = slice(first, last)
        turn = find_turn(images[past], labels[past], images[newest], labels[newest])
        is_known = len(rows) < len(shared) and abs(last - int((rows < known).sum())) < MIN_TESTED
        quarters[0 if not first else rows[first] : known if is_known else rows[last]] = turn
    return quarters


def preserve_frame(quarters: Ints) -> tuple[Ints, int]:
    """Turn so that the first samples that hold stay as they are, since all models learned from these.

    Args:
        quarters: of `examine_past`, (n,).

    Returns:
        By how many quarters each sample is to be turned, or `SET_ASIDE`, and by how many what the device sees now.
    """
    held = quarters[quarters != SET_ASIDE]
    first = int(held[0]) if len(held) else 0
    turns: Ints = np.where(quarters == SET_ASIDE, SET_ASIDE, (quarters - first) % 4)
    return turns, -first % 4


def recall_frame(sensitive: Bools, known: int, quarters: int) -> Ints | None:
    """Return by how many quarters samples (n,) are turned if a known change can no longer be found; None if it can.

    So a turned camera goes on as it was when hardly any sample from before its turn is left.

    Args:
        sensitive: marks, (n,).
        known: so many came before the change.
        quarters: by how many what the device sees since is turned.
    """
    if not quarters or int((~sensitive[:known]).sum()) >= FORGOTTEN:
        return None
    return np.where(np.arange(len(sensitive)) < known, 0, quarters)


def turn_inputs(x: NDArray[np.float32], quarters: Ints) -> NDArray[np.float32]:
    """Turn model inputs (n, *input_shape) counter-clockwise by quarters (n,)."""
    if not quarters.any():
        return x
    turned = x.copy()
    for k in np.unique(quarters[quarters > 0]):
        own = quarters == k
        turned[own] = turn_images(x[own], int(k))
    return turned


def find_changes(features: Floats, y: Ints, *, begun_with: int = 0) -> list[int]:
    """Find the places in order of arrival at which what came before stops to hold, ascending.

    Each change is that with the strongest evidence among the samples after the one before.

    Args:
        features: (n, F), compared by Euclidean distance.
        y: labels, (n,).
        begun_with: there is no change before this many samples.
    """
    found: list[int] = []
    distances = _compute_distances(features, features)
    while True:
        start = found[-1] if found else 0
        arrived = _Arrived.from_distances(distances[start:, start:], y[start:])
        change = arrived.find_change(max(1, begun_with - start))
        if change is None:
            return found
        found.append(start + change)


@dataclass(frozen=True, slots=True)
class _Compared:
    """Samples (m,) by number, their labels, whether the nearest one before has the same, and how far it is.

    `chance`: that of the same class if classes came by chance.
    """

    rows: Ints
    y: Ints
    right: Bools
    distance: Floats
    chance: Floats

    def compute_rates(self, n_classes: int) -> Floats:
        """Compute the share of right ones by class, (C,), drawn towards that of all as by two more; NaN if none is."""
        whole = (self.right.sum() + 1) / (len(self.right) + 2)
        n, right = (np.bincount(y, minlength=n_classes) for y in (self.y, self.y[self.right]))
        rates: Floats = np.where(n, (right + 2 * whole) / (n + 2), np.nan)
        return rates

    def select(self, kept: Bools) -> Self:
        """Return some of them."""
        return type(self)(self.rows[kept], self.y[kept], self.right[kept], self.distance[kept], self.chance[kept])


@dataclass(frozen=True, slots=True)
class _Arrived:
    """Samples in order of arrival: labels (n,), distances (n, n), and what is known of the first k of them.

    `nearest`: for each sample, the nearest one among the first k + 1, (n, n). `seen`: how many of each class are among
    the first k, (n + 1, C).
    """

    y: Ints
    distances: Floats
    nearest: Ints
    seen: Ints

    @classmethod
    def from_distances(cls, distances: Floats, y: Ints) -> Self:
        """Make them of the distances between all samples."""
        seen = np.zeros((len(y) + 1, int(y.max(initial=0)) + 1), np.int64)
        np.cumsum(np.eye(seen.shape[1], dtype=np.int64)[y], axis=0, out=seen[1:])
        is_nearest = distances == np.minimum.accumulate(distances, axis=1)
        nearest = np.maximum.accumulate(np.where(is_nearest, np.arange(len(y)), 0), axis=1)
        return cls(y, distances, nearest, seen)

    def find_change(self, first: int) -> int | None:
        """Find the change with the strongest evidence, not before the `first` place; None without one.

        What is expected before it differs between places by chance, so the place is chosen with the median of all.
        """
        compared = [self._compare_around(change) for change in range(first, len(self.y) - MIN_TESTED + 1)]
        evidence = [self._measure(before, after, expected) for before, after, expected in compared]
        if not any(evidence):
            return None
        median = float(np.median([c[2] for c, known in zip(compared, evidence, strict=True) if known]))
        again = [self._measure(*c[:2], median) if known else 0.0 for c, known in zip(compared, evidence, strict=True)]
        return first + int(np.argmax(again))

    def _compare_around(self, change: int) -> tuple[_Compared, _Compared, float]:
        """Compare the samples before a change, and those after it, with what came before them.

        Before the change, too, a sample is compared with those that came as much earlier as the newest samples are
        many, for neighbours in time are alike, and would explain each other too well. After it, only classes that were
        compared before count. The share of right ones that is expected of these is the third result.
        """
        n, old = len(self.y), np.arange(change)
        before = self._compare(old, np.maximum(old - min(n - change, change // 4), 0))
        after = self._compare(np.arange(change, n), np.full(n - change, change))
        rates = before.compute_rates(self.seen.shape[1])[after.y]
        after = after.select(np.isfinite(rates))
        return before, after, float(np.nanmean(rates)) if len(after.y) else 0.0

    def _measure(self, before: _Compared, after: _Compared, expected: float) -> float:
        """Return the evidence in nats that samples after a change contradict those before; 0 if they do not."""
        if min(len(before.y), len(after.y)) < MIN_TESTED:
            return 0.0
        chance = float(after.chance.mean())
        evidence = measure_contradiction(len(after.y), float(after.right.mean()), expected, chance)
        if evidence and (
            has_moved(before.distance, after.distance) or self._matches_itself(after, (expected + chance) / 2)
        ):
            return evidence
        return 0.0

    def _compare(self, rows: Ints, limits: Ints) -> _Compared:
        """Compare samples with the nearest of the first `limits` ones, if enough of their class are among these."""
        known = self.seen[limits, self.y[rows]] >= KNOWN
        rows, limits = rows[known], limits[known]
        found, y = self.nearest[rows, limits - 1], self.y[rows]
        return _Compared(rows, y, self.y[found] == y, self.distances[rows, found], self.seen[limits, y] / limits)

    def _matches_itself(self, after: _Compared, enough: float) -> bool:
        """Return whether the samples after a change explain enough of each other, and surely more than the past does.

        `enough`: the share of right ones from which on they do.
        """
        own = self.distances[np.ix_(after.rows, after.rows)]
        np.fill_diagonal(own, np.inf)
        right = after.y[own.argmin(axis=1)] == after.y
        return bool(right.mean() > enough) and compute_sign_test(right, after.right) < FALSE_ALARM


def measure_contradiction(n: int, right: float, expected: float, chance: float) -> float:
    """Return n KL(right ‖ expected) in nats, at least what is sure (Chernoff 1952), or 0 if half or more is explained.

    Args:
        n: number of samples after the change.
        right: share of them whose nearest one before has the same class.
        expected: the same before the change.
        chance: share that would be right by chance; beyond it, less than half as much as before is a contradiction.
    """
    if right >= expected or right - chance > (expected - chance) / 2:
        return 0.0
    evidence = n * compute_divergence(right, expected)
    return evidence if evidence > -math.log(FALSE_ALARM) else 0.0


def compute_divergence(a: float, b: float) -> float:
    """Return KL(a ‖ b) of two probabilities with 0 < b < 1."""
    return sum(p * math.log(p / q) for p, q in ((a, b), (1 - a, 1 - b)) if p > 0)


def has_moved(before: Floats, after: Floats) -> bool:
    """Return whether inputs are farther from what came before than they were (Mann and Whitney 1947)."""
    n, m = len(before), len(after)
    farther = float((after[:, np.newaxis] > before).mean() + (after[:, np.newaxis] == before).mean() / 2)
    deviations = (farther - 0.5) / math.sqrt((n + m + 1) / (12 * n * m))
    return farther >= MOVED and math.erfc(deviations / math.sqrt(2)) / 2 < FALSE_ALARM


def find_turn(past: NDArray[np.float32], y: Ints, newest: NDArray[np.float32], y_newest: Ints) -> int:
    """Return the quarters by which the past, turned, explains the newest samples, or `SET_ASIDE`.

    It must explain at least half as much as it explains of itself, and surely more than in each other turn.
    """
    turns = range(4 if is_square_image(past.shape[1:]) else 1)
    known = np.bincount(y, minlength=int(y_newest.max(initial=0)) + 1)[y_newest] >= KNOWN
    if known.sum() < MIN_TESTED:
        return SET_ASIDE
    target, truth = _describe(newest[known]), y_newest[known]
    views = [_describe(turn_images(past, k)) for k in turns]
    distances = [_compute_distances(target, view) for view in views]
    from_own_class = [np.where(y == truth[:, np.newaxis], d, np.inf).min(axis=1) for d in distances]
    best = min(turns, key=lambda k: float(from_own_class[k].sum()))
    own = _compute_distances(views[0], views[0])
    np.fill_diagonal(own, np.inf)
    expected, chance = float((y[own.argmin(axis=1)] == y).mean()), float((np.bincount(y) / len(y))[truth].mean())
    if (y[distances[best].argmin(axis=1)] == truth).mean() - chance < (expected - chance) / 2:
        return SET_ASIDE
    nearer = [compute_sign_test(from_own_class[best] < d, d < from_own_class[best]) for d in from_own_class]
    return best if all(nearer[k] < UNSURE for k in turns if k != best) else SET_ASIDE


def compute_sign_test(one: Bools, other: Bools) -> float:
    """Return how likely it is by chance that `one` is right so much more often than `other`, where they differ."""
    won, differ = int((one & ~other).sum()), int((one != other).sum())
    ways = sum(math.comb(differ, k) for k in range(won, differ + 1))
    return float(ways / 2**differ)


def _describe(x: NDArray[np.float32]) -> Floats:
    """Describe model inputs for comparison, (n, F): of images the windows' means, whatever the light; others as are."""
    features = compute_gate_features(x.astype(np.float64))
    if x.ndim != 4:
        return features
    features = features - features.mean(axis=1, keepdims=True)
    lengths = np.linalg.norm(features, axis=1, keepdims=True)
    described: Floats = features / np.maximum(lengths, np.finfo(np.float64).tiny)
    return described


def _compute_distances(a: Floats, b: Floats) -> Floats:
    """Return squared distances (n, m)."""
    squares = (a**2).sum(axis=1)[:, np.newaxis] + (b**2).sum(axis=1) - 2 * (a @ b.T)
    distances: Floats = np.maximum(squares, 0.0)
    return distances


def _choose_compared(n: int, known: int) -> Ints:
    """Return which of n samples are compared, ascending; of the older ones, those before a `known` change if any."""
    if n <= COMPARED:
        return np.arange(n)
    newest = n - COMPARED // 2
    older = min(known, newest) or newest
    return np.concatenate([np.linspace(0, older - 1, min(older, COMPARED // 2)).astype(np.int64), np.arange(newest, n)])
