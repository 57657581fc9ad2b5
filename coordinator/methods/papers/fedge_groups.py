"""fedge, step 1: profiles of devices, and the groups in which cohorts are chosen; docs/methods/fedge.md."""

from __future__ import annotations

import logging
from collections.abc import Collection

import msgspec
import numpy as np

from coordinator.clustering import aidc
from coordinator.fleet.fleet import Fleet
from coordinator.methods.papers.fedge_state import FedgeState
from coordinator.methods.parts import grouping
from coordinator.methods.parts.grouping import ONE_GROUP, Description
from coordinator.methods.parts.unresponsive import find_responsive, run_and_record
from coordinator.selection import ccmab
from coordinator.store.records import Device
from fedge.steps.descriptions.profile import Profile

log = logging.getLogger("fedge.method")


async def profile_devices(state: FedgeState, fleet: Fleet) -> FedgeState:
    """Profile (SPRE) devices without profile or with another number of samples since; then make AIDC groups."""
    extractor = state.extractor or state.shared.model
    due = {
        i: device for i, device in find_responsive(state, fleet).items() if is_outdated(state.profiles.get(i), device)
    }
    state, answers = await run_and_record(state, fleet, "profile", dict.fromkeys(due, Profile(extractor=extractor)))
    new = grouping.read_descriptions(answers, due, fleet, state.layout)
    state = msgspec.structs.replace(state, extractor=extractor)
    return group_devices(state, new) if new else state


def is_outdated(profiled: Description | None, device: Device) -> bool:
    """Return whether to profile a device, as `grouping.is_due`, or because its samples' distribution has changed."""
    return grouping.is_due(profiled, device) or (device.drift and device.n_samples > 0)


def group_devices(state: FedgeState, new: dict[str, Description]) -> FedgeState:
    """Place new and changed devices; after many of them, remake all groups (FedEPC sections 4.4 and 4.6)."""
    profiled = grouping.select_comparable(state.profiles, new)
    state = without(state, state.profiles.keys() - profiled.keys())
    before, state = state.profiles, msgspec.structs.replace(state, profiles=profiled)
    unit = grouping.compute_unit(profiled.values())
    if unit is None:
        log.warning(ONE_GROUP)
        return with_groups(state, (tuple(profiled),))
    moved = [i for i in new if i in profiled and (i not in before or grouping.has_changed(before[i], new[i], unit))]
    state = without(state, moved)
    if not state.groups or aidc.needs_reclustering(state.n_moved, len(profiled)):
        ids = list(profiled)
        found = aidc.aidc(grouping.stack_profiles(profiled.values()), unit=unit, rng=np.random.default_rng(0))
        return with_groups(state, tuple(tuple(ids[i] for i in members) for members in found))
    for device_id in moved:
        state = place_stranger(state, device_id, unit)
    return state


def without(state: FedgeState, strangers: Collection[str]) -> FedgeState:
    """Return the state without these devices in its groups; an empty group is deleted with its bandit."""
    left = [tuple(i for i in members if i not in strangers) for members in state.groups]
    return msgspec.structs.replace(
        state,
        groups=tuple(members for members in left if members),
        bandits=tuple(bandit for bandit, members in zip(state.bandits, left, strict=True) if members),
        n_moved=state.n_moved + len(strangers),
    )


def place_stranger(state: FedgeState, stranger: str, unit: float) -> FedgeState:
    """Let a stranger join the nearest group, or found a new group (FedEPC section 4.6, point 1)."""
    k = grouping.place(stranger, state.profiles, state.groups, unit).cluster
    if k is None:
        return msgspec.structs.replace(
            state, groups=(*state.groups, (stranger,)), bandits=(*state.bandits, ccmab.State())
        )
    joined = tuple(sorted((*state.groups[k], stranger)))
    return msgspec.structs.replace(state, groups=(*state.groups[:k], joined, *state.groups[k + 1 :]))


def with_groups(state: FedgeState, groups: tuple[tuple[str, ...], ...]) -> FedgeState:
    """Return the state with new groups; each inherits the bandit of the old group that it overlaps most."""
    heirs = aidc.inherit(state.groups, groups)
    bandits = tuple(ccmab.State() if heir is None else state.bandits[heir] for heir in heirs)
    return msgspec.structs.replace(state, groups=groups, bandits=bandits, n_moved=0)


Members = tuple[tuple[str, ...], ...]


async def cluster_by_group(state: FedgeState, fleet: Fleet, ids: Collection[str]) -> tuple[FedgeState, Members]:
    """Make clusters of the devices `ids` from the AIDC groups; without groups, devices are profiled first."""
    state = state if state.groups else await profile_devices(state, fleet)
    clusters = (tuple(i for i in group if i in ids) for group in state.groups)
    return state, tuple(cluster for cluster in clusters if cluster)


async def profile_drifting(state: FedgeState, fleet: Fleet) -> FedgeState:
    """Profile drifting devices, so that they are placed in a group again and may choose among all experts."""
    drifting = {device.id: device for device in fleet.get_devices() if device.drift and device.id in state.installed}
    extractor = state.extractor or state.shared.model
    state, answers = await run_and_record(
        state, fleet, "profile", dict.fromkeys(drifting, Profile(extractor=extractor))
    )
    new = grouping.read_descriptions(answers, drifting, fleet, state.layout)
    if not new:
        return state
    state = group_devices(msgspec.structs.replace(state, extractor=extractor), new)
    if state.trial is None:
        return state
    clusters = tuple(tuple(i for i in members if i not in new) for members in state.trial.clusters)
    return msgspec.structs.replace(state, trial=msgspec.structs.replace(state.trial, clusters=clusters))
