"""SCMoE-PFL on a device: private model, gate, bundle (scmoe_pfl.md sections 10, 11)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from edge_agent.outcome import Fetch, Stop
from fedge.messages import FitMixture, Installed, Order

if TYPE_CHECKING:
    from edge_agent.worker import Worker


def fit_mixture(worker: Worker, action: FitMixture, fetch: Fetch, order: Order, stop: Stop) -> Installed:
    """Train the private model and the gate, write the bundle."""
    raise NotImplementedError
