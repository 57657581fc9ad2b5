"""Descriptions of devices, clusters of them, and devices as arms of their group's bandit (FedEPC section 5).

Each clustering has its own description: a profile, the label feature, or the direction of one update of a common model.
Updates of different models cannot be compared (scmoe_pfl.md section 4).
"""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
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

ONE_GROUP: Final = "event=one_group the extractor tells no devices apart, so all form one group"
BELIEVED: Final = 10.0
"""Limit of a device's reported figures, in medians. With 2, one of the runs with turned cameras chose other cohorts and
missed its groups."""


class Description(Struct, frozen=True, kw_only=True):
    """A device's description of its data, a profile, label feature or direction, and its number of samples then.

    `halves`: D_raw between the profiles of the device's even and odd samples, if it reports that. `label`: in CFIC the
    number of the device's cluster, whatever the clusters are made of. `incarnation`: the device's incarnation then, for
    CFIC alone, which asks restarted devices again.
    """

    n_samples: int
    incarnation: str = ""
    profile: tuple[float, ...] = ()
    halves: float | None = None
    label: int = -1
    direction: BlobRef | None = None


def explain_refusal_of_relays(how: Clustering) -> str:
    """Return why a method cannot cluster devices behind relays; empty if it can."""
    return "it clusters by each device's update" if how == "mctc" else ""


def select_comparable(known: Mapping[str, Description], new: Mapping[str, Description]) -> dict[str, Description]:
    """Select the profiles of the most common length, on a tie the length of known ones, by ascending id.

    Empty profiles (of devices with another description) stay.
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
    """Compute D_ref from the devices' split halves; None if the extractor tells no devices apart."""
    try:
        return aidc.compute_halves_unit([p.halves for p in profiled if p.halves is not None])
    except ValueError:
        return None


def stack_profiles(profiled: Iterable[Description]) -> NDArray[np.float64]:
    """Stack profiles to an array (N, q)."""
    return np.array([p.profile for p in profiled])


def place(
    stranger: str, descriptions: Mapping[str, Description], clusters: Sequence[Sequence[str]], unit: float
) -> aidc.Place:
    """Place a profiled device among clusters of ids, by the NOISE rule (FedEPC section 4.6, point 1)."""
    profiles = [stack_profiles(descriptions[i] for i in members) for members in clusters]
    return aidc.place(np.array(descriptions[stranger].profile), profiles, unit=unit)


def has_changed(before: Description, now: Description, unit: float) -> bool:
    """Return whether a device must be placed again (FedEPC section 4.6, point 3)."""
    return aidc.has_changed(np.array(before.profile), np.array(now.profile), unit=unit)


def is_due(before: Description | None, device: Device) -> bool:
    """Return whether a device with data must describe them, because it never did or their number has changed."""
    return device.n_samples > 0 and (before is None or before.n_samples != device.n_samples)


def make_describe_action(
    how: Clustering,
    extractor: BlobRef,
    *,
    sgd: Sgd,
    codec: Codec,
    labels: DescribeLabels = DescribeLabels(),  # noqa: B008 - frozen
    noise: float = 0.0,
) -> Action:
    """Make the action by which a device describes itself for a clustering. `extractor`: the common model."""
    if how == "labels":
        return labels
    if how == "mctc":
        return Train(starts=(Start(model=extractor),), sgd=sgd, codec=codec, measure=False)
    return Profile(extractor=extractor, noise=noise)


def read_descriptions(
    answers: Mapping[str, Answer], asked: Mapping[str, Device], fleet: Fleet, layout: Layout
) -> dict[str, Description]:
    """Read the descriptions in answers. Directions are stored as files; an update of zero has no direction."""
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
    """Embed the directions of N >= 1 devices, (N, m), with the cosines of the updates."""
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
    """Cluster N described devices, each into one cluster. With mctc, `n_clusters` is the most, by default eight.

    `unit`: D_ref of profiles; None if the extractor tells no devices apart, so that all are one cluster.
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
    """Return the numbers of the clusters from whose experts a device may choose, its own or else all, ascending.

    An order holds at most `MAX_STARTS` of them, those of the largest clusters, the first on a tie.
    """
    largest = sorted(own or range(len(members)), key=lambda k: -len(members[k]))
    return tuple(sorted(largest[:MAX_STARTS]))


Choices = Mapping[int, tuple[ccmab.Selection, ccmab.State]]
"""A round's selections by cluster, each with the bandit that holds this round (`coordinator.selection`)."""


def record_choices(fleet: Fleet, choices: Choices) -> None:
    """Record for each cluster the chosen devices, expected times and estimates of all, and the deadline."""
    for k, (selection, _) in choices.items():
        fields = {"ids": selection.ids, "overdue": selection.overdue, "seconds": selection.seconds}
        fields["estimates"] = {i: (round(mean, 4), round(bonus, 4)) for i, (mean, bonus) in selection.estimates.items()}
        deadline_s = None if selection.deadline_s == math.inf else selection.deadline_s
        fleet.record_event("chosen", {"cluster": k, **fields, "deadline_s": deadline_s})


def record_draw(fleet: Fleet, ids: Sequence[str], among: Sequence[str]) -> None:
    """Record the chosen devices of a draw without expected times."""
    fleet.record_event("chosen", {"ids": ids, "overdue": (), "seconds": dict.fromkeys(among, 0.0), "deadline_s": None})


def list_chosen(choices: Choices) -> list[str]:
    """Return all chosen devices, by ascending id."""
    return sorted(i for selection, _ in choices.values() for i in selection.ids)


def update_bandits(choices: Choices, answers: Mapping[str, Answer]) -> dict[int, ccmab.State]:
    """Return by cluster the bandit after the answers of its chosen devices."""
    return {k: update_bandit(bandit, selection, answers) for k, (selection, bandit) in choices.items()}


def make_arm(device: Device, sgd: Sgd, model: BlobRef) -> ccmab.Arm:
    """Make the bandit's arm of a device in its present state. The arm's work is that of one order to train `model`."""
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
    """Return the bandit after a round: the loss drop of each device that trained, -1 for no answer.

    A device that declined, or whose owner withholds losses, counts as never asked.
    """
    outcomes: dict[str, ccmab.Participation | None] = {}
    for i in selection.ids:
        if i not in answers or has_declined(answers[i]):
            continue
        trained = answers[i].result
        if not isinstance(trained, Trained):
            outcomes[i] = None
        elif trained.loss_before is not None:
            assert trained.loss_after is not None  # `Train.check` refuses an answer with only some of them
            assert trained.gradient_norm is not None
            outcomes[i] = ccmab.Participation(
                gradient_norm=trained.gradient_norm,
                loss_drop=trained.loss_before - trained.loss_after,
                seconds=answers[i].seconds,
            )
    return ccmab.observe(bandit, selection, limit_outcomes(outcomes))


def limit_outcomes(outcomes: Mapping[str, ccmab.Participation | None]) -> dict[str, ccmab.Participation | None]:
    """Return the outcomes, with loss drops and gradient norms limited to ten times the median."""
    participations = {i: found for i, found in outcomes.items() if found is not None}
    shorter = rules.compute_factors([abs(o.loss_drop) for o in participations.values()], BELIEVED)
    norms = rules.bound_sizes([o.gradient_norm for o in participations.values()], BELIEVED)
    return dict(outcomes) | {
        i: msgspec.structs.replace(o, loss_drop=factor * o.loss_drop, gradient_norm=norm)
        for (i, o), factor, norm in zip(participations.items(), shorter, norms, strict=True)
    }
