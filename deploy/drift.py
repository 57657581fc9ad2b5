"""Detects whether a device still sees what its bundle was made for."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from fedge.bundle import Reference
from fedge.energies import free_energy, gate_entropy

Floats = NDArray[np.floating]

WINDOW: Final = 200
"""Samples over which drift is averaged, in the sense of an exponential mean."""
CERTAINTY: Final = 4.0
"""Standard errors of the mean over a window that a shift must exceed, so that chance alone hardly ever flags one."""
NEGLIGIBLE: Final = 0.5
"""Shift in deviations of one sample that is not drift however certain it is."""


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

    def observe(self, weights: Floats, energies: Floats) -> None:
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
