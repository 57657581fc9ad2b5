"""Noisy answers: numbers about a device's samples to which no single sample adds more than the noise hides.

An answer is a sum over samples of vectors, each of a bounded L2 norm, plus Gaussian noise (Dwork, Roth, "The
Algorithmic Foundations of Differential Privacy", 2014, appendix A). The bound is the sum's sensitivity, since
neighbouring data differ in whether one sample counts. The number of samples is public, so that the sum says the mean.
docs/privacy.md derives the bound of each answer. Noise comes from the operating system, as DP-SGD's does, and an
answer that is given again is charged again.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from edge_agent.device.device import Device, Source
from edge_agent.privacy.dp_ledger import ROUNDING, Charge, Ledger, Mechanism, Place, compute_answer_noise
from fedge.models.dp_sgd import draw_normal
from fedge.steps.contract import Declined
from fedge.steps.noise import Privacy, explain_weak_delta
from fedge.wire.messages import Why

Array = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Noise:
    """Gaussian noise that is paid for, for one answer. `multiplier`: its standard deviation over the sensitivity."""

    multiplier: float
    source: Source

    def compute_sum(self, rows: Array, bound: float) -> Array:
        """Compute the noisy sum (d,) of rows (n, d), each clipped to an L2 norm of at most `bound` > 0.

        A row that is not finite counts as zero.
        """
        found = np.where(np.isfinite(rows).all(axis=1, keepdims=True), rows, 0.0)
        norms = np.linalg.norm(found, axis=1, keepdims=True)
        clipped = found * np.minimum(1.0, bound / np.maximum(norms, bound))
        return self.add_to(clipped.sum(axis=0), bound)

    def add_to(self, total: ArrayLike, bound: float) -> Array:
        """Return a sum (d,) of vectors that have an L2 norm of at most `bound` by their nature, with noise."""
        exact = np.asarray(total, np.float64)
        return exact + self.multiplier * bound * draw_normal(len(exact), self.source)

    def add_to_counts(self, counts: NDArray[np.int64]) -> Array:
        """Return numbers of samples per class (C,) with noise: a sample adds its label as one of C, less 1/C."""
        return self.add_to(counts, math.sqrt(1 - 1 / len(counts)))


def take_noise(device: Device, privacy: Privacy, place: Place) -> Noise | Declined:
    """Charge the ledger for one answer about the samples of a place, and return its noise, or why it is too dear.

    Raises:
        FailedError: no noise suffices, or Opacus is not installed.
        StoreError: the charge cannot be written, so the answer must not leave.
    """
    n = device.data.n_shared if place == "training" else len(device.data.shared_validation[1])
    mechanism = Mechanism(noise_multiplier=compute_answer_noise(privacy, place), sample_rate=1.0)
    charge = Charge(
        order=device.order.id, run=device.order.run, at=time.time(), mechanism=mechanism, steps=1, place=place
    )
    ledger = Ledger(device.home)
    if (reason := explain_refusal(device, privacy, ledger, charge, n)) is not None:
        return Declined(why=Why.BUDGET, reason=reason)
    ledger.record(charge)
    return Noise(mechanism.noise_multiplier, device.source)


def explain_refusal(device: Device, privacy: Privacy, ledger: Ledger, charge: Charge, n: int) -> str | None:
    """Return why a charge to n samples breaks the run's promise or the owner's budget, or None."""
    if weak := explain_weak_delta(privacy.delta, n):
        return f"the run's {weak}"
    promised, budget = privacy.epsilon, device.budget
    if promised is not None:
        total = ledger.compute_spent(privacy.delta, run=charge.run, planned=charge)
        if total > promised * (1 + ROUNDING):
            return f"this run would have spent epsilon {total:.3f}, and promised at most {promised:g}"
    if budget.max_epsilon is not None:
        total = ledger.compute_spent(budget.delta, planned=charge)
        if total > budget.max_epsilon:
            return f"epsilon would be {total:.3f} in all, and the budget of this device is {budget.max_epsilon:g}"
    return None
