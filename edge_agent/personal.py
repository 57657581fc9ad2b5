"""What a device keeps for itself between rounds: heads, personal models, offsets (pm_moe.md section 4, Ditto)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from edge_agent.outcome import Fetch, Outcome
from fedge.messages import MeanFeatures, Order, Result, SharePrivate

if TYPE_CHECKING:
    from edge_agent.worker import Worker


def mean_features(worker: Worker, action: MeanFeatures, fetch: Fetch) -> Result:
    """DBE: mean features of D_L."""
    raise NotImplementedError


def share(worker: Worker, action: SharePrivate, order: Order) -> Outcome:
    """PM-MoE: the private module as a blob."""
    raise NotImplementedError
