"""True targets of samples that a device is asked about: they go into the device's store, and may contradict its bundle.

A target (the label of a class, or numbers, a mask and so on) comes with its sample, or with the id of an earlier
request. What was answered is on the disk. Only a device's home has a store (`edge_agent.samples`).
"""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from deploy.inference.prediction import Floats, Prediction
from deploy.inference.runtime import Runtime
from deploy.updates.answering import ActiveBundle
from edge_agent.samples import Answered, SampleStore
from fedge.errors import ConfigError, FedgeError
from fedge.system.logs import Lines

log = logging.getLogger("fedge.deploy")

MAX_REMEMBERED: Final = 10_000
"""Most requests whose answers are remembered; the store remembers their samples, up to a number of bytes."""
MAX_REMEMBERED_BYTES: Final = 32 << 20
"""Most bytes of these answers."""
ORIGIN: Final = "feedback"


class _Given(NamedTuple):
    bundle: str
    answers: tuple[Floats, ...]

    @property
    def size(self) -> int:
        return sum(each.nbytes for each in self.answers)


@dataclass(eq=False)
class Feedback:
    """The targets that come to one device. Safe to share between threads; all but `remember` writes to the disk."""

    model: ActiveBundle
    store: SampleStore
    _recent: OrderedDict[str, _Given] = field(default_factory=OrderedDict)
    _recent_bytes: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _lines: Lines = field(default_factory=Lines)

    def remember(self, request: str, x: NDArray[Any], runtime: Runtime, answer: Prediction) -> None:
        """Remember a request with one sample (1, ...), so that its target may come later."""
        self.store.remember(request, x[0], _find_answered(runtime, answer)[0])
        given = _Given(runtime.digest, tuple(each.copy() for each in answer.answers))
        with self._lock:
            self._forget(request)
            self._recent[request] = given
            self._recent_bytes += given.size
            while len(self._recent) > MAX_REMEMBERED or self._recent_bytes > MAX_REMEMBERED_BYTES:
                self._forget(next(iter(self._recent)))

    def _forget(self, request: str) -> None:
        found = self._recent.pop(request, None)
        self._recent_bytes -= 0 if found is None else found.size

    def save_unlabelled(self, x: NDArray[Any]) -> None:
        """Keep samples (n, ...) without labels, if the owner wants that; a failure is logged, as nobody waits."""
        try:
            for sample in x:
                self.store.add(sample, None, origin="infer")
        except FedgeError as error:
            self._lines.warning(log, "event=not_kept reason=%r", str(error))

    def add(
        self,
        x: NDArray[Any],
        y: NDArray[Any],
        *,
        sensitive: bool = False,
        answered: tuple[Runtime, Prediction] | None = None,
    ) -> int:
        """Store samples (n, ...) with their converted targets (n, ...), and return how many were new.

        Args:
            x: raw samples.
            y: targets as `Problem.read_target` returns them; class numbers in classification.
            sensitive: whether the samples are marked.
            answered: what was answered to them; if None, the bundle in service is asked now.

        Raises:
            ConfigError: the samples do not fit the task or the store's limits.
            StoreError: they cannot be written.
        """
        runtime, answer = (self.model.runtime, self.model.runtime.predict(x)) if answered is None else answered
        numbers = [
            self.store.add(sample, target, origin=ORIGIN, sensitive=sensitive, answered=one)
            for sample, target, one in zip(x, y, _find_answered(runtime, answer), strict=True)
        ]
        self.model.record_grades(runtime.digest, answer.answers, y)
        known = runtime.task.problem.find_known(y)  # the others are of a class that has joined since
        if known.any():
            answers = [each[known] for each in answer.answers]
            self.model.record_coverage(runtime.digest, answers, y[known], sensitive=sensitive)
            self.model.add_feedback(x[known], y[known])
        return sum(number is not None for number in numbers)

    def add_of_requests(self, requests: Sequence[str], y: NDArray[Any], *, sensitive: bool = False) -> None:
        """Store the samples of earlier requests with their converted targets (n, ...).

        Raises:
            ConfigError: a request is not remembered any more; those before it in the list are stored.
            StoreError: they cannot be written.
        """
        for request, target in zip(requests, y, strict=True):
            if not self.store.add_target(request, target, origin=ORIGIN, sensitive=sensitive):
                raise ConfigError(
                    f"the request {request[:100]!r} is not remembered: it had no id or several samples, came before "
                    "the server began, or too many have come since; send its sample with the label"
                )
            with self._lock:
                known = self._recent.get(request)
            if known is not None:
                self.model.record_grades(known.bundle, known.answers, target[np.newaxis])
                if self.model.runtime.task.problem.find_known(target[np.newaxis]).all():
                    self.model.record_coverage(known.bundle, known.answers, target[np.newaxis], sensitive=sensitive)


def _find_answered(runtime: Runtime, answer: Prediction) -> list[Answered | None]:
    """Return what was answered to each sample, to count right and wrong; None where answers are neither."""
    found = answer.problem.find_answered(answer.answers, answer.outlier)
    if found is None:
        return [None] * len(answer)
    return [Answered(int(group), runtime.manifest.release) for group in found]
