"""The mixture's formula in numpy, in the precision of its tensors (fedge.md sections 7, 9, 11).

Symbols are those of the specification: M candidates, C classes, n samples. Runtimes compute in float32; a device's fit
and the check of a bundle use float64. The gate's training loss also uses `mix`, in torch (`edge_agent.learning.gate`).
`export.graph` builds the same formula as an ONNX graph; tests/fedge/bundle/test_formula.py checks that all agree. With
weights 1/M, T = 1, kappa = 0, beta = 1 and energies that are neither standardised nor clipped, the formula is
SCMoE-PFL's gate (scmoe_pfl.md section 11).

A `Formula` holds the tensors of a gate's part. The networks that run between two calls displace it from the processor's
caches, so each call costs several times what it costs in a loop. Therefore as much as possible is precomputed at load
time, and one pass over the logits gives energies and probabilities.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Generic, NamedTuple, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from fedge.bundle.trunk import LAYERS, Convolution, compute_trunk
from fedge.data.problems.maths import Array, Floats, log_softmax
from fedge.data.task import choose_gate_pool

F = TypeVar("F", bound=np.floating)
A = TypeVar("A", bound="Addable")
Numbers = Mapping[str, NDArray[Any]]
"""The tensors of a gate's part by name."""

ENERGY_CLIP: Final = 3.0
"""Bound of the standardised energy (fedge.md section 9)."""
MIN_ENERGY_STD: Final = 0.1
"""Smallest divisor of the standardisation (fedge.md section 9)."""
LOWEST: Final = np.float32(-3e38)
"""Score of a dropped candidate: below every other score, but finite, so that a softmax over such scores is finite."""
ZERO_WEIGHT: Final = -2e38
"""log omega for weight 0, finite in float32. Such a candidate has a share only where no other one is usable."""
WITHOUT_WEIGHT: Final = np.float32(-1e38)
"""Upper bound of the gate biases of candidates of weight 0; all other biases are above it."""
SAFE: Final = np.float32(60)
"""Largest absolute value whose exp can neither overflow nor vanish in a sum; up to it, a softmax need not subtract the
row's largest value."""
_ZERO: Final = np.float32(0)
_NAN: Final = np.float32(np.nan)


# ------------------------------------------------------------------------------------------- its terms, for the fit


def softmax(scores: Floats, temperature: float = 1.0) -> Array:
    """Return the softmax of scores / temperature along the last axis, with the largest subtracted first."""
    exponents = np.exp((scores - scores.max(axis=-1, keepdims=True)) / temperature)
    return np.asarray(exponents / exponents.sum(axis=-1, keepdims=True))


class Addable(Protocol):
    """The interface that the formula needs of numpy's and torch's arrays."""

    def __add__(self, other: Any, /) -> Any: ...


class Library(NamedTuple, Generic[A]):
    """The operations of numpy or torch along the last axis that the formula needs."""

    log_softmax: Callable[[A], A]
    logsumexp: Callable[[A], A]


NUMPY: Final[Library[Array]] = Library(log_softmax, lambda terms: np.asarray(np.logaddexp.reduce(terms, axis=-1)))


def mix(log_q: A, scores: A, library: Library[A]) -> A:
    """Return log p = log sum_k alpha_k exp q_k along the last axis M, with alpha = softmax(s) (fedge.md section 9)."""
    return library.logsumexp(library.log_softmax(scores) + log_q)


def standardise(energies: Array, mean: Array, std: Array) -> Array:
    """Return standardised energies, (n, M), clipped to -3 to 3."""
    return np.asarray(np.clip((energies - mean) / np.maximum(std, MIN_ENERGY_STD), -ENERGY_CLIP, ENERGY_CLIP))


def compute_log_weights(weights: Array) -> Array:
    """Return log omega, (M,), which is finite even for a weight of 0."""
    return np.log(weights, out=np.full(np.shape(weights), ZERO_WEIGHT), where=weights > 0)


def compute_gate_features(x: NDArray[F]) -> NDArray[F]:
    """Return the gate's inputs (n, F): flattened means of model inputs over full windows (`choose_gate_pool`)."""
    rows, columns = choose_gate_pool(x.shape[1:])
    if (rows, columns) != (1, 1):
        n, channels, height, width = x.shape
        down, across = height // rows, width // columns
        windows = x[:, :, : down * rows, : across * columns].reshape(n, channels * down, rows, across * columns)
        lines = np.add.reduce(windows, axis=2).reshape(n, -1, columns)
        x = np.add.reduce(lines, axis=2) / x.dtype.type(rows * columns)
    return x.reshape(len(x), -1)


def compute_gate_inputs(x: NDArray[F], convolutions: Sequence[Convolution], n_inputs: int) -> NDArray[F]:
    """Return what the gate's first layer takes of model inputs, (n, n_inputs).

    These are the features of the gate's own convolutions, if it has any; all numbers of a sample, if it takes so many;
    otherwise `compute_gate_features`.
    """
    if convolutions:
        return compute_trunk(x, convolutions).astype(x.dtype, copy=False)
    return x.reshape(len(x), -1) if n_inputs == math.prod(x.shape[1:]) else compute_gate_features(x)


def count_gate_features(input_shape: tuple[int, ...]) -> int:
    """Return F, the number of the gate's inputs."""
    return compute_gate_features(np.zeros((1, *input_shape))).size


# ------------------------------------------------------------------------------------------------ all of it at once


@dataclass(frozen=True, slots=True)
class Formula:
    """Everything that determines a prediction, given the logits of M candidates.

    A candidate's energy adds β clip((logsumexp_c(l) - μ) / σ) to its score.

    The formula works on R rows, each a copy of a candidate's logits. M rows serve the energies. M more serve the
    probabilities softmax(l / T_k + κ_k π), unless these are the same. One more serves the guard if it has a share.

    Attributes:
        convolutions: those of the gate before its first layer; empty for all gates but FedCoE's of images.
        hidden: weights (F, H) of the gate's first layer, over `compute_gate_inputs`.
        hidden_bias: bias (H,) of that layer.
        out: weights (H, M) of the gate's second layer, which gives r + log ω.
        out_bias: bias (M,) of that layer.
        mean: μ, (M,).
        inverse_std: 1 / σ, (M,).
        low: lower bound of the standardised energy, infinite if unclipped.
        high: upper bound of the standardised energy, infinite if unclipped.
        beta: β.
        rows: the candidate of each row, R numbers.
        scale: factors of the rows' logits, (R, 1).
        prior: terms added to the scaled logits, (R, C) or (R, 1).
        mixed: index of the first row for probabilities.
        guard: the guard's share of the output, 0 without a guard.
        experts: indices of the candidates of which only the `top` best take part in a sample.
        top: see `experts`.
        tame: bound on the absolute logits up to which no row exceeds `SAFE`.
    """

    convolutions: tuple[Convolution, ...]
    hidden: Floats
    hidden_bias: Floats
    out: Floats
    out_bias: Floats
    mean: Floats
    inverse_std: Floats
    low: np.floating
    high: np.floating
    beta: np.floating
    rows: tuple[int, ...]
    scale: Floats
    prior: Floats
    mixed: int
    guard: np.floating
    experts: NDArray[np.int64]
    top: int
    tame: np.floating


def prepare_formula(numbers: Numbers, experts: Sequence[int], top: int) -> Formula:
    """Return the formula in the precision of the gate part's tensors; for `experts` and `top` see `Formula`."""
    n_candidates, dtype = len(numbers["energy.mean"]), numbers["energy.mean"].dtype
    rows, mixed, guard = [*range(n_candidates)], 0, numbers["guard.share"][0]
    scale, prior = np.ones((n_candidates, 1), dtype), np.zeros((n_candidates, 1), dtype)
    own_scale, own_prior = numbers["scale"], numbers["prior"]
    if guard or own_prior[:n_candidates].any() or (own_scale[:n_candidates] != 1).any():
        n_calibrated = n_candidates + (guard > 0)
        rows += numbers["order"][:n_calibrated].tolist()
        scale = np.concatenate([scale, own_scale[:n_calibrated]])
        prior = np.concatenate([np.zeros_like(own_prior[:n_candidates]), own_prior[:n_calibrated]])
        mixed = n_candidates
    return Formula(
        convolutions=tuple(
            (numbers[f"gate.{layer}.weight"], numbers[f"gate.{layer}.bias"])
            for layer in LAYERS
            if f"gate.{layer}.weight" in numbers
        ),
        hidden=np.ascontiguousarray(numbers["gate.hidden.weight"].T),
        hidden_bias=numbers["gate.hidden.bias"],
        out=np.ascontiguousarray(numbers["gate.out.weight"].T),
        out_bias=numbers["gate.out.bias"],
        mean=numbers["energy.mean"],
        inverse_std=numbers["energy.inverse_std"],
        low=dtype.type(numbers["energy.low"]),
        high=dtype.type(numbers["energy.high"]),
        beta=dtype.type(numbers["energy.beta"]),
        rows=tuple(rows),
        scale=scale,
        prior=prior,
        mixed=mixed,
        guard=guard,
        experts=np.array(experts, np.int64),
        top=top,
        tame=(SAFE - np.abs(prior).max()) / np.abs(scale).max(),
    )


def find_guard(how: Formula) -> int:
    """Return the guard's candidate, or -1 if there is no guard."""
    return how.rows[-1] if how.guard else -1


def flatten_prior(numbers: Numbers) -> dict[str, NDArray[Any]]:
    """Return the changed tensors of a gate's part for a flat prior: gate scores of 0, and no class prior.

    Candidates of weight 0 keep that weight.
    """
    bias = numbers["gate.out.bias"]
    changed = {
        "gate.out.weight": np.zeros_like(numbers["gate.out.weight"]),
        "gate.out.bias": np.where(bias < WITHOUT_WEIGHT, bias, _ZERO),
    }
    return changed | ({"prior": np.zeros_like(numbers["prior"])} if "prior" in numbers else {})


def select_candidates(numbers: Numbers, used: Sequence[int]) -> dict[str, NDArray[Any]]:
    """Return the tensors of a gate's part for some of the candidates alone, in the order of `used`.

    These share what the others leave, as if the others' outputs were not finite. Without its candidate there is no
    guard.
    """
    rows, guard = [*used, len(numbers["energy.mean"])], int(numbers["order"][-1])
    per_candidate = "gate.out.weight", "gate.out.bias", "energy.mean", "energy.inverse_std"
    there = guard in used
    return {
        **numbers,
        **{name: numbers[name][[*used]] for name in per_candidate},
        **{name: numbers[name][rows] for name in ("scale", "prior")},
        "order": np.array([*range(len(used)), used.index(guard) if there else 0]),
        "guard.share": numbers["guard.share"] if there else np.zeros_like(numbers["guard.share"]),
    }


def compute_gate_scores(how: Formula, x: Floats) -> Floats:
    """Return the scores r + log ω, (n, M), of model inputs (n, *input_shape)."""
    hidden = compute_gate_inputs(x, how.convolutions, len(how.hidden)) @ how.hidden
    hidden += how.hidden_bias
    scores: Floats = np.maximum(hidden, _ZERO, out=hidden) @ how.out
    scores += how.out_bias
    return scores


def compute_counted_energy(how: Formula, k: int, logits: Floats) -> float:
    """Return β clip(ẽ) of candidate k for one sample's logits (C,); NaN if a logit is not finite."""
    values: list[float] = logits.tolist()  # for one sample numpy is not faster
    largest = max(values)
    if not math.isfinite(sum(values)):
        return math.nan
    total = sum([math.exp(value - largest) for value in values])
    energy = (math.log(total) + largest - float(how.mean[k])) * float(how.inverse_std[k])
    return min(max(energy, float(how.low)), float(how.high)) * float(how.beta)


def clip_energies(how: Formula, energy: Floats) -> Floats:
    """Return β clip(ẽ), the terms that standardised energies ẽ (..., M) add to the scores."""
    clipped: Floats = np.minimum(np.maximum(energy, how.low), how.high)
    clipped *= how.beta
    return clipped


def fuse(how: Formula, logits: Sequence[Floats], gate: Floats) -> list[Floats]:
    """Return probabilities (n, C), weights (n, M) and energies (n, M).

    Args:
        how: the formula.
        logits: logits (n, C) of each of the M candidates.
        gate: scores (n, M) of `compute_gate_scores`.
    """
    z = np.concatenate([logits[k] for k in how.rows], axis=1).reshape(len(gate), len(how.rows), -1)
    if np.maximum.reduce(np.abs(z), axis=None) < how.tame and np.maximum.reduce(np.abs(gate), axis=None) < np.inf:
        return _fuse(how, z, gate, tame=True)
    with np.errstate(all="ignore"):  # non-finite values are dropped
        return _fuse(how, z, gate, tame=False)


def _fuse(how: Formula, z: Floats, gate: Floats, *, tame: bool) -> list[Floats]:
    """Do the work of `fuse`; `z` (n, R, C), the logits of each row, is overwritten."""
    m, usable = gate.shape[1], None
    z *= how.scale
    z += how.prior
    if not tame:
        usable = _find_usable(z[:, :m], gate)
        z = np.where(usable[:, how.rows, None], z, _ZERO)
        largest = np.maximum.reduce(z, axis=2)
        z -= largest[:, :, None]
    np.exp(z, out=z)
    total = np.add.reduce(z, axis=2)
    energy = np.log(total[:, :m])
    if not tame:
        energy += largest[:, :m]
    energy -= how.mean
    energy *= how.inverse_std
    score = clip_energies(how, energy)
    score += gate
    if usable is not None:
        score = np.where(usable, score, LOWEST)
        energy = np.where(usable, energy, _NAN)
    if len(how.experts) > how.top:
        drop_experts(score, how.experts, how.top)
    score -= np.maximum.reduce(score, axis=1, keepdims=True)
    alpha = np.exp(score, out=score)
    alpha /= np.add.reduce(alpha, axis=1, keepdims=True)
    weights = alpha if usable is None else np.where(usable, alpha, _ZERO)
    return [_mix(how, z, total, alpha, usable), weights, energy]


def _find_usable(z: Floats, gate: Floats) -> NDArray[np.bool_]:
    """Return whether all logits and the score of each candidate are finite, (n, M)."""
    finite: NDArray[np.bool_] = np.isfinite(np.abs(z).sum(axis=2) + gate)
    return finite


def drop_experts(score: Floats, experts: NDArray[np.int64], top: int) -> None:
    """Give each sample's experts other than the `top` best the score of a dropped candidate, in place."""
    others = np.argsort(-score[:, experts], axis=1, kind="stable")[:, top:]
    score[np.arange(len(score))[:, None], experts[others]] = LOWEST


def _mix(how: Formula, z: Floats, total: Floats, alpha: Floats, usable: NDArray[np.bool_] | None) -> Floats:
    """Return p = (1 − g) Σ α_k exp q_k + g exp q_guard, where exp q is a row of `z` divided by its `total`."""
    first, last = how.mixed, how.mixed + alpha.shape[1]
    p = np.add.reduce(z[:, first:last] * (alpha / total[:, first:last])[:, :, None], axis=1)
    if not how.guard:
        return np.asarray(p)
    g = how.guard if usable is None else np.where(usable[:, how.rows[-1], None], how.guard, _ZERO)
    return np.asarray((1 - g) * p + g * (z[:, -1] / total[:, -1:]))
