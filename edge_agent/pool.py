"""PM-MoE stage 2 on a device (pm_moe.md sections 3, 5, 6)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from edge_agent.outcome import Fetch, Stop
from fedge.messages import FitPool, Installed, Order

if TYPE_CHECKING:
    from edge_agent.worker import Worker


def fit_pool(worker: Worker, action: FitPool, fetch: Fetch, order: Order, stop: Stop) -> Installed:
    """Denoise, train the gate, guard, write the bundle."""
    raise NotImplementedError
