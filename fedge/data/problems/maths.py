"""Functions on arrays that several problems share. Logarithms are natural."""

from __future__ import annotations

from itertools import combinations

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Floats = NDArray[np.floating]


def log_softmax(scores: Floats, axis: int = -1) -> Array:
    """Return the log-softmax along an axis, with the largest subtracted first."""
    shifted = scores - scores.max(axis=axis, keepdims=True)
    return np.asarray(shifted - np.log(np.exp(shifted).sum(axis=axis, keepdims=True)))


def logsumexp(terms: Floats, axis: int = -1) -> Array:
    """Return log sum exp along an axis; the terms must be finite or -inf, not all of them -inf."""
    return np.asarray(np.logaddexp.reduce(terms, axis=axis))


def softplus(values: Floats) -> Floats:
    """Return log(1 + exp(v)) without overflow."""
    return np.logaddexp(values.dtype.type(0), values)


def sigmoid(values: Floats) -> Floats:
    """Return 1 / (1 + exp(-v)) = (1 + tanh(v / 2)) / 2, which neither overflows nor loses a sign."""
    return np.asarray(0.5 * (1 + np.tanh(0.5 * values)))


def minimise_on_simplex(products: Array) -> Array:
    """Return the weights w >= 0 of sum 1, (M,), that minimise w^T R w.

    Every set of candidates is tried (2^M - 1, M is at most 4): inside a set the minimum is R^-1 1, scaled to sum 1, and
    the best one without a negative weight is the minimum of all. Nearly equal candidates share their weight, since R
    gets a billionth of its mean diagonal on the diagonal.

    Args:
        products: R, (M, M), symmetric and positive semidefinite.

    Example:
        >>> minimise_on_simplex(np.array([[1.0, 0.0], [0.0, 3.0]])).round(6).tolist()
        [0.75, 0.25]
    """
    m = len(products)
    steady = products + np.eye(m) * (1e-9 * np.trace(products) / m or 1.0)
    best, weights = np.inf, np.full(m, 1 / m)
    for size in range(1, m + 1):
        for chosen in combinations(range(m), size):
            inside = np.ix_(chosen, chosen)
            raw = np.linalg.solve(steady[inside], np.ones(size))
            own = raw / raw.sum()
            value = float(own @ steady[inside] @ own)
            if (own >= 0).all() and value < best - 1e-12 * abs(value):
                best, weights = value, np.zeros(m)
                weights[list(chosen)] = own
    return weights
