"""A simulated device's bounded store of samples, by the rule of `edge_agent.samples`, in memory.

A sample's place is a function of its own digest. Of a class that is full the oldest sample goes first, except that half
of the class (`KEEP_OLD`) stays an even choice of all its samples that ever came.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Final, Self

import numpy as np
from numpy.typing import NDArray

from edge_agent.samples.past import SET_ASIDE, examine_past, preserve_frame, turn_inputs
from edge_agent.samples.places import choose_place, compute_digests, compute_rank
from fedge.data.preprocessing import preprocess
from fedge.data.task import TEST, TaskSpec
from fedge.tasks import DeviceData

KEEP_OLD: Final = 0.5


@dataclass(frozen=True, slots=True)
class Replay:
    """Samples in order of arrival: model inputs x (n, ...), labels (n,), marks (n,), places (n,) and ranks (n,)."""

    x: NDArray[np.float32]
    y: NDArray[np.int64]
    sensitive: NDArray[np.bool_]
    place: NDArray[np.int64]
    rank: NDArray[np.int64]

    @classmethod
    def make_empty(cls, task: TaskSpec) -> Self:
        """Make a store without samples."""
        whole, marks = np.zeros(0, np.int64), np.zeros(0, np.bool_)
        return cls(np.zeros((0, *task.input_shape), np.float32), whole, marks, whole, whole)

    def add(self, task: TaskSpec, x: NDArray[Any], y: NDArray[np.int64], sensitive: NDArray[np.bool_]) -> Self:
        """Return the store with further raw samples, before anything has gone."""
        inputs = preprocess(task, x)
        digests = compute_digests(inputs)
        return type(self)(
            np.concatenate([self.x, inputs]),
            np.concatenate([self.y, y]),
            np.concatenate([self.sensitive, sensitive]),
            np.concatenate([self.place, np.array([choose_place(d) for d in digests], np.int64)]),
            np.concatenate([self.rank, np.array([compute_rank(d) for d in digests], np.int64)]),
        )

    def bound(self, per_class: int) -> Self:
        """Return the store with at most so many samples of a class, and as many sensitive ones again."""
        kept = np.ones(len(self.y), np.bool_)
        for label in np.unique(self.y):
            for marked in (False, True):
                own = np.flatnonzero((self.y == label) & (self.sensitive == marked))
                kept[own[~choose_kept(self.rank[own], per_class)]] = False
        return type(self)(self.x[kept], self.y[kept], self.sensitive[kept], self.place[kept], self.rank[kept])

    def make_data(self) -> DeviceData:
        """Make what a worker sees: the places train and validation, without what the newest samples contradict."""
        seen = np.flatnonzero(self.place != TEST)
        turns, now = preserve_frame(examine_past(self.x[seen], self.y[seen], self.sensitive[seen]))
        held = seen[turns != SET_ASIDE]
        x, y = turn_inputs(self.x[held], turns[turns != SET_ASIDE]), self.y[held]
        data = DeviceData.from_samples(x, y, sensitive=self.sensitive[held], split=self.place[held], seed=0)
        return replace(data, quarters=now)


def choose_kept(rank: NDArray[np.int64], most: int) -> NDArray[np.bool_]:
    """Choose which samples of a class stay, (n,), given their ranks (n,) in order of arrival.

    The smallest ranks stay, an even choice of all that ever came, and of the others the newest.
    """
    if len(rank) <= most:
        return np.ones(len(rank), np.bool_)
    kept = np.zeros(len(rank), np.bool_)
    kept[np.argsort(rank, kind="stable")[: int(KEEP_OLD * most)]] = True
    others = np.flatnonzero(~kept)
    kept[others[len(others) - (most - int(kept.sum())) :]] = True
    return kept
