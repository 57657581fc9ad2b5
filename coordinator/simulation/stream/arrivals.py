"""The samples that arrive at each device in a campaign, and the tests of that time: pure functions on arrays."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from coordinator.simulation.federation import Federation
from coordinator.simulation.stream.happenings import WRONG_SHARE, Happenings
from fedge.tasks import Share
from fedge.tasks.pool import Pool
from fedge.tasks.shares import rotate_images

Ints = NDArray[np.int64]
FIRST: Final = 4
"""How many times as many samples arrive before the first campaign as before another."""
_DEALT, _WRONG = 101, 103  # separate random streams


@dataclass(frozen=True, slots=True)
class Samples:
    """Raw samples x (n, ...), labels (n,) and marks (n,)."""

    x: NDArray[Any]
    y: Ints
    sensitive: NDArray[np.bool_]


class Stream:
    """All campaigns' samples of a federation's devices. A device's own test samples make the tests of all campaigns.

    Args:
        federation: the devices' samples as one would partition them at once.
        happens: what happens to whom.
        seed: seed of the draws.
    """

    def __init__(self, federation: Federation, happens: Happenings, *, seed: int) -> None:
        self.happens = happens
        self._task, self._shares, self._seed = federation.task, federation.shares, seed
        self._dealt = {
            i: distribute(_join(share).y, happens, np.random.default_rng((seed, _DEALT, number)))
            for number, (i, share) in enumerate(federation.shares.items())
        }
        self._numbers: Mapping[str, int] = {i: number for number, i in enumerate(federation.shares)}

    def list_arrivals(self, device_id: str, campaign: int) -> Samples:
        """List the samples that arrive at a device before a campaign, in order."""
        source = self.happens.find_source(device_id, campaign)
        share = _join(self._shares[source])
        own = self._dealt[source][campaign - 1]
        y = share.y[own]
        if self.happens.has_wrong_labels(device_id, campaign):
            rng = np.random.default_rng((self._seed, _WRONG, self._numbers[device_id], campaign))
            y = randomise_labels(y, self._task.n_classes, rng)
        return Samples(self._view(share.x[own], device_id, campaign), y, share.sensitive[own])

    def list_tests(self, device_id: str, campaign: int) -> Samples:
        """List the test samples of a device as the world is in a campaign, with the classes that are known by then."""
        share = self._shares[self.happens.find_source(device_id, campaign)]
        known = np.array(self.happens.births)[share.y_test] <= campaign
        x, y = share.x_test[known], share.y_test[known]
        return Samples(self._view(x, device_id, campaign), y, np.zeros(len(y), np.bool_))

    def _view(self, x: NDArray[Any], device_id: str, campaign: int) -> NDArray[Any]:
        """Return raw samples as the device's sensor sees them in a campaign."""
        empty = Pool(x[:0], np.zeros(0, np.int64), self._task)
        turned = rotate_images(empty, x, self.happens.count_turns(device_id, campaign))
        gain = self.happens.compute_gain(campaign)
        return turned if gain == 1 else scale_inputs(turned, gain)


def scale_inputs(x: NDArray[Any], gain: float) -> NDArray[Any]:
    """Return raw inputs times a gain in (0, 1], in their own type."""
    scaled = x * np.float32(gain)
    return np.round(scaled).astype(x.dtype) if x.dtype.kind in "iu" else scaled.astype(x.dtype)


def distribute(y: Ints, happens: Happenings, rng: np.random.Generator) -> list[Ints]:
    """Distribute samples with labels (n,) over the campaigns, each class evenly from its birth on.

    Returns the positions by campaign. The first campaign gets `FIRST` times as many of the classes that are there from
    the beginning.
    """
    dealt: list[list[Ints]] = [[] for _ in range(happens.campaigns)]
    for label in np.unique(y):
        birth = happens.births[label]
        chosen = rng.permutation(np.flatnonzero(y == label))
        slots = [c for c in range(birth, happens.campaigns + 1) for _ in range(FIRST if c == 1 else 1)]
        slots = [slots[k] for k in rng.permutation(len(slots))] if len(chosen) < len(slots) else slots
        for c, part in zip(slots, np.array_split(chosen, len(slots)), strict=True):
            dealt[c - 1].append(part)
    return [rng.permutation(np.concatenate([np.zeros(0, np.int64), *parts])) for parts in dealt]


def randomise_labels(y: Ints, n_classes: int, rng: np.random.Generator) -> Ints:
    """Return labels (n,) of which a share is wrong: `WRONG_SHARE` of them, moved to another class at random."""
    wrong = rng.random(len(y)) < WRONG_SHARE
    moved: Ints = (y + rng.integers(1, n_classes, len(y))) % n_classes
    return np.where(wrong, moved, y)


def _join(share: Share) -> Samples:
    """Join a share's training and validation samples, whose places in a stream their digests decide."""
    return Samples(
        np.concatenate([share.x_train, share.x_val]),
        np.concatenate([share.y_train, share.y_val]),
        np.concatenate([share.sensitive, share.sensitive_val]),
    )
