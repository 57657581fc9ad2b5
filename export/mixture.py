"""A device's mixture: the values that the exporter turns into a bundle (fedge.md sections 7 to 11)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from fedge.bundle.formula import ENERGY_CLIP, count_gate_features
from fedge.bundle.trunk import POOLED, Convolution
from fedge.data.problems.calibration import PLAIN, Calibration
from fedge.tensors.layout import Model
from fedge.wire.messages import Role

GATE_HIDDEN: Final = 16
"""Hidden units of the gate (scmoe_pfl.md 11.1)."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """One model of the mixture and its calibration.

    `calibration` has T_k and κ_k, and `offset` is what they are for: π_i in q_k = log-softmax(l_k / T_k + κ_k π_i).
    `energy_mean` μ_k and `energy_std` σ_k are the mean and deviation of the energy over the validation samples; 0 and 1
    leave it raw. `weight` is ω_k in [0, 1]. A candidate of weight 0 has a share only if no other is usable; the
    guard may still use it.
    """

    role: Role
    name: str
    model: Model
    offset: NDArray[np.floating]
    calibration: Calibration = PLAIN
    energy_mean: float = 0.0
    energy_std: float = 1.0
    weight: float = 1.0


@dataclass(frozen=True, slots=True)
class GateWeights:
    """Weights of the residual gate r(x): linear (F -> H), ReLU, linear (H -> M).

    Its input is the pooled and flattened model input, F numbers. Shapes: hidden_weight (H, F), hidden_bias (H,),
    out_weight (M, H), out_bias (M,); H is 16 (scmoe_pfl.md 11.1). A zero output layer means r = 0, the untrained gate.

    FedCoE's gate has H = 64 (fedcoe.md section 4). It takes the whole model input, so that F is its size, or the
    features of its own `convolutions`, if it has any.
    """

    hidden_weight: NDArray[np.floating]
    hidden_bias: NDArray[np.floating]
    out_weight: NDArray[np.floating]
    out_bias: NDArray[np.floating]
    convolutions: tuple[Convolution, ...] = ()

    @property
    def arrays(self) -> tuple[NDArray[np.floating], ...]:
        """All weights and biases."""
        linear = (self.hidden_weight, self.hidden_bias, self.out_weight, self.out_bias)
        return (*linear, *(array for layer in self.convolutions for array in layer))

    def count_inputs(self, input_shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the possible F for model inputs of a shape."""
        if self.convolutions:
            return (len(self.convolutions[-1][1]) * POOLED**2,)
        return count_gate_features(input_shape), math.prod(input_shape)

    @classmethod
    def make_untrained(cls, input_shape: tuple[int, ...], n_candidates: int) -> GateWeights:
        """Make the untrained gate, which gives r = 0 for every sample."""
        return cls(
            hidden_weight=np.zeros((GATE_HIDDEN, count_gate_features(input_shape))),
            hidden_bias=np.zeros(GATE_HIDDEN),
            out_weight=np.zeros((n_candidates, GATE_HIDDEN)),
            out_bias=np.zeros(n_candidates),
        )


@dataclass(frozen=True, slots=True)
class Guard:
    """The guard: ½ of the output is that of the candidate at this index, with this calibration (fedge.md 11)."""

    candidate: int
    calibration: Calibration = PLAIN


@dataclass(frozen=True, slots=True)
class Mixture:
    """Everything that determines a prediction, given the logits.

    Attributes:
        candidates: M >= 1 models of one architecture, in the order of `Role`.
        beta: factor of the energy.
        gate: the residual gate.
        guard: the candidate that gets half of the output, or None.
        top: most global and expert candidates that take part in a sample; private and local ones always do.
        energy_clip: bound of the standardised energy; math.inf with energy_mean 0, energy_std 1 and beta 1 gives
            SCMoE-PFL's raw energy.
    """

    candidates: tuple[Candidate, ...]
    beta: float
    gate: GateWeights
    guard: Guard | None = None
    top: int = 2
    energy_clip: float = ENERGY_CLIP

    @property
    def experts(self) -> tuple[int, ...]:
        """Indices of the candidates that the top rule chooses from."""
        return tuple(k for k, c in enumerate(self.candidates) if c.role.is_shared)

    @property
    def calibrations(self) -> tuple[Calibration, ...]:
        """The calibration of each candidate, then of the guard, M + 1."""
        return (*(c.calibration for c in self.candidates), self.guard.calibration if self.guard else PLAIN)

    @property
    def offsets(self) -> tuple[NDArray[np.float64], ...]:
        """The offset of each candidate, then of the guard, M + 1."""
        found = [np.asarray(c.offset, np.float64) for c in self.candidates]
        return (*found, found[self.guard.candidate if self.guard else 0])
