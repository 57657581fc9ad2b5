"""Statistics of a mixture's outputs on samples: free energy, gate entropy, and the bounds for outliers.

Energies come from the graph. A candidate's energy is the logsumexp of its logits, standardised on its validation
samples, so that similar samples have energies around 0. Weights are the candidates' shares. Both are (n, M).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from fedge.bundle.manifest import Reference
from fedge.data.problems.problem import Problem

Floats = NDArray[np.floating]

OUTLIER_SHARE: Final = 0.05
"""Share of samples like the validation samples that is taken for outliers, half of it on either side."""


def compute_free_energy(weights: Floats, energies: Floats) -> NDArray[np.float64]:
    """Return free energies F(x) = -Σ_k α_k ẽ_k(x), (n,), larger for stranger samples; NaN if no candidate is usable."""
    usable = np.isfinite(energies)
    share = np.where(usable, weights, 0.0).astype(np.float64)
    total = share.sum(axis=1)
    mixed = (share * np.where(usable, energies, 0.0)).sum(axis=1)
    free: NDArray[np.float64] = -np.divide(mixed, total, out=np.full(len(total), np.nan), where=total > 0)
    return free


def compute_gate_entropy(weights: Floats) -> NDArray[np.float64]:
    """Return gate entropies H(x) = -Σ_k α_k log α_k, (n,), in nats, from 0 (one candidate has all weight) to log M."""
    share = np.asarray(weights, np.float64)
    entropy: NDArray[np.float64] = -(share * np.log(np.where(share > 0, share, 1.0))).sum(axis=1)
    return np.maximum(entropy, 0.0)  # a weight may be rounded above 1


def compute_strangeness(problem: Problem, answers: Sequence[Floats], weights: Floats, energies: Floats) -> Floats:
    """Return how strange each sample is, (n,): its surprise where the problem says one, else its free energy."""
    surprise = problem.get_surprise(answers)
    return compute_free_energy(weights, energies) if surprise is None else surprise


def compute_reference(
    problem: Problem, answers: Sequence[Floats], weights: Floats, energies: Floats
) -> tuple[Reference, float] | None:
    """Return a bundle's reference from outputs on validation samples, and the lower bound of a usual strangeness.

    Return None with fewer than 2 usable samples. The lower bound, and the upper one in the reference, are order
    statistics of the n samples: the k-th from either end with k = max(1, floor(OUTLIER_SHARE / 2 · (n + 1))). Another
    sample of this kind is outside with probability 2k / (n + 1), at most `OUTLIER_SHARE` from n = 39 on (split
    conformal prediction). This assumes no shape of the distribution; standard deviations would not work, since the
    graph clips energies. A problem with a surprise has the upper bound alone, at its own share of alarms.
    """
    return summarise_strangeness(
        compute_strangeness(problem, answers, weights, energies), weights, problem.get_alarms()
    )


def summarise_strangeness(
    strange: Floats, weights: Floats, alarms: float | None = None
) -> tuple[Reference, float] | None:
    """Return what `compute_reference` does, of strangeness (n,) and weights (n, M)."""
    free, entropy = np.asarray(strange, np.float64), compute_gate_entropy(weights)
    kept = np.isfinite(free)
    free, entropy = free[kept], entropy[kept]
    if len(free) < 2:
        return None
    k = max(1, int((OUTLIER_SHARE / 2 if alarms is None else alarms) * (len(free) + 1)))
    ordered = np.sort(free)
    yardstick = Reference(
        n=len(free),
        free_energy_mean=float(free.mean()),
        free_energy_std=float(free.std(ddof=1)),
        gate_entropy_mean=float(entropy.mean()),
        gate_entropy_std=float(entropy.std(ddof=1)),
        outlier_above=float(ordered[-k]),
    )
    return yardstick, float(ordered[k - 1]) if alarms is None else -math.inf
