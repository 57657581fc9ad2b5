"""FedCoE's maths: how well clients fit experts, and the weighted sums of parameters that result.

Source: "FedCoE: Bridging Generalization and Personalization via Federated Coordinated Dual-level MoEs",
arXiv 2605.21264, Eq. 1 and 5 to 13; specification docs/methods/fedcoe.md. Departures: a temperature in Eq. 1
(section 3), no epsilon in Eq. 8 (section 10, point 14), ranking by affinity (point 1), the profile prior (section 7).

Indices: experts j in 0..K-1, clients i in 0..N-1 by ascending device id, classes c in 0..C-1.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from fedge.bundle.formula import softmax
from fedge.tensors.layout import Model

Array = NDArray[np.float64]
Indices = tuple[int, ...]

TIED: Final = 12
"""Shares are compared after rounding to this many decimals, so that rounding errors decide no tie."""
ON_THE_SIMPLEX: Final = 1e-3
"""How far the sum of a profile may be from 1 (section 11)."""


def assign_classes(n_classes: int, n_experts: int) -> tuple[int, ...]:
    """Assign an expert to each class, floor(c K / C) (section 3); with K > C some experts have no class.

    Example:
        >>> assign_classes(10, 4)
        (0, 0, 0, 1, 1, 2, 2, 2, 3, 3)
    """
    return tuple(c * n_experts // n_classes for c in range(n_classes))


def compute_suitability(q: Array, temperature: float) -> Array:
    """Compute the gate's target, the softmax of q / T_s over the experts (Eq. 1).

    Args:
        q: (n, K) probability that each expert gives to the true class of a sample.
        temperature: T_s > 0; 1 in the paper's preset, 0.1 in ours.

    Returns:
        (n, K), rows on the simplex.
    """
    return softmax(q, temperature)


def compute_correlation(p: Array, a: Array) -> Array:
    """Compute M = sum over samples of p(x) a(x)^T, (K, N), from routing (n, K) and scores (n, N) (Eq. 7)."""
    m: Array = p.T @ a
    return m


def normalise_rows(m: Array) -> Array:
    """Divide each row of M (K, N) by its sum (Eq. 8, M_E); a row of zeros stays zero."""
    return _divide_by_sums(m, axis=1)


def normalise_columns(m: Array) -> Array:
    """Divide each column of M (K, N) by its sum (Eq. 8, M_C): the share of a client in each expert.

    A column of zeros stays a column of zeros.
    """
    return _divide_by_sums(m, axis=0)


def _divide_by_sums(m: Array, axis: int) -> Array:
    """Divide M by its sums, without the paper's epsilon, since no result may depend on the scale of M."""
    sums = m.sum(axis=axis, keepdims=True)
    shares: Array = np.divide(m, sums, out=np.zeros_like(m), where=sums > 0)
    return shares


def select_clients(ranking: Array, n_top: int) -> tuple[Indices, ...]:
    """Select S_j for each expert: the clients with the largest R[j, :], the lower index first on a tie.

    Args:
        ranking: R (K, N): M_E ("raw", as in the paper) or M_C ("affinity", ours).
        n_top: N_top >= 1; all clients are taken if there are fewer.

    Example:
        >>> select_clients(np.array([[0.5, 0.2, 0.5], [0.1, 0.3, 0.2]]), 2)
        ((0, 2), (1, 2))
    """
    return tuple(map(tuple, np.argsort(-np.round(ranking, TIED), axis=1, kind="stable")[:, :n_top].tolist()))


def compute_expert_weights(m: Array, selected: Sequence[Indices]) -> Array:
    """Compute W (K, N), the share of each selected client in the next expert; other clients have 0 (Eq. 10).

    Args:
        m: M, (K, N), >= 0.
        selected: S_j for each expert. An empty S_j gives a row of zeros, so the expert stays as it is.

    Returns:
        W, whose rows sum to 1; uniform over S_j where the row of M is all zero.
    """
    shares = normalise_rows(m)
    weights = np.zeros_like(m)
    for j, clients in enumerate(selected):
        if clients:
            own = shares[j, list(clients)]
            weights[j, list(clients)] = own / own.sum() if own.sum() > 0 else 1 / len(clients)
    return weights


def mix_models(models: Iterable[Model], weights: Array) -> tuple[Model | None, ...]:
    """Compute weighted sums of models in float64: the sums of Eq. 9, 11 and 13.

    Args:
        models: each is read once.
        weights: (n_sums, n_models), >= 0; a row sums to 1, or is all zero.

    Returns:
        For each row sum_i weights[i] theta_i; counters are those of the model with the largest weight, the first on a
        tie (section 11). None for a row of zeros.

    Raises:
        ValueError: the number of models is not the number of columns.

    Cost: O(n_sums * n_models * d) time, 8 * n_sums * d bytes beyond the model at hand.
    """
    sums: list[tuple[Array, Array, NDArray[np.int64]] | None] = [None] * len(weights)
    largest = np.round(weights, TIED).argmax(axis=1)
    for i, (model, column) in enumerate(zip(models, weights.T, strict=True)):
        for k, weight in enumerate(column):
            if weight == 0:
                continue
            params, buffers, counters = sums[k] or (
                np.zeros(len(model.params)),
                np.zeros(len(model.buffers)),
                model.counters,
            )
            params += weight * model.params.astype(np.float64)
            buffers += weight * model.buffers.astype(np.float64)
            sums[k] = params, buffers, model.counters if i == largest[k] else counters
    return tuple(None if s is None else Model(s[0].astype(np.float32), s[1].astype(np.float32), s[2]) for s in sums)


def interpolate(model: Model, towards: Model | None, tau: float) -> Model:
    """Return (1 - tau) model + tau towards, the smoothing of Eq. 9 and 11; without `towards` the model as it is.

    Counters are those of the model with the larger weight, `model` on a tie.
    """
    if towards is None or tau == 0:
        return model

    def mix_arrays(old: NDArray[np.float32], new: NDArray[np.float32]) -> NDArray[np.float32]:
        return ((1 - tau) * old.astype(np.float64) + tau * new.astype(np.float64)).astype(np.float32)

    counters = towards.counters if tau > 0.5 else model.counters
    return Model(mix_arrays(model.params, towards.params), mix_arrays(model.buffers, towards.buffers), counters)


def compute_profile_prior(profile: Array, typical: Array, groups: Sequence[int], delta: float) -> Array:
    """Compute t_c = ln((rho_g(c) + delta) / (mean rho_g(c) + delta)), added to class c's logits (section 7).

    Args:
        profile: rho (K,), of the new client.
        typical: mean of the gate over the server data, (K,).
        groups: g, the expert of each class.
        delta: > 0; 0.02.

    Returns:
        (C,).

    Example:
        >>> compute_profile_prior(np.array([0.7, 0.3]), np.array([0.5, 0.5]), (0, 1), 0.02).round(6).tolist()
        [0.325422, -0.485508]
    """
    t: Array = np.log((profile + delta) / (typical + delta))[list(groups)]
    return t


def is_profile(shares: Sequence[float], n_experts: int) -> bool:
    """Return whether a device's numbers are a profile: one per expert, on the simplex up to rounding."""
    rho = np.asarray(shares, np.float64)
    return rho.shape == (n_experts,) and bool((rho >= 0).all()) and abs(float(rho.sum()) - 1) <= ON_THE_SIMPLEX


# ---------------------------------------------------------------------------------------------------- diagnostics


def compute_overlap(selected: Sequence[Indices]) -> float:
    """Compute the mean over pairs of experts of |S_i & S_j| / |S_i|, in [0, 1]; 0 with one expert (section 13)."""
    pairs = [(a, b) for k, a in enumerate(selected) for b in selected[k + 1 :] if a]
    return float(np.mean([len(set(a) & set(b)) / len(a) for a, b in pairs])) if pairs else 0.0


def compute_spread(experts: Sequence[Model]) -> float:
    """Compute the mean over experts of ||theta_j - mean|| / ||mean|| (section 13); 0 when all are zero."""
    stacked = np.stack([expert.params for expert in experts]).astype(np.float64)
    mean = stacked.mean(axis=0)
    norm = float(np.linalg.norm(mean))
    return float(np.linalg.norm(stacked - mean, axis=1).mean()) / norm if norm else 0.0
