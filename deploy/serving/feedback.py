"""True labels of samples that a device is asked about: they go into the device's store, and may contradict its bundle.

A label comes with its sample, or with the id of an earlier request. What was answered is on the disk. Only a device's
home has a store (`edge_agent.samples`).
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

from deploy.inference.prediction import Prediction
from deploy.inference.runtime import Runtime
from deploy.updates.answering import ActiveBundle
from edge_agent.samples import Answered, SampleStore
from fedge.errors import ConfigError, FedgeError
from fedge.system.logs import Lines

log = logging.getLogger("fedge.deploy")

MAX_REMEMBERED: Final = 10_000
"""Most requests whose certainty is remembered; the store remembers their samples, up to a number of bytes."""
ORIGIN: Final = "feedback"


class _Certainty(NamedTuple):
    bundle: str
    label: int
    sure: float


@dataclass(eq=False)
class Feedback:
    """The labels that come to one device. Safe to share between threads; all but `remember` writes to the disk."""

    model: ActiveBundle
    store: SampleStore
    _recent: OrderedDict[str, _Certainty] = field(default_factory=OrderedDict)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _lines: Lines = field(default_factory=Lines)

    def remember(self, request: str, x: NDArray[Any], runtime: Runtime, answer: Prediction) -> None:
        """Remember a request with one sample (1, ...), so that its label may come later."""
        label = int(answer.class_index[0])
        self.store.remember(request, x[0], Answered(label, runtime.manifest.release))
        with self._lock:
            self._recent[request] = _Certainty(runtime.digest, label, float(answer.probabilities[0, label]))
            self._recent.move_to_end(request)
            while len(self._recent) > MAX_REMEMBERED:
                self._recent.popitem(last=False)

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
        y: NDArray[np.int64],
        *,
        sensitive: bool = False,
        answered: tuple[Runtime, Prediction] | None = None,
    ) -> int:
        """Store samples (n, ...) with their class numbers (n,), and return how many were new.

        Args:
            x: raw samples.
            y: class numbers.
            sensitive: whether the samples are marked.
            answered: what was answered to them; if None, the bundle in service is asked now.

        Raises:
            ConfigError: the samples do not fit the task or the store's limits.
            StoreError: they cannot be written.
        """
        runtime, answer = (self.model.runtime, self.model.runtime.predict(x)) if answered is None else answered
        said = [Answered(int(label), runtime.manifest.release) for label in answer.class_index]
        numbers = [
            self.store.add(sample, int(label), origin=ORIGIN, sensitive=sensitive, answered=one)
            for sample, label, one in zip(x, y, said, strict=True)
        ]
        sure = answer.probabilities[np.arange(len(y)), answer.class_index]
        self.model.record_labels(runtime.digest, answer.class_index == y, sure)
        known = y < runtime.task.n_classes  # the others are of a class that has joined since
        if known.any():
            self.model.add_feedback(x[known], y[known])
        return sum(number is not None for number in numbers)

    def add_of_requests(self, requests: Sequence[str], y: NDArray[np.int64], *, sensitive: bool = False) -> None:
        """Store the samples of earlier requests with their class numbers (n,).

        Raises:
            ConfigError: a request is not remembered any more; those before it in the list are stored.
            StoreError: they cannot be written.
        """
        for request, label in zip(requests, y.tolist(), strict=True):
            if not self.store.add_label(request, label, origin=ORIGIN, sensitive=sensitive):
                raise ConfigError(
                    f"the request {request[:100]!r} is not remembered: it had no id or several samples, came before "
                    "the server began, or too many have come since; send its sample with the label"
                )
            with self._lock:
                known = self._recent.get(request)
            if known is not None:
                self.model.record_labels(known.bundle, np.array([known.label == label]), np.array([known.sure]))
