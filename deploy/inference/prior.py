"""Other shares than at home: the probabilities follow the shares that the device's own answers show (fedge.md 9.1).

If only the classes' shares change, from h to q, then p'(c | x) ∝ p(c | x) q_c / h_c, and q is estimated from samples
without labels by EM on the calibrated probabilities (Saerens, Latinne and Decaestecker 2002, equations 2.4 and 2.9).
Calibration is what makes it work, and h is the mean probability on validation samples (Alexandari, Kundaje and
Shrikumar 2020). Here EM takes one sample at a time (Cappé and Moulines 2009) and forgets those before the last `WINDOW`
or so, since shares may change again. No weight of the bundle changes, so the next sample can be answered as at home.

The same holds for the candidates of the mixture, whose weights α_k(x) are the probabilities of "this is a sample for
candidate k". If inputs move to where another candidate is at home, its share rises from ω̄_k at home to v_k, and
α'_k(x) ∝ α_k(x) v_k / ω̄_k.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

WINDOW: Final = 200
"""Number of samples in the window of the exponential mean that estimates the shares."""
HOME_SAMPLES: Final = 20
"""Weight of the shares at home in the estimate, in samples; the window's own is `WINDOW`."""
ENOUGH: Final = 50
"""Fewest validation samples from which the classes' shares at home are known well enough to follow others."""
LARGEST_RATIO: Final = 30.0
"""Bound on q_c / h_c and on its inverse."""


class SharesEstimate:
    """Shares of K classes, or K candidates, among recent samples, estimated from probabilities; begins with home's."""

    def __init__(self, home: NDArray[np.float64]) -> None:
        """Begin with the shares (K,) at home, all above 0."""
        self._home = home
        self._recent = home.copy()

    @property
    def ratio(self) -> NDArray[np.float64]:
        """Factor of each probability, (K,)."""
        now = (WINDOW * self._recent + HOME_SAMPLES * self._home) / (WINDOW + HOME_SAMPLES)
        return np.clip(now / self._home, 1 / LARGEST_RATIO, LARGEST_RATIO)

    def observe(self, probabilities: NDArray[np.floating]) -> NDArray[np.float32]:
        """Add samples (n, K), oldest first, and return their probabilities under the shares estimated so far.

        A row that is not finite, or only zeros, is returned as it is, and is not counted.
        """
        adapted = np.array(probabilities, np.float32)
        for i in np.flatnonzero(np.isfinite(probabilities).all(axis=1) & probabilities.any(axis=1)):
            row = probabilities[i] * self.ratio
            row /= row.sum()
            self._recent += (row - self._recent) / WINDOW
            adapted[i] = row
        return adapted
