"""FedCoE: what devices without a model of their own get (docs/methods/fedcoe.md, sections 6 and 7).

A newcomer that trains starts from its assembled model (Eq. 13). A device that does not train, or comes after training,
gets a bundle of its assembled model, or of the global model (Eq. 4), which needs no profile.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

import numpy as np

from coordinator.aggregation import correlation
from coordinator.fleet.fleet import Answer, Fleet
from coordinator.methods.installation import get_next_release
from coordinator.methods.parts.cohort import draw_devices
from coordinator.methods.server.assembling import load_global_mixture, make_mixture
from export import Mixture
from fedge.steps.contract import Declined
from fedge.steps.descriptions.route import Route, Routed
from fedge.steps.mixture.install_bundle import InstallBundle
from fedge.wire.messages import BlobRef, Why

if TYPE_CHECKING:
    from coordinator.methods.papers.fedcoe import FedCoE, FedCoEState

DELTA = 0.02  # of the profile prior, section 7
Profiles = dict[str, tuple[float, ...]]
"""rho (K,) by device id."""


async def request_profiles(
    state: FedCoEState, fleet: Fleet, ids: Iterable[str]
) -> tuple[Profiles, Mapping[str, Answer]]:
    """Ask devices which experts suit their samples (Eq. 12); return the profiles, and all answers.

    A device without samples has no profile.
    """
    assert state.gate_file is not None
    answers = await fleet.run("route", dict.fromkeys(ids, Route(gate=state.gate_file)))
    found = {i: a.result for i, a in answers.items() if isinstance(a.result, Routed) and a.result.n_samples}
    return {i: r.shares for i, r in found.items() if correlation.is_profile(r.shares, len(state.experts))}, answers


async def assemble_starts(method: FedCoE, state: FedCoEState, fleet: Fleet) -> tuple[Profiles, dict[str, BlobRef]]:
    """Assemble the first models of the next cohort's devices without one (Eq. 13); return their profiles, too.

    While nobody has a model, all start from the mean of the experts (section 10, point 8). So does a newcomer without a
    profile.
    """
    if not state.clients:
        return {}, {}
    cohort, _ = draw_devices(method.selection, state, fleet.get_devices(), method.settings, state.common)
    new = [i for i in cohort if i not in state.clients]
    profiles, _ = await request_profiles(state, fleet, new)
    experts = method.load_experts(state, fleet)
    starts = {i: method.assemble(experts, normalise(rho)) for i, rho in profiles.items()}
    return profiles, {i: fleet.put_model(start, state.layout) for i, start in starts.items()}


async def make_bundles(
    method: FedCoE, state: FedCoEState, fleet: Fleet, ids: Iterable[str]
) -> tuple[Profiles, dict[str, InstallBundle]]:
    """Make bundles for devices without a model of their own: by their profiles or, without one, of the global model.

    A device that was asked for a profile and did not answer, or not with a profile, has no bundle yet.
    """
    profiles: Profiles = {}
    if method.options.assemble == "global":
        without = list(ids)
    else:
        profiles, answers = await request_profiles(state, fleet, ids)
        without = [i for i, answer in answers.items() if _has_none(answer)]
    mixtures = {i: make_own_mixture(method, state, fleet, normalise(rho)) for i, rho in profiles.items()}
    orders = {i: await _write(method, state, fleet, mixture) for i, mixture in mixtures.items()}
    if without:
        orders |= dict.fromkeys(without, await _write(method, state, fleet, make_global_mixture(method, state, fleet)))
    return profiles, orders


def _has_none(answer: Answer) -> bool:
    """Return whether a device cannot have a profile: the shares are withheld or too dear, or there are no samples."""
    match answer.result:
        case Routed(n_samples=0):
            return True
        case Declined(why=Why.NOT_ALLOWED | Why.BUDGET):
            return True
    return False


def make_global_mixture(method: FedCoE, state: FedCoEState, fleet: Fleet) -> Mixture:
    """Make the global model: the gate, and for each sample its best experts (Eq. 4, E13)."""
    return load_global_mixture(
        fleet.task, method.get_global_model(state), lambda ref: fleet.get(ref, state.layout), fleet.get_tensors
    )


def make_own_mixture(method: FedCoE, state: FedCoEState, fleet: Fleet, rho: correlation.Array) -> Mixture:
    """Make a device's mixture from its profile (Eq. 13), with the profile prior (E14)."""
    experts, prior = method.load_experts(state, fleet), None
    if method.preset.profile_prior:
        typical = method.compute_routing(state, fleet).mean(axis=0)
        prior = correlation.compute_profile_prior(rho, typical, method.groups, DELTA)
    if method.options.assemble == "parameters":
        return make_mixture(fleet.task, [method.assemble(experts, rho)], [1.0], prior)
    best = sorted(np.argsort(-rho, kind="stable")[: method.TOP].tolist())
    return make_mixture(fleet.task, [experts[j] for j in best], (rho[best] / rho[best].sum()).tolist(), prior)


async def _write(method: FedCoE, state: FedCoEState, fleet: Fleet, mixture: Mixture) -> InstallBundle:
    """Write a mixture's bundle, on whose predictions for D_s torch and ONNX Runtime agree."""
    release = get_next_release(fleet)
    files = await asyncio.to_thread(
        method.server_data.make_bundle, mixture, layout=state.layout, release=release, method=method.name
    )
    return InstallBundle(files={name: fleet.put_bytes(data) for name, data in files.items()}, release=release)


def normalise(rho: tuple[float, ...]) -> correlation.Array:
    """Return the profile with the sum 1, (K,)."""
    shares = np.array(rho, np.float64)
    return np.asarray(shares / shares.sum())
