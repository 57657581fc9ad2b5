"""A bundle's quality on the device's validation samples, its comparison on samples labelled later, and input drift."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from deploy.inference.runtime import Runtime
from fedge.bundle.energies import compute_free_energy, compute_gate_entropy
from fedge.bundle.manifest import Reference
from fedge.data.validation import Validation
from fedge.wire.messages import Quality

BATCH: Final = 64
"""Samples in one call; this bounds the memory."""
TIMED: Final = 30
"""Number of single samples that are timed."""
MAX_COMPARED: Final = 1000
"""Labelled samples after which the comparison with the previous bundle ends."""
ERROR: Final = 0.01
"""Highest probability that a bundle as good as the previous one is ever judged worse."""
WINDOW: Final = 200
"""Number of samples in the window of the exponential mean that averages drift."""
CERTAINTY: Final = 4.0
"""Standard errors of the window's mean that a shift must exceed to count as drift, so that chance alone hardly does."""
NEGLIGIBLE: Final = 0.5
"""Largest shift, in deviations of single samples, that never counts as drift, however certain it is."""


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
        finite = bool(np.isfinite(runtime.predict_inputs(single).probabilities).all())
        return Measurement(Quality(n=0, latency_ms=latency), None, finite=finite)
    predicted = np.concatenate([answer.class_index for answer in answers])
    free = np.concatenate([compute_free_energy(answer.weights, answer.energies) for answer in answers])
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
        finite=all(np.isfinite(each).all() for each in (free, *(answer.probabilities for answer in answers))),
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


# ------------------------------------------------------------------------------------------------------------ drift


@dataclass(slots=True)
class _ExponentialMean:
    """Exponential mean of a stream, with its effective number of samples."""

    value: float = 0.0
    weight: float = 0.0  # Σ of the samples' weights
    square: float = 0.0  # Σ of their squares

    def observe(self, x: float) -> None:
        keep = 1 - 1 / WINDOW
        self.weight = self.weight * keep + 1
        self.square = self.square * keep**2 + 1
        self.value += (x - self.value) / self.weight

    @property
    def n_effective(self) -> float:
        return self.weight**2 / self.square if self.square else 0.0


class Drift:
    """Detects whether recent samples differ from those of the bundle's reference; `observe` all predictions.

    Both the free energy and the gate's entropy are watched. A shift counts if it exceeds `NEGLIGIBLE` standard
    deviations of single samples and also `CERTAINTY` standard errors, including the reference's own error.
    """

    def __init__(self, reference: Reference) -> None:
        self._reference = reference
        self._free, self._entropy = _ExponentialMean(), _ExponentialMean()
        self._seen = 0

    def observe(self, weights: NDArray[np.floating], energies: NDArray[np.floating]) -> None:
        """Add the outputs of a prediction, (n, M) each; samples without a usable candidate are ignored."""
        for free, entropy in zip(
            compute_free_energy(weights, energies).tolist(), compute_gate_entropy(weights).tolist(), strict=True
        ):
            if math.isfinite(free):
                self._free.observe(free)
                self._entropy.observe(entropy)
                self._seen += 1

    @property
    def shift(self) -> tuple[float, float]:
        """Shift of free energy and gate entropy, in deviations of the reference's samples."""
        r = self._reference
        return (
            compute_deviations(self._free.value - r.free_energy_mean, r.free_energy_std) if self._seen else 0.0,
            compute_deviations(self._entropy.value - r.gate_entropy_mean, r.gate_entropy_std) if self._seen else 0.0,
        )

    @property
    def drifted(self) -> bool:
        """Whether the shift is certain and large; False until a whole window of samples was seen."""
        if self._seen < WINDOW:
            return False
        error = math.sqrt(1 / self._free.n_effective + 1 / self._reference.n)
        return max(map(abs, self.shift)) > max(NEGLIGIBLE, CERTAINTY * error)


def compute_deviations(shift: float, std: float) -> float:
    """Return `shift` in units of `std`; `std` counts as at least 0.05, since few samples may be constant by chance."""
    return shift / max(std, 0.05)
