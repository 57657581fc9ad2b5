"""A bundle's quality on the device's own validation samples, and on samples that are labelled later."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from deploy.drift import deviations
from deploy.runtime import Runtime
from fedge.bundle import Reference
from fedge.energies import free_energy, gate_entropy
from fedge.messages import Quality
from fedge.validation import Validation

BATCH: Final = 64
"""Samples in one call: bounds the memory."""
TIMED: Final = 30
"""Single samples that are timed."""
MAX_COMPARED: Final = 1000
"""Labelled samples after which the comparison with the previous bundle ends."""
ERROR: Final = 0.01
"""Probability that a bundle as good as the previous one is ever judged worse."""


@dataclass(frozen=True, slots=True)
class Measured:
    """A bundle's results on validation samples. correct: (n,) bool, None without labels; finite: all probabilities.

    quality: the reportable part, on non-sensitive samples.
    """

    quality: Quality
    correct: NDArray[np.bool_] | None
    finite: bool


@dataclass(slots=True)
class Paired:
    """Compares two bundles on the same labelled samples by those that only one gets right."""

    n: int = 0
    lost: int = 0  # only the previous bundle is right
    won: int = 0  # only the new one is right

    def observe(self, before: NDArray[np.bool_], now: NDArray[np.bool_]) -> None:
        """Add samples, (n,) each: whether each bundle is right."""
        self.n += len(now)
        self.lost += int((before & ~now).sum())
        self.won += int((now & ~before).sum())

    def worse(self, accuracy_drop: float) -> bool:
        """Whether the new bundle's accuracy is lower by more than `accuracy_drop`, beyond chance.

        If both were equally good, a sample would be lost or won with probability 1/2. The evidence against that is the
        likelihood ratio, averaged over all other probabilities p (Robbins 1970),

            E = 2^(l + w) ∫ p^l (1 - p)^w dp = 2^(l + w) l! w! / (l + w + 1)!,

        which exceeds 1/`ERROR` with probability `ERROR` at most, however often it is checked (Ville's inequality).
        """
        if self.lost - self.won <= accuracy_drop * self.n:
            return False
        log_e = (self.lost + self.won) * math.log(2) + math.lgamma(self.lost + 1) + math.lgamma(self.won + 1)
        return log_e - math.lgamma(self.lost + self.won + 2) > -math.log(ERROR)


def measure(runtime: Runtime, validation: Validation) -> Measured:
    """Predict all validation samples in batches and some singly; without any, time a sample of zeros."""
    n, told = len(validation.x), validation.told
    answers = [runtime.predict_inputs(validation.x[i : i + BATCH]) for i in range(0, n, BATCH)]
    single = validation.x[told][:TIMED] if told.any() else np.zeros((1, *runtime.task.input_shape), np.float32)
    latency = _median_ms(runtime, single)
    if not answers:
        finite = bool(np.isfinite(runtime.predict_inputs(single).probabilities).all())
        return Measured(Quality(n=0, latency_ms=latency), None, finite=finite)
    predicted = np.concatenate([answer.class_index for answer in answers])
    free = np.concatenate([free_energy(answer.weights, answer.energies) for answer in answers])
    entropy = np.concatenate([gate_entropy(answer.weights) for answer in answers])
    correct = None if validation.y is None else predicted == validation.y
    return Measured(
        Quality(
            n=int(told.sum()),
            accuracy=None if correct is None or not told.any() else float(correct[told].mean()),
            gate_entropy=_indecision(entropy[told], len(runtime.manifest.candidates)),
            free_energy=_shift(free[told], runtime),
            latency_ms=latency,
        ),
        correct,
        finite=all(np.isfinite(each).all() for each in (free, *(answer.probabilities for answer in answers))),
    )


def _shift(free: NDArray[np.float64], runtime: Runtime) -> float | None:
    """How much stranger samples are than the bundle's reference, in standard deviations; None: unknown."""
    reference, usable = runtime.manifest.reference, free[np.isfinite(free)]
    if not isinstance(reference, Reference) or not len(usable):
        return None
    return deviations(float(usable.mean()) - reference.free_energy_mean, reference.free_energy_std)


def _indecision(entropy: NDArray[np.float64], n_candidates: int) -> float | None:
    """Mean gate entropy as a share of its maximum, log M; None for one candidate or no sample."""
    return None if n_candidates == 1 or not len(entropy) else min(1.0, float(entropy.mean()) / math.log(n_candidates))


def _median_ms(runtime: Runtime, x: NDArray[np.float32]) -> float:
    times = []
    for i in range(max(TIMED, len(x))):
        begin = time.perf_counter()
        runtime.predict_inputs(x[i % len(x)][np.newaxis])
        times.append((time.perf_counter() - begin) * 1000)
    return float(np.median(times[len(times) // 5 :]))
