"""How a bundle does on the device's own validation samples."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from deploy.runtime import Runtime
from fedge.energies import free_energy, gate_entropy
from fedge.messages import Quality
from fedge.validation import Validation

BATCH: Final = 64
"""Samples in one call: bounds the memory."""
TIMED: Final = 30
"""Single samples that are timed."""


@dataclass(frozen=True, slots=True)
class Measured:
    """A bundle on validation samples. correct: (n,) bool, None without labels; finite: of all probabilities."""

    quality: Quality
    predicted: NDArray[np.int64]
    correct: NDArray[np.bool_] | None
    finite: bool


def measure(runtime: Runtime, validation: Validation) -> Measured:
    """Predict all validation samples in batches and some one by one; without any, a sample of zeros for the time."""
    n = len(validation.x)
    answers = [runtime.predict_inputs(validation.x[i : i + BATCH]) for i in range(0, n, BATCH)]
    single = validation.x[:TIMED] if n else np.zeros((1, *runtime.task.input_shape), np.float32)
    latency = _median_ms(runtime, single)
    if not answers:
        finite = bool(np.isfinite(runtime.predict_inputs(single).probabilities).all())
        return Measured(Quality(n=0, latency_ms=latency), np.zeros(0, np.int64), None, finite=finite)
    predicted = np.concatenate([answer.class_index for answer in answers])
    free = np.concatenate([free_energy(answer.weights, answer.energies) for answer in answers])
    entropy = np.concatenate([gate_entropy(answer.weights) for answer in answers])
    correct = None if validation.y is None else predicted == validation.y
    return Measured(
        Quality(
            n=n,
            accuracy=None if correct is None else float(correct.mean()),
            gate_entropy=float(entropy.mean()),
            free_energy=float(free[np.isfinite(free)].mean()) if np.isfinite(free).any() else None,
            latency_ms=latency,
        ),
        predicted,
        correct,
        finite=bool(all(np.isfinite(answer.probabilities).all() for answer in answers))
        and bool(np.isfinite(free).all()),
    )


def _median_ms(runtime: Runtime, x: NDArray[np.float32]) -> float:
    times = []
    for i in range(max(TIMED, len(x))):
        begin = time.perf_counter()
        runtime.predict_inputs(x[i % len(x)][np.newaxis])
        times.append((time.perf_counter() - begin) * 1000)
    return float(np.median(times[len(times) // 5 :]))
