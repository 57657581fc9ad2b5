"""fedge's experts after the trial: a device's starts and its primary expert; docs/methods/fedge.md section 5."""

from __future__ import annotations

from collections.abc import Mapping

from coordinator.methods.papers.fedge_state import FedgeState, PrimaryExpert
from coordinator.methods.parts import grouping
from coordinator.methods.rounds import get_owner
from fedge.steps.training.train import Start, Trained

LOOKUP_EVERY = 5  # rounds between two look-ups of the primary expert, section 5


def list_starts(state: FedgeState, device_id: str, r: int) -> tuple[Start, ...]:
    """List a device's possible starts: w; after the split its primary expert, or all its experts if look-up is due."""
    if not state.experts:
        return (Start(model=state.shared.model),)
    primary = state.primary.get(device_id)
    if primary is not None and r - primary.round < LOOKUP_EVERY:
        return (Start(model=state.experts[primary.cluster].model, cluster=primary.cluster),)
    return list_offered_experts(state, device_id)


def list_offered_experts(state: FedgeState, device_id: str) -> tuple[Start, ...]:
    """List the experts of the device's clusters; all experts if the device is in no cluster."""
    assert state.trial is not None
    clusters = state.trial.clusters
    choice = grouping.select_offered([k for k, members in enumerate(clusters) if device_id in members], clusters)
    return tuple(Start(model=state.experts[k].model, cluster=k) for k in choice)


def find_primaries(state: FedgeState, updates: Mapping[str, Trained], r: int) -> dict[str, PrimaryExpert]:
    """Return the primary experts that devices have just chosen."""
    found: dict[str, PrimaryExpert] = {}
    for key, update in updates.items():
        device_id = get_owner(key)
        before = state.primary.get(device_id)
        if update.cluster >= 0 and (before is None or r - before.round >= LOOKUP_EVERY):
            found[device_id] = PrimaryExpert(cluster=update.cluster, round=r)
    return found
