"""CICS's model of rewards, ridge regression and a Gaussian process, and the search for the devices that it favours.

Source: Tang et al., "FedEPC", CMC 85(2), 2025, equations (10)-(12); specification docs/methods/fedepc.md, sections 5.3,
5.4 and 7. The kernel of two sets is the sum of the kernels of their devices (5.3).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

Vectors = NDArray[np.float64]
TIE: Final = 1e-12
DELTA: Final = 0.1
RIDGE: Final = 1.0  # lambda
KERNEL_SCALE: Final = 0.25  # v
KERNEL_LENGTH: Final = 1.0  # rho
NOISE: Final = 0.01  # s2


def expand_features(x: Vectors) -> Vectors:
    """Compute phi(x) = [x, x*x]: (n, c) -> (n, 2c)."""
    return np.concatenate([x, x * x], axis=1)


def fit_ridge(phi: Vectors, rewards: Vectors) -> Vectors:
    """Fit the weights theta = (lambda I + Phi^T Phi)^(-1) Phi^T r, (12): (h, p), (h,) -> (p,)."""
    return np.asarray(np.linalg.solve(RIDGE * np.eye(phi.shape[1]) + phi.T @ phi, phi.T @ rewards))


def compute_kernel(a: Vectors, b: Vectors) -> Vectors:
    """Compute Matern 3/2, v (1 + sqrt(3) d/rho) exp(-sqrt(3) d/rho), (10): (n, c), (m, c) -> (n, m)."""
    distance = np.sqrt(((a[:, None] - b[None]) ** 2).sum(axis=2))
    z = math.sqrt(3) * distance / KERNEL_LENGTH
    return np.asarray(KERNEL_SCALE * (1 + z) * np.exp(-z))


@dataclass(frozen=True, slots=True)
class Posterior:
    """The expected rewards of n devices: `mean` (n,), `variance` (n,), and covariances column by column.

    `x`: normalised contexts, (n, 5). `whitened`: L^(-1) k with G = L L^T, (h, n). All covariances at once would be
    n * n numbers, 800 MB with 10,000 devices.
    """

    mean: Vectors
    variance: Vectors
    x: Vectors
    whitened: Vectors

    def compute_column(self, i: int) -> Vectors:
        """Compute the covariances of all devices with device i, (n,)."""
        return np.asarray(compute_kernel(self.x, self.x[i : i + 1])[:, 0] - self.whitened[:, i] @ self.whitened)


def compute_posterior(x: Vectors, seen: Vectors, rewards: Vectors) -> Posterior:
    """Compute the posterior of the rewards of devices with normalised contexts x, (n, 5).

    mean_i = theta.phi(x_i) + k_i^T G^(-1) (r - Phi theta);  cov_ij = kap(|x_i - x_j|) - k_i^T G^(-1) k_j;
    G = K + s2 I.
    `seen` (h, 5) and `rewards` (h,) are the history; with an empty history, mean is 0 and cov is kap.
    """
    prior = np.full(len(x), KERNEL_SCALE)  # kap(0)
    if not len(seen):
        return Posterior(np.zeros(len(x)), prior, x, np.zeros((0, len(x))))
    theta = fit_ridge(expand_features(seen), rewards)
    lower = np.linalg.cholesky(
        compute_kernel(seen, seen) + NOISE * np.eye(len(seen))
    )  # no eigenvalue is below the noise
    whitened = np.asarray(np.linalg.solve(lower, compute_kernel(seen, x)), np.float64)
    residual = np.linalg.solve(lower, rewards - expand_features(seen) @ theta)
    mean = expand_features(x) @ theta + whitened.T @ residual
    return Posterior(mean, prior - (whitened * whitened).sum(axis=0), x, whitened)


def compute_exploration(t: int) -> float:
    """Compute beta_t = 2 ln(t^2 / delta), t >= 1."""
    return 2 * math.log(t * t / DELTA)


Column = Callable[[int], Vectors]
"""Position of a device -> covariances of all n devices with this one, (n,)."""


def select_greedily(
    mean: Vectors,
    variance: Vectors,
    column: Column,
    beta: float,
    *,
    first: Sequence[int],
    allowed: Sequence[int],
    size: int,
    seconds: Vectors,
    budget_s: float,
) -> list[int]:
    """Extend the set `first` one by one to `size` devices with the largest U(A) = mean(A) + sqrt(beta var(A)), (11).

    `allowed`: devices that may be added while the sum of `seconds`, (n,), stays within the budget. Cost: O(size * n)
    time beyond that of `size` columns, O(n) memory.
    """
    chosen: list[int] = []
    within, across = 0.0, np.zeros(len(mean))  # var(A), and each device's covariance with A
    left_s = budget_s

    def add_device(device: int) -> None:
        nonlocal within, across, left_s
        within += 2 * float(across[device]) + float(variance[device])
        across = across + column(device)
        left_s -= float(seconds[device])
        chosen.append(device)

    for overdue in first:
        add_device(overdue)
    remaining = np.array(sorted(set(allowed) - set(first)), np.intp)
    while len(chosen) < size and len(remaining := remaining[seconds[remaining] <= left_s * (1 + TIE)]):
        variances = within + 2 * across[remaining] + variance[remaining]
        scores = mean[chosen].sum() + mean[remaining] + np.sqrt(beta * np.maximum(variances, 0.0))
        best = int(np.argmax(scores >= scores.max() - TIE))
        add_device(int(remaining[best]))
        remaining = np.delete(remaining, best)
    return chosen
