"""Clusters by label feature: devices with the same majority label belong together.

Source: Yang et al., "Cluster Federated Learning with Intra-Cluster Correction" (CFIC), CMC 2025; specification
docs/methods/cfic.md, sections 3 and 4. The feature itself, psi, is found on the device
(`edge_agent.steps.describe_labels`).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from coordinator.clustering.aidc import Clusters, numbered


def by_label(features: Sequence[int]) -> Clusters:
    """Devices with equal feature >= 0; numbered by smallest member. A device without feature (-1) is in no cluster.

    Args:
        features: psi of each device, -1 or a label, by ascending device id.

    Cost: O(N m) for m different features.

    Example:
        >>> by_label([7, 2, -1, 7])
        ((0, 3), (1,))
    """
    psi = np.array(features, np.int64)
    return numbered([np.flatnonzero(psi == label).tolist() for label in np.unique(psi[psi >= 0])])
