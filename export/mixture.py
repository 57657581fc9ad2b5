"""A device's mixture: the values that the exporter turns into a bundle (fedge.md sections 7 to 11)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from fedge.bundle.formula import ENERGY_CLIP, count_gate_features
from fedge.tensors.layout import Model
from fedge.wire.messages import Role

GATE_HIDDEN: Final = 16
"""Hidden units of the gate (scmoe_pfl.md 11.1)."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """One model of the mixture and its calibration.

    `temperature` T_k > 0 and `kappa` κ_k >= 0: q_k = log-softmax(l_k / T_k + κ_k π_i). `energy_mean` μ_k and
    `energy_std` σ_k: of logsumexp_c l_k over the validation samples; mean 0 and std 1 leave the energy raw. `weight`
    ω_k in [0, 1]; a candidate of weight 0 has a share only if no other candidate is usable, and may be the guard's
    alternative.
    """

    role: Role
    name: str
    model: Model
    temperature: float = 1.0
    kappa: float = 0.0
    energy_mean: float = 0.0
    energy_std: float = 1.0
    weight: float = 1.0


@dataclass(frozen=True, slots=True)
class GateWeights:
    """The residual gate r(x): linear -> hidden, ReLU, linear -> M, on the pooled and flattened model input (F numbers).

    hidden_weight (H, F), hidden_bias (H,), out_weight (M, H), out_bias (M,); H is 16 (scmoe_pfl.md 11.1). Zero output
    layers mean r = 0, the untrained gate.
    """

    hidden_weight: NDArray[np.floating]
    hidden_bias: NDArray[np.floating]
    out_weight: NDArray[np.floating]
    out_bias: NDArray[np.floating]

    @classmethod
    def make_untrained(cls, input_shape: tuple[int, ...], n_candidates: int) -> GateWeights:
        """Make the gate before training, r = 0 for every sample."""
        return cls(
            hidden_weight=np.zeros((GATE_HIDDEN, count_gate_features(input_shape))),
            hidden_bias=np.zeros(GATE_HIDDEN),
            out_weight=np.zeros((n_candidates, GATE_HIDDEN)),
            out_bias=np.zeros(n_candidates),
        )


@dataclass(frozen=True, slots=True)
class Guard:
    """The alternative of output ½ mixture + ½ softmax(l/T + κπ), by its candidate's index (fedge.md section 11)."""

    candidate: int
    temperature: float = 1.0
    kappa: float = 0.0


@dataclass(frozen=True, slots=True)
class Mixture:
    """Everything that determines a prediction, given the logits.

    Attributes:
        candidates: M >= 1 models of one architecture, in the order of `Role`.
        log_prior: π_i, (C,) log class shares of the device.
        beta: strength of the energy.
        gate: the residual gate.
        guard: the alternative that gets half of the output, or None.
        top: at most this many global and expert candidates take part in a sample; private and local always do.
        energy_clip: bound of the standardised energy; math.inf with energy_mean 0, energy_std 1 and beta 1 is
            SCMoE-PFL's raw energy.
    """

    candidates: tuple[Candidate, ...]
    log_prior: NDArray[np.floating]
    beta: float
    gate: GateWeights
    guard: Guard | None = None
    top: int = 2
    energy_clip: float = ENERGY_CLIP

    @property
    def experts(self) -> tuple[int, ...]:
        """Indices of the candidates that the top rule chooses from."""
        return tuple(k for k, c in enumerate(self.candidates) if c.role.is_shared)
