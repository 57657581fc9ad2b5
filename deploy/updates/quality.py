"""A bundle's quality on the device's own validation samples and on samples labelled later, and the drift of inputs."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from deploy.inference.runtime import Runtime
from fedge.bundle.energies import free_energy, gate_entropy
from fedge.bundle.manifest import Reference
from fedge.data.validation import Validation
from fedge.wire.messages import Quality

BATCH: Final = 64
"""Samples in one call: bounds the memory."""
TIMED: Final = 30
"""Single samples that are timed."""
MAX_COMPARED: Final = 1000
"""Labelled samples after which the comparison with the previous bundle ends."""
ERROR: Final = 0.01
"""Probability that a bundle as good as the previous one is ever judged worse."""
WINDOW: Final = 200
"""Samples over which drift is averaged, in the sense of an exponential mean."""
CERTAINTY: Final = 4.0
"""Standard errors of the mean over a window that a shift must exceed, so that chance alone hardly ever flags one."""
NEGLIGIBLE: Final = 0.5
"""Shift in deviations of one sample that is not drift however certain it is."""


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


# ------------------------------------------------------------------------------------------------------------ drift


@dataclass(slots=True)
class _Mean:
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
    """Whether recent samples differ from those that the bundle was made with; `observe` every prediction.

    Both the free energy and the gate's entropy are watched. A shift counts if it exceeds `NEGLIGIBLE` standard
    deviations of single samples and `CERTAINTY` standard errors, including the reference's own error.
    """

    def __init__(self, reference: Reference) -> None:
        self._reference = reference
        self._free, self._entropy = _Mean(), _Mean()
        self._seen = 0

    def observe(self, weights: NDArray[np.floating], energies: NDArray[np.floating]) -> None:
        """Process the outputs of a prediction, (n, M) each; samples without a usable candidate are ignored."""
        for free, entropy in zip(free_energy(weights, energies).tolist(), gate_entropy(weights).tolist(), strict=True):
            if math.isfinite(free):
                self._free.observe(free)
                self._entropy.observe(entropy)
                self._seen += 1

    @property
    def shift(self) -> tuple[float, float]:
        """Shift of free energy and gate entropy, in deviations of the reference's samples."""
        r = self._reference
        return (
            deviations(self._free.value - r.free_energy_mean, r.free_energy_std) if self._seen else 0.0,
            deviations(self._entropy.value - r.gate_entropy_mean, r.gate_entropy_std) if self._seen else 0.0,
        )

    @property
    def drifted(self) -> bool:
        """Whether the shift is certain and large; False until a whole window was seen."""
        if self._seen < WINDOW:
            return False
        error = math.sqrt(1 / self._free.n_effective + 1 / self._reference.n)
        return max(map(abs, self.shift)) > max(NEGLIGIBLE, CERTAINTY * error)


def deviations(shift: float, std: float) -> float:
    """`shift` in units of `std`, but at least 0.05: a constant over few samples proves nothing."""
    return shift / max(std, 0.05)
