"""The level of a device's prediction sets, which labels move: adaptive conformal inference (conformal.md, section 4).

The level belongs to one bundle and one wanted coverage, and is on the disk before a label is acknowledged. Another
bundle begins anew, since its scores are its own.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Final

import msgspec
from msgspec import Meta, Struct, structs
from numpy.typing import NDArray

from deploy.inference.prediction import Coverage
from deploy.inference.runtime import Runtime
from fedge.bundle.conformal import GAMMA, adapt_level
from fedge.data.problems.maths import Floats
from fedge.errors import StoreError
from fedge.system.files import read_kept, write_atomically
from fedge.wire.messages import Count, Digest

FILE: Final = "coverage.json"
"""Name of the file in HOME that keeps the level."""


class Level(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Content of HOME/coverage.json: alpha, and how many of n targets of unmarked samples their sets have covered."""

    bundle: Digest
    wanted: float
    alpha: Annotated[float, Meta(ge=-GAMMA, le=1 + GAMMA)]
    n: Count = 0
    covered: Count = 0


def read_level(home: Path) -> Level | None:
    """Read HOME/coverage.json; None if there is none, it is damaged or cannot be read."""
    with contextlib.suppress(StoreError):
        return read_kept(home / FILE, msgspec.json.Decoder(Level).decode)
    return None


class AdaptiveCoverage:
    """The prediction sets of the bundle in service, at the level that labels have led to. Safe between threads."""

    def __init__(self, home: Path, runtime: Runtime) -> None:
        """Go on from HOME/coverage.json if it is of this bundle and coverage, else begin at 1 - coverage."""
        self._path, self._runtime, self._lock = home / FILE, runtime, threading.Lock()
        self.now: Coverage | None = runtime.coverage
        """How sets are made now; None if no coverage is wanted."""
        self.level: Level | None = None
        if runtime.coverage is None:
            return
        wanted, found = runtime.coverage.wanted, read_level(home)
        if found is None or (found.bundle, found.wanted) != (runtime.digest, wanted):
            found = Level(bundle=runtime.digest, wanted=wanted, alpha=1 - wanted)
        self.level, self.now = found, runtime.make_coverage(wanted, found.alpha)

    def record(self, answers: Sequence[Floats], y: NDArray[Any], *, sensitive: bool = False) -> None:
        """Move the level by the targets (n, ...) of answers (n, ...) that this bundle gave, one after the other.

        Targets of `sensitive` samples are not counted, as the counts may leave the device. Without any score there is
        nothing to choose a threshold from, and nothing moves.

        Raises:
            StoreError: the level cannot be written; it is as before.
        """
        with self._lock:
            before = self.now
            if self.level is None or before is None or not before.n:
                return
            level, coverage, problem = self.level, before, self._runtime.task.problem
            scores = problem.compute_nonconformity(answers, y)
            for i, score in enumerate(scores.tolist()):
                one = [each[i : i + 1] for each in answers]
                covered = bool(problem.find_covered(one, y[i : i + 1], coverage.threshold)[0])
                missed = not score <= coverage.threshold
                alpha = adapt_level(level.alpha, level.wanted, missed=missed)
                told = int(not sensitive)
                level = structs.replace(level, alpha=alpha, n=level.n + told, covered=level.covered + told * covered)
                coverage = self._runtime.make_coverage(level.wanted, alpha)
            write_atomically(self._path, msgspec.json.encode(level))
            self.level, self.now = level, coverage
