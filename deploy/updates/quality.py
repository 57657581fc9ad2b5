"""A bundle's quality on the device's validation samples, and its comparison on samples labelled later."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from deploy.inference.runtime import Runtime
from deploy.updates.drift import HomeReference, compute_deviations, compute_home_reference
from fedge.bundle.energies import compute_gate_entropy, compute_strangeness
from fedge.bundle.manifest import Reference
from fedge.data.validation import Validation
from fedge.wire.messages import Quality

BATCH: Final = 64
"""Samples in one call; this bounds the memory."""
HOME_BATCH: Final = 8
"""Number of samples in one call while requests may wait for the processor."""
MAX_HOME: Final = 500
"""Most validation samples that are predicted to know the classes' shares at home."""
TIMED: Final = 30
"""Number of single samples that are timed."""
MAX_COMPARED: Final = 1000
"""Labelled samples after which the comparison with the previous bundle ends."""
ERROR: Final = 0.01
"""Highest probability that a bundle as good as the previous one is ever judged worse."""


@dataclass(frozen=True, slots=True)
class Measurement:
    """A bundle's results on validation samples.

    `quality` is the reportable part, on non-sensitive samples. `correct` (n,) is None without labels. `finite` is
    whether all probabilities and energies are finite.
    """

    quality: Quality
    correct: NDArray[np.bool_] | None
    finite: bool


@dataclass(slots=True)
class PairedTest:
    """Compares two bundles on the same labelled samples, by the samples that only one of the bundles gets right."""

    n: int = 0
    lost: int = 0  # only the previous bundle is right
    won: int = 0  # only the new one is right

    def observe(self, before: NDArray[np.bool_], now: NDArray[np.bool_]) -> None:
        """Add n samples, with whether the previous and the new bundle are right on each, (n,)."""
        self.n += len(now)
        self.lost += int((before & ~now).sum())
        self.won += int((now & ~before).sum())

    def is_worse(self, accuracy_drop: float) -> bool:
        """Return whether the new bundle's accuracy is lower by more than `accuracy_drop`, beyond chance.

        If both bundles were equally good, a sample that only one gets right would be lost or won with probability 1/2.
        The evidence against that is the likelihood ratio, averaged over all other probabilities p (Robbins 1970),

            E = 2^(l + w) ∫ p^l (1 - p)^w dp = 2^(l + w) l! w! / (l + w + 1)!,

        which exceeds 1/`ERROR` with probability `ERROR` at most, however often it is checked (Ville's inequality).
        """
        if self.lost - self.won <= accuracy_drop * self.n:
            return False
        log_e = (self.lost + self.won) * math.log(2) + math.lgamma(self.lost + 1) + math.lgamma(self.won + 1)
        return log_e - math.lgamma(self.lost + self.won + 2) > -math.log(ERROR)


def measure_quality(runtime: Runtime, validation: Validation) -> Measurement:
    """Predict all validation samples in batches, and time single ones; without samples, time a sample of zeros."""
    n, reportable = len(validation.x), validation.reportable
    answers = [runtime.predict_inputs(validation.x[i : i + BATCH]) for i in range(0, n, BATCH)]
    single = (
        validation.x[reportable][:TIMED] if reportable.any() else np.zeros((1, *runtime.task.input_shape), np.float32)
    )
    latency = _measure_median_ms(runtime, single)
    if not answers:
        finite = bool(all(np.isfinite(each).all() for each in runtime.predict_inputs(single).answers))
        return Measurement(Quality(n=0, latency_ms=latency), None, finite=finite)
    predicted = np.concatenate([answer.class_index for answer in answers])
    problem = runtime.task.problem
    free = np.concatenate([compute_strangeness(problem, a.answers, a.weights, a.energies) for a in answers])
    entropy = np.concatenate([compute_gate_entropy(answer.weights) for answer in answers])
    correct = None if validation.y is None else predicted == validation.y
    return Measurement(
        Quality(
            n=int(reportable.sum()),
            accuracy=None if correct is None or not reportable.any() else float(correct[reportable].mean()),
            gate_entropy=_compute_indecision(entropy[reportable], len(runtime.manifest.candidates)),
            free_energy=_compute_shift(free[reportable], runtime),
            latency_ms=latency,
        ),
        correct,
        finite=all(np.isfinite(each).all() for each in (free, *(a for answer in answers for a in answer.answers))),
    )


def measure_home(runtime: Runtime, validation: Validation) -> HomeReference | None:
    """Predict up to `MAX_HOME` unmarked validation samples, in small batches beside the requests; None without any."""
    (kept,) = np.nonzero(validation.reportable)
    kept = kept[np.linspace(0, len(kept) - 1, min(len(kept), MAX_HOME)).astype(int)] if len(kept) else kept
    if not len(kept):
        return None
    answers = [runtime.predict_inputs(validation.x[kept[i : i + HOME_BATCH]]) for i in range(0, len(kept), HOME_BATCH)]
    predicted = np.concatenate([answer.class_index for answer in answers])
    return compute_home_reference(
        np.concatenate([answer.probabilities for answer in answers]),
        np.concatenate([answer.weights for answer in answers]),
        np.concatenate([answer.energies for answer in answers]),
        None if validation.y is None else predicted == validation.y[kept],
    )


def find_correct(runtime: Runtime, samples: Validation) -> NDArray[np.bool_]:
    """Return whether a bundle is right on each labelled sample, (n,)."""
    assert samples.y is not None
    found = [runtime.predict_inputs(samples.x[i : i + BATCH]).class_index for i in range(0, len(samples.y), BATCH)]
    correct: NDArray[np.bool_] = np.concatenate([*found, np.zeros(0, np.int64)]) == samples.y
    return correct


def _compute_shift(free: NDArray[np.float64], runtime: Runtime) -> float | None:
    """Return the shift of the samples' mean free energy from the reference, in deviations, or None if unknown."""
    reference, usable = runtime.manifest.reference, free[np.isfinite(free)]
    if not isinstance(reference, Reference) or not len(usable):
        return None
    return compute_deviations(float(usable.mean()) - reference.free_energy_mean, reference.free_energy_std)


def _compute_indecision(entropy: NDArray[np.float64], n_candidates: int) -> float | None:
    """Return the mean gate entropy divided by log M, 0 to 1, or None for a single candidate or without samples."""
    return None if n_candidates == 1 or not len(entropy) else min(1.0, float(entropy.mean()) / math.log(n_candidates))


def _measure_median_ms(runtime: Runtime, x: NDArray[np.float32]) -> float:
    times = []
    for i in range(max(TIMED, len(x))):
        begin = time.perf_counter()
        runtime.predict_inputs(x[i % len(x)][np.newaxis])
        times.append((time.perf_counter() - begin) * 1000)
    return float(np.median(times[len(times) // 5 :]))
