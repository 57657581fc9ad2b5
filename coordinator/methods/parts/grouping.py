"""Descriptions of devices, clusters of devices, and devices as arms of their cluster's bandit (FedEPC section 5).

Each clustering needs its own kind of description: a profile, the label feature, or the direction of one update. For
directions all devices train the same model, since updates of different models cannot be compared (scmoe_pfl.md
section 4).
"""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Final

import msgspec
import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from coordinator.aggregation import rules
from coordinator.clustering import aidc, geometry, mctc
from coordinator.clustering.aidc import Clusters
from coordinator.clustering.find import Clustering, Directions, Profiles, by_label, find_clusters
from coordinator.fleet.fleet import Answer, Fleet
from coordinator.methods.rounds import has_declined
from coordinator.selection import ccmab
from coordinator.store.records import Device
from fedge.steps.contract import Action
from fedge.steps.descriptions.describe_labels import DescribeLabels, LabelsDescribed
from fedge.steps.descriptions.profile import Profile, Profiled
from fedge.steps.sgd import Sgd
from fedge.steps.training.train import MAX_STARTS, Start, Train, Trained
from fedge.tensors.layout import Codec, Layout
from fedge.wire.messages import BlobRef, Context

log = logging.getLogger("fedge.method")

ONE_GROUP: Final = "event=one_group the extractor cannot tell the devices apart, so all form one cluster"
BELIEVED: Final = 10.0
"""Limit of a reported loss drop or gradient norm, as a multiple of the median over the devices. With a limit of 2, one
of the runs with turned cameras chose other cohorts and did not find its groups."""


class Description(Struct, frozen=True, kw_only=True):
    """A device's description of its data: profile, label feature or direction, with the number of samples described.

    `halves`: raw divergence D_raw (fedepc.md section 4.1) between the profiles of the device's even and odd samples;
    None if not reported. `label`: the label feature; in CFIC the number of the device's cluster, even if the clustering
    does not use label features. `incarnation`: the device's incarnation when it described itself. Only CFIC needs this,
    to ask restarted devices again.
    """

    n_samples: int
    incarnation: str = ""
    profile: tuple[float, ...] = ()
    halves: float | None = None
    label: int = -1
    direction: BlobRef | None = None


def explain_no_relays(how: Clustering) -> str:
    """Return why a method with this clustering cannot work with relays; an empty string if it can."""
    return "it clusters by each device's update" if how == "mctc" else ""


def select_comparable(known: Mapping[str, Description], new: Mapping[str, Description]) -> dict[str, Description]:
    """Return the descriptions by ascending device id, without profiles whose length is not the most common one.

    If two lengths are equally common, that of the known profiles wins. Descriptions without a profile stay.
    """
    descriptions = {**known, **new}
    lengths = Counter(len(p.profile) for p in descriptions.values() if p.profile)
    q = lengths.most_common(1)[0][0] if lengths else 0
    odd = {i for i, p in descriptions.items() if p.profile and len(p.profile) != q}
    for i in sorted(odd):
        log.warning(
            "event=profile_refused device=%s reason='%d units, most have %d'", i, len(descriptions[i].profile), q
        )
    return {i: descriptions[i] for i in sorted(descriptions) if i not in odd}


def compute_unit(profiled: Iterable[Description]) -> float | None:
    """Compute D_ref, the unit of divergences, from the devices' `halves`.

    Return None if no device reports halves, or if the extractor tells nothing apart.
    """
    try:
        return aidc.compute_halves_unit([p.halves for p in profiled if p.halves is not None])
    except ValueError:
        return None


def stack_profiles(profiled: Iterable[Description]) -> NDArray[np.float64]:
    """Stack the profiles of N devices, with q units each, into an array (N, q)."""
    return np.array([p.profile for p in profiled])


def place(
    stranger: str, descriptions: Mapping[str, Description], clusters: Sequence[Sequence[str]], unit: float
) -> aidc.Place:
    """Place a device with a profile among clusters of device ids, by the NOISE rule (FedEPC section 4.6, point 1)."""
    profiles = [stack_profiles(descriptions[i] for i in members) for members in clusters]
    return aidc.place(np.array(descriptions[stranger].profile), profiles, unit=unit)


def has_changed(before: Description, now: Description, unit: float) -> bool:
    """Return whether a profile has changed so much that its device must be placed again (FedEPC 4.6, point 3)."""
    return aidc.has_changed(np.array(before.profile), np.array(now.profile), unit=unit)


def is_due(before: Description | None, device: Device) -> bool:
    """Return whether a device must describe its samples, since it never did or their number has changed."""
    return device.n_samples > 0 and (before is None or before.n_samples != device.n_samples)


def mark_outdated(known: Mapping[str, Description], changed: Collection[str]) -> dict[str, Description]:
    """Return the descriptions, with those of changed devices outdated: they stay, and their devices are due."""
    return {i: msgspec.structs.replace(d, n_samples=-1) if i in changed else d for i, d in known.items()}


def make_describe_action(
    how: Clustering,
    extractor: BlobRef,
    *,
    sgd: Sgd,
    codec: Codec,
    labels: DescribeLabels = DescribeLabels(),  # noqa: B008 - frozen
    noise: float = 0.0,
) -> Action:
    """Make the action that asks a device for the description that a clustering needs.

    `extractor`: the model that makes the profiles or, with mctc, the model that all devices train for their directions.
    """
    if how == "labels":
        return labels
    if how == "mctc":
        return Train(starts=(Start(model=extractor),), sgd=sgd, codec=codec, measure=False)
    return Profile(extractor=extractor, noise=noise)


def read_descriptions(
    answers: Mapping[str, Answer], asked: Mapping[str, Device], fleet: Fleet, layout: Layout
) -> dict[str, Description]:
    """Read the devices' descriptions in their answers, and store directions as blobs.

    A device without a label feature, or whose update is zero and has no direction, gets no description.
    """
    found = {}
    for i, answer in answers.items():
        device, result = asked[i], answer.result
        described = Description(n_samples=device.n_samples)
        if isinstance(result, LabelsDescribed) and result.feature >= 0:
            found[i] = msgspec.structs.replace(described, label=result.feature)
        elif isinstance(result, Profiled):
            found[i] = msgspec.structs.replace(described, profile=result.profile, halves=result.halves)
        elif isinstance(result, Trained):
            unit = geometry.compute_direction(fleet.get(result.update, layout).params)
            if unit is not None:
                stored = fleet.put({"direction": unit.astype(np.float32)})
                found[i] = msgspec.structs.replace(described, direction=stored)
    return found


def embed_directions(described: Iterable[Description], fleet: Fleet) -> NDArray[np.float64]:
    """Embed the update directions of N >= 1 devices as vectors (N, m) that have the same cosines."""
    directions = [fleet.get_tensors(d.direction)["direction"] for d in described if d.direction is not None]
    return geometry.compute_embedding(np.stack(directions))


def cluster_devices(
    how: Clustering,
    described: Sequence[Description],
    unit: float | None,
    fleet: Fleet,
    *,
    rng: np.random.Generator,
    n_clusters: int | None = None,
) -> Clusters:
    """Divide N described devices into clusters, each device into exactly one.

    `unit`: D_ref of the profiles; None if the extractor tells no devices apart, so that all form one cluster.
    `n_clusters`: number of clusters; with mctc the largest number, by default eight.
    """
    if how == "labels":
        return by_label([d.label for d in described])
    if how == "mctc":
        if not described:
            return ()
        z = embed_directions(described, fleet)
        seen = Directions(vectors=z) if n_clusters is None else Directions(vectors=z, n_clusters=n_clusters)
        return mctc.make_partition(z, find_clusters(how, seen, rng=rng).clusters)
    if unit is None or len(described) < 2:
        if len(described) > 1:
            log.warning(ONE_GROUP)
        return aidc.number_clusters([range(len(described))])
    features = Profiles(vectors=stack_profiles(described), unit=unit)
    return find_clusters(how, features, rng=rng, n_clusters=n_clusters).clusters


def select_offered(own: Sequence[int], members: Sequence[Sequence[str]]) -> tuple[int, ...]:
    """Return the numbers of the clusters whose experts a device may choose from, ascending.

    These are the device's own clusters, or all if it has none. An order has room for `MAX_STARTS` experts. If there
    are more, those of the largest clusters are taken; of equally large clusters, the first.
    """
    largest = sorted(own or range(len(members)), key=lambda k: -len(members[k]))
    return tuple(sorted(largest[:MAX_STARTS]))


Choices = Mapping[int, tuple[ccmab.Selection, ccmab.State]]
"""By cluster, the selection for a round, and the bandit's state in that round (`coordinator.selection.ccmab`)."""


def record_choices(fleet: Fleet, choices: Choices) -> None:
    """Record for each cluster the chosen devices with contexts, all devices' times and estimates, and the deadline."""
    for k, (selection, _) in choices.items():
        fields = {"ids": selection.ids, "overdue": selection.overdue, "seconds": selection.seconds}
        fields["estimates"] = {i: (round(mean, 4), round(bonus, 4)) for i, (mean, bonus) in selection.estimates.items()}
        fields["contexts"] = {i: tuple(round(x, 4) for x in context) for i, context in selection.contexts.items()}
        deadline_s = None if selection.deadline_s == math.inf else selection.deadline_s
        fleet.record_event("chosen", {"cluster": k, **fields, "deadline_s": deadline_s})


def record_draw(fleet: Fleet, ids: Sequence[str], among: Sequence[str]) -> None:
    """Record `ids`, the devices drawn from `among`; expected times are recorded as 0 s."""
    fleet.record_event("chosen", {"ids": ids, "overdue": (), "seconds": dict.fromkeys(among, 0.0), "deadline_s": None})


def list_chosen(choices: Choices) -> list[str]:
    """Return the chosen devices of all clusters, by ascending id."""
    return sorted(i for selection, _ in choices.values() for i in selection.ids)


def update_bandits(choices: Choices, answers: Mapping[str, Answer]) -> dict[int, ccmab.State]:
    """Return each cluster's bandit, updated with the answers of the devices chosen there."""
    return {k: update_bandit(bandit, selection, answers) for k, (selection, bandit) in choices.items()}


def make_arm(device: Device, sgd: Sgd, model: BlobRef) -> ccmab.Arm:
    """Make a bandit's arm from a device's present state.

    The arm's `work` is the number of samples that one order to train `model` goes through.
    """
    context = device.context or Context(device_id=device.id)
    return ccmab.Arm(
        id=device.id,
        n_samples=device.n_samples,
        work=sgd.count_steps(device.n_samples) * min(sgd.batch_size, max(device.n_samples, 1)),
        cpu_ghz=context.cpu_ghz,
        free_ram_gb=context.free_ram_gb,
        link_mbit_s=context.link_mbit_s,
        model_bytes=model.size_bytes,
    )


def update_bandit(bandit: ccmab.State, selection: ccmab.Selection, answers: Mapping[str, Answer]) -> ccmab.State:
    """Return the bandit, updated with the outcomes of a round.

    A device that trained is rewarded with its loss drop, a device that failed with -1. A device that declined, or whose
    owner withholds losses, counts as never asked.
    """
    outcomes: dict[str, ccmab.Participation | None] = {}
    for i in selection.ids:
        if i not in answers or has_declined(answers[i]):
            continue
        trained = answers[i].result
        if not isinstance(trained, Trained):
            outcomes[i] = None
        elif trained.loss_before is not None:
            assert trained.loss_after is not None  # `Train.check` refuses only some of these three fields
            assert trained.gradient_norm is not None
            outcomes[i] = ccmab.Participation(
                gradient_norm=trained.gradient_norm,
                loss_drop=trained.loss_before - trained.loss_after,
                seconds=answers[i].seconds,
            )
    return ccmab.observe(bandit, selection, limit_outcomes(outcomes))


def limit_outcomes(outcomes: Mapping[str, ccmab.Participation | None]) -> dict[str, ccmab.Participation | None]:
    """Return the outcomes, with loss drops and gradient norms limited to ten times the median over the devices."""
    participations = {i: found for i, found in outcomes.items() if found is not None}
    shorter = rules.compute_factors([abs(o.loss_drop) for o in participations.values()], BELIEVED)
    norms = rules.bound_sizes([o.gradient_norm for o in participations.values()], BELIEVED)
    return dict(outcomes) | {
        i: msgspec.structs.replace(o, loss_drop=factor * o.loss_drop, gradient_norm=norm)
        for (i, o), factor, norm in zip(participations.items(), shorter, norms, strict=True)
    }
