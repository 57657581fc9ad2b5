"""What the outputs of a mixture say about the samples: free energy, gate entropy, outliers.

The energies are the graph's: logsumexp of a candidate's logits, standardised by its validation samples, so that a
sample like those has energies around 0; the weights are the shares of the candidates, (n, M) both.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

from fedge.bundle import Reference

Floats = NDArray[np.floating]

OUTLIER_DEVIATIONS: Final = 3.0
"""A sample further above the mean free energy of the validation samples, in their deviations, is an outlier."""


def free_energy(weights: Floats, energies: Floats) -> NDArray[np.float64]:
    """F(x) = -Σ_k α_k ẽ_k(x) over the usable candidates, (n,); larger is stranger. NaN where no candidate is usable."""
    usable = np.isfinite(energies)
    share = np.where(usable, weights, 0.0).astype(np.float64)
    total = share.sum(axis=1)
    mixed = (share * np.where(usable, energies, 0.0)).sum(axis=1)
    free: NDArray[np.float64] = -np.divide(mixed, total, out=np.full(len(total), np.nan), where=total > 0)
    return free


def gate_entropy(weights: Floats) -> NDArray[np.float64]:
    """H(x) = -Σ_k α_k log α_k, (n,), nats in [0, log M]; 0 where one candidate decides alone."""
    share = np.asarray(weights, np.float64)
    entropy: NDArray[np.float64] = -(share * np.log(np.where(share > 0, share, 1.0))).sum(axis=1)
    return np.maximum(entropy, 0.0)  # a weight that was rounded to more than 1


def reference(weights: Floats, energies: Floats) -> Reference | None:
    """The yardstick of a bundle from its outputs on validation samples; None with fewer than 2 usable ones."""
    free, entropy = free_energy(weights, energies), gate_entropy(weights)
    kept = np.isfinite(free)
    free, entropy = free[kept], entropy[kept]
    if len(free) < 2:
        return None
    mean, std = float(free.mean()), float(free.std(ddof=1))
    return Reference(
        n=len(free),
        free_energy_mean=mean,
        free_energy_std=std,
        gate_entropy_mean=float(entropy.mean()),
        gate_entropy_std=float(entropy.std(ddof=1)),
        outlier_above=mean + OUTLIER_DEVIATIONS * std,
    )
