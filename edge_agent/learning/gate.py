"""The residual gate r(x): an input-dependent correction of the candidates' weights (fedge.md section 9).

linear -> 16, ReLU, linear -> M, the last layer zero at the start, trained only on the validation samples through the
mixture's formula. Images are reduced to means over at most 8 x 8 windows, other inputs standardised; standardisation is
folded into the first layer, so the bundle's gate takes raw inputs.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from export.mixture import GATE_HIDDEN, GateWeights
from fedge.bundle.formula import Library, compute_gate_features, mix
from fedge.data.problems.maths import Array
from fedge.models.optimizer import BETA2, EPSILON
from fedge.models.training import to_tensor

MIN_SAMPLES: Final = 10
"""Fewest validation samples for training the gate."""
STEPS: Final = 150
LEARNING_RATE: Final = 0.02
BETA1: Final = 0.9
"""Decay of Adam's mean gradient."""
DECAY: Final = 0.03
TORCH: Final[Library[Tensor]] = Library(partial(torch.log_softmax, dim=-1), partial(torch.logsumexp, dim=-1))
_SMALLEST_SPREAD: Final = 0.1
"""Lower bound of an input's spread, relative to the mean spread, so that an input that hardly varies on this device is
not blown up on other samples."""


def train_gate(
    x: NDArray[np.floating],
    log_p: Array,
    scores: Array,
    *,
    seed: int,
    decay: float = DECAY,
    experts: Sequence[int] = (),
    top: int = 2,
) -> GateWeights:
    """Fit the gate by full-batch Adam to -mean log p_y + decay * ||gate parameters||^2.

    Args:
        x: (m, *input_shape) model inputs of the validation samples; for m < 10 the gate stays untrained.
        log_p: (m, M) log q_k of the true classes; a candidate that is not finite is dropped for the sample.
        scores: (m, M) log omega_k + beta * standardised energy, constants here; finite where `log_p` is.
        seed: the seed of the first layer's weights.
        decay: weight of the penalty above, on all parameters.
        experts: candidates of which only the `top` largest scores take part in a sample, as in `fedge.bundle.formula`.
        top: number of these experts in a sample.
    """
    usable = np.isfinite(log_p)
    rows = usable.any(axis=1)
    if len(x) < MIN_SAMPLES or not rows.any():
        return GateWeights.make_untrained(x.shape[1:], log_p.shape[1])
    inputs = compute_gate_features(x.astype(np.float64))
    mean, scale = _compute_standardisation(inputs) if x.ndim != 4 else (0.0, 1.0)
    network = _make_network(inputs.shape[1], log_p.shape[1], seed)
    _fit(
        network,
        to_tensor(((inputs - mean) / scale)[rows].astype(np.float32)),
        to_tensor(np.where(usable, log_p, -np.inf)[rows].astype(np.float32)),
        to_tensor(np.where(usable, scores, -np.inf)[rows].astype(np.float32)),
        decay,
        torch.tensor(experts if len(experts) > top else ()),
        top,
    )
    hidden_weight, hidden_bias, out_weight, out_bias = (p.detach().double().numpy() for p in network.parameters())
    folded = hidden_weight / scale
    return GateWeights(
        hidden_weight=folded,
        hidden_bias=hidden_bias - folded @ np.broadcast_to(mean, inputs.shape[1]),
        out_weight=out_weight,
        out_bias=out_bias,
    )


def _compute_standardisation(inputs: Array) -> tuple[Array, Array]:
    """Compute mean and scale per input, (F,) each."""
    spread = inputs.std(axis=0)
    return inputs.mean(axis=0), np.maximum(spread, _SMALLEST_SPREAD * spread.mean() or 1.0)


def _make_network(n_inputs: int, n_candidates: int, seed: int) -> nn.Sequential:
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        network = nn.Sequential(nn.Linear(n_inputs, GATE_HIDDEN), nn.ReLU(), nn.Linear(GATE_HIDDEN, n_candidates))
    for parameter in network[2].parameters():
        nn.init.zeros_(parameter)
    return network


def _fit(
    network: nn.Sequential, inputs: Tensor, log_p: Tensor, scores: Tensor, decay: float, experts: Tensor, top: int
) -> None:
    """Take the steps of `torch.optim.Adam`, to the last bit, but without the import of torch's compiler by it."""
    parameters = list(network.parameters())
    means, squares = ([torch.zeros_like(parameter) for parameter in parameters] for _ in range(2))
    for step in range(1, STEPS + 1):
        likelihood = mix(log_p, _select_top(scores + network(inputs), experts, top), TORCH).mean()
        penalty = decay * torch.stack([parameter.square().sum() for parameter in parameters]).sum()
        gradients = torch.autograd.grad(penalty - likelihood, parameters)
        rate, root = LEARNING_RATE / (1 - BETA1**step), (1 - BETA2**step) ** 0.5
        with torch.no_grad():
            for parameter, gradient, m, v in zip(parameters, gradients, means, squares, strict=True):
                m.lerp_(gradient, 1 - BETA1)
                v.mul_(BETA2).addcmul_(gradient, gradient, value=1 - BETA2)
                parameter.addcdiv_(m, (v.sqrt() / root).add_(EPSILON), value=-rate)


def _select_top(scores: Tensor, experts: Tensor, top: int) -> Tensor:
    """Set scores to -inf for experts outside a sample's `top`; on a tie, the lower index comes first."""
    if not len(experts):
        return scores
    order = torch.argsort(-scores[:, experts].detach(), dim=1, stable=True)
    return scores.scatter(1, experts[order[:, top:]], -torch.inf)
