"""FedCoE's global model (fedcoe.md, Eq. 4), which no device installs: gate and experts on the server."""

from __future__ import annotations

import numpy as np

from coordinator.fleet.fleet import Fleet
from coordinator.methods.papers.fedcoe import FedCoE, FedCoEState


def predict(method: FedCoE, state: FedCoEState, fleet: Fleet, x: np.ndarray) -> np.ndarray:
    """Class probabilities (n, C) of gate and best experts."""
    experts = [fleet.get(expert, state.layout) for expert in state.experts]
    probabilities = np.stack([method.server_data.compute_probabilities(expert, x) for expert in experts])
    return routed(method.server_data.compute_routing(fleet.get_tensors(state.gate), x), probabilities, method.TOP)


def routed(p: np.ndarray, probabilities: np.ndarray, top: int) -> np.ndarray:
    """Eq. 4: the global model's class probabilities (n, C): the `top` experts of each sample, weighted by the gate.

    Args:
        p: gate (n, K); the lower index wins a tie.
        probabilities: (K, n, C) of the experts.
        top: k, at least 1.
    """
    chosen = np.argsort(-p, axis=1, kind="stable")[:, :top]
    weights = np.zeros_like(p)
    np.put_along_axis(weights, chosen, np.take_along_axis(p, chosen, axis=1), axis=1)
    return np.einsum("nk,knc->nc", weights / weights.sum(axis=1, keepdims=True), probabilities)
