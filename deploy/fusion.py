"""The mixture's formula in float32 numpy, for engines that run the candidates one by one (fedge.md sections 9, 11).

The same numbers as the skeleton's graph takes, from the gate's part, and the same outcome, also where a candidate's
logits are not finite; written for few calls, which is what counts for single samples.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from fedge.bundle import CandidateInfo, Manifest
from fedge.messages import Role
from fedge.task import gate_pool

Floats = NDArray[np.float32]
Numbers = Mapping[str, NDArray[Any]]
"""The tensors of a gate's part by name."""

LOWEST: Final = np.float32(-3e38)
"""Score of a candidate that is dropped, as in the graph."""
WITHOUT_WEIGHT: Final = np.float32(-1e38)
"""A gate bias below it belongs to a candidate of weight 0."""


@dataclass(frozen=True, slots=True)
class Formula:
    """All that decides a prediction, given the logits of M candidates.

    Attributes:
        kernel: windows that the gate sees the means of; (1, 1): the input as it is.
        numbers: see `Numbers`.
        experts: indices of the candidates of which only the `top` best take part in a sample.
        top: see `experts`.
    """

    kernel: tuple[int, int]
    numbers: Numbers
    experts: NDArray[np.int64]
    top: int


def formula(manifest: Manifest, numbers: Numbers) -> Formula:
    """The formula of a bundle, with the numbers of its gate's part."""
    experts = [k for k, c in enumerate(manifest.candidates) if is_expert(c)]
    return Formula(gate_pool(manifest.task.input_shape), numbers, np.array(experts, np.int64), manifest.fusion.top)


def is_expert(candidate: CandidateInfo) -> bool:
    """Whether the top rule may drop a candidate."""
    return candidate.role in {Role.GLOBAL, Role.EXPERT}


def shifted(numbers: Numbers) -> dict[str, NDArray[Any]]:
    """What a flat prior changes in a gate's part: gate scores 0 and no class prior (findings, section 6).

    Candidates of weight 0 stay without.
    """
    bias = numbers["gate.out.bias"]
    changed = {
        "gate.out.weight": np.zeros_like(numbers["gate.out.weight"]),
        "gate.out.bias": np.where(bias < WITHOUT_WEIGHT, bias, np.float32(0)),
    }
    return changed | ({"prior": np.zeros_like(numbers["prior"])} if "prior" in numbers else {})


def gate_scores(how: Formula, x: Floats) -> Floats:
    """Scores r + log ω, (n, M), of model inputs (n, *input_shape)."""
    numbers, (rows, columns) = how.numbers, how.kernel
    if how.kernel != (1, 1):
        n, channels, height, width = x.shape
        height, width = height // rows, width // columns
        cut = x[:, :, : height * rows, : width * columns].reshape(n, channels, height, rows, width, columns)
        x = np.add.reduce(cut, axis=(3, 5)) * np.float32(1 / (rows * columns))
    hidden = x.reshape(len(x), -1) @ numbers["gate.hidden.weight"].T + numbers["gate.hidden.bias"]
    scores: Floats = np.maximum(hidden, 0) @ numbers["gate.out.weight"].T + numbers["gate.out.bias"]
    return scores


def energies(how: Formula, logits: Floats) -> Floats:
    """ẽ = (logsumexp_c(l / T) − μ) / σ of logits (n, M, C): (n, M)."""
    numbers = how.numbers
    cooled = logits * numbers["energy.scale"] if "energy.scale" in numbers else logits
    largest = cooled.max(axis=2, keepdims=True)
    lse = np.log(np.exp(cooled - largest).sum(axis=2)) + largest[:, :, 0]
    energy: Floats = (lse - numbers["energy.mean"]) * numbers["energy.inverse_std"]
    return energy


def clipped(how: Formula, energy: Floats) -> Floats:
    """What of an energy counts: β clip(ẽ)."""
    numbers = how.numbers
    counted: Floats = np.minimum(np.maximum(energy, numbers["energy.low"]), numbers["energy.high"])
    return counted * numbers["energy.beta"]


def fuse(how: Formula, logits: Floats, gate: Floats) -> list[Floats]:
    """Probabilities (n, C), weights (n, M) and energies (n, M) of logits (n, M, C) and `gate_scores` (n, M)."""
    with np.errstate(all="ignore"):  # what is not finite is dropped below
        energy = energies(how, logits)
        score = clipped(how, energy) + gate
        finite = math.isfinite(float(np.abs(logits).sum()) + float(score.sum()))
        usable = None if finite else np.isfinite(np.abs(logits).sum(axis=2) + score)
        if usable is not None:
            score = np.where(usable, score, LOWEST)
            energy = np.where(usable, energy, np.float32(np.nan))
            logits = np.where(usable[:, :, None], logits, np.float32(0))
        if len(how.experts) > how.top:
            _drop(score, how.experts, how.top)
        alpha = np.exp(score - score.max(axis=1, keepdims=True))
        alpha /= alpha.sum(axis=1, keepdims=True)
        weights = alpha if usable is None else np.where(usable, alpha, np.float32(0))
        return [_mixed(how, logits, alpha, usable), weights, energy]


def _drop(score: Floats, experts: NDArray[np.int64], top: int) -> None:
    """Give all but the `top` best experts of each sample the score of a dropped candidate, in place."""
    others = np.argsort(-score[:, experts], axis=1, kind="stable")[:, top:]
    np.put_along_axis(score, experts[others], LOWEST, axis=1)


def _mixed(how: Formula, logits: Floats, alpha: Floats, usable: NDArray[np.bool_] | None) -> Floats:
    """The output p = (1 − g) Σ α_k exp q_k + g exp q_guard; in logit space softmax(Σ α_k l_k)."""
    numbers = how.numbers
    if "scale" not in numbers:
        z = (alpha[:, None, :] @ logits)[:, 0]
        z = np.exp(z - z.max(axis=1, keepdims=True))
        mixed: Floats = z / z.sum(axis=1, keepdims=True)
        return mixed
    m = alpha.shape[1]
    p = (alpha[:, None, :] @ _softmax(logits, numbers["scale"][:m], numbers["prior"][:m], usable))[:, 0]
    (share,) = numbers["guard.share"]
    if not share:
        return np.asarray(p)
    k = int(numbers["order"][m])
    here = None if usable is None else usable[:, [k]]
    alternative = _softmax(logits[:, [k]], numbers["scale"][m:], numbers["prior"][m:], here)[:, 0]
    g = share if here is None else np.where(here, share, np.float32(0))
    return np.asarray((1 - g) * p + g * alternative)


def _softmax(logits: Floats, scale: Floats, prior: Floats, usable: NDArray[np.bool_] | None) -> Floats:
    """Probabilities exp q = softmax(l / T + κ π), (n, K, C); equal probabilities where a candidate is not usable."""
    z = logits * scale + prior
    if usable is not None:
        z = np.where(usable[:, :, None], z, np.float32(0))
    z = np.exp(z - z.max(axis=2, keepdims=True))
    p: Floats = z / z.sum(axis=2, keepdims=True)
    return p
