"""Descriptions of devices, clusters of them, and devices as arms of their group's bandit (FedEPC section 5).

Each clustering has its own description: a profile, the label feature, or the direction of one update of a common model
(scmoe_pfl.md section 4: updates of different models cannot be compared).
"""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Final, Protocol, TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from coordinator.aggregation import rules
from coordinator.clustering import Clustering, Directions, Profiles, aidc, find_clusters, mctc
from coordinator.clustering.aidc import Clusters
from coordinator.fleet import Answer, Device, Fleet
from coordinator.methods import accepted, declined, results
from coordinator.selection import ccmab
from fedge.messages import BlobRef, Codec, Context
from fedge.sgd import Sgd
from fedge.step import Action
from fedge.steps.describe_labels import DescribeLabels
from fedge.steps.profile import Profile, Profiled
from fedge.steps.train import MAX_STARTS, Start, Train, Trained
from fedge.tensors import Layout

log = logging.getLogger("fedge.method")

ONE_GROUP: Final = "event=one_group the extractor tells no devices apart, so all form one group"
BELIEVED: Final = 10.0
"""Times the median: with 2, one of the runs with turned cameras chose other cohorts and missed its groups."""


class _HasProfile(Protocol):
    """`halves`: D_raw between the profiles of the device's even and odd samples, if it tells."""

    @property
    def profile(self) -> Sequence[float]: ...

    @property
    def halves(self) -> float | None: ...


P = TypeVar("P", bound=_HasProfile)


def of_one_length(known: Mapping[str, P], new: Mapping[str, P]) -> dict[str, P]:
    """Comparable profiles, by ascending id: those of the most common length, on a tie that of known ones.

    Empty profiles (of devices with another description) stay.
    """
    told = {**known, **new}
    lengths = Counter(len(p.profile) for p in told.values() if p.profile)
    q = lengths.most_common(1)[0][0] if lengths else 0
    odd = {i for i, p in told.items() if p.profile and len(p.profile) != q}
    for i in sorted(odd):
        log.warning("event=profile_refused device=%s reason='%d units, most have %d'", i, len(told[i].profile), q)
    return {i: told[i] for i in sorted(told) if i not in odd}


def newly_profiled(answers: Mapping[str, Answer], asked: Mapping[str, Device]) -> dict[str, Profiled]:
    """The new profiles; `n_samples`: those that a device had when it was asked."""
    return {
        i: msgspec.structs.replace(profiled, n_samples=asked[i].n_samples)
        for i, profiled in results(answers, Profiled).items()
    }


def of_profiles(how: Clustering, profiled: Sequence[Profiled], *, rng: np.random.Generator) -> Clusters:
    """Clusters of N >= 1 profiles, with D_ref from split halves; one if the extractor tells no devices apart."""
    unit = unit_of(profiled)
    if unit is None:
        log.warning(ONE_GROUP)
        return (tuple(range(len(profiled))),)
    return find_clusters(how, Profiles(vectors=vectors_of(profiled), unit=unit), rng=rng).clusters


def unit_of(profiled: Iterable[_HasProfile]) -> float | None:
    """D_ref from the devices' split halves; None if the extractor tells no devices apart."""
    try:
        return aidc.split_half_unit([p.halves for p in profiled if p.halves is not None])
    except ValueError:
        return None


def vectors_of(profiled: Iterable[_HasProfile]) -> NDArray[np.float64]:
    """Profiles as an array (N, q)."""
    return np.array([p.profile for p in profiled])


def place(stranger: str, told: Mapping[str, _HasProfile], clusters: Sequence[Sequence[str]], unit: float) -> aidc.Place:
    """The place of a profiled device among clusters of ids, by the NOISE rule (FedEPC section 4.6, point 1)."""
    profiles = [vectors_of(told[i] for i in members) for members in clusters]
    return aidc.place(np.array(told[stranger].profile), profiles, unit=unit)


def has_changed(before: _HasProfile, now: _HasProfile, unit: float) -> bool:
    """Whether a device must be placed again (FedEPC section 4.6, point 3)."""
    return aidc.has_changed(np.array(before.profile), np.array(now.profile), unit=unit)


def describing(
    how: Clustering,
    extractor: BlobRef,
    *,
    sgd: Sgd,
    codec: Codec,
    labels: DescribeLabels = DescribeLabels(),  # noqa: B008 - frozen
    noise: float = 0.0,
) -> Action:
    """The action by which a device describes itself for a clustering. `extractor`: the common model."""
    if how == "labels":
        return labels
    if how == "mctc":
        return Train(starts=(Start(model=extractor),), sgd=sgd, codec=codec, measure=False)
    return Profile(extractor=extractor, noise=noise)


def told_directions(answers: Mapping[str, Answer], fleet: Fleet, layout: Layout) -> dict[str, BlobRef]:
    """The directions of new updates, each stored by itself; an update of zero has none."""
    found = {i: mctc.direction(fleet.get(u.update, layout).params) for i, u in accepted(answers).items()}
    return {i: fleet.put({"direction": d.astype(np.float32)}) for i, d in found.items() if d is not None}


def embedded(directions: Sequence[BlobRef], fleet: Fleet) -> NDArray[np.float64]:
    """N >= 1 directions, (N, m), with the cosines of the updates."""
    return mctc.embedding(np.stack([fleet.get_tensors(ref)["direction"] for ref in directions]))


def of_directions(directions: Sequence[BlobRef], fleet: Fleet, *, n_clusters: int | None = None) -> Clusters:
    """MCTC of N >= 1 directions, each device in one cluster; at most `n_clusters`, by default eight."""
    z = embedded(directions, fleet)
    seen = Directions(vectors=z) if n_clusters is None else Directions(vectors=z, n_clusters=n_clusters)
    return mctc.parted(z, find_clusters("mctc", seen, rng=np.random.default_rng(0)).clusters)


def offered(own: Sequence[int], members: Sequence[Sequence[str]]) -> tuple[int, ...]:
    """Numbers of the clusters whose experts a device may choose from, ascending: its own, or all if it has none.

    An order holds at most `MAX_STARTS`: the largest clusters, on a tie the first.
    """
    largest = sorted(own or range(len(members)), key=lambda k: -len(members[k]))
    return tuple(sorted(largest[:MAX_STARTS]))


Choices = Mapping[int, tuple[ccmab.Selection, ccmab.State]]
"""By cluster: a round's selection, and the bandit that holds this round (`coordinator.selection`)."""


def tell_choices(fleet: Fleet, choices: Choices) -> None:
    """Record for each cluster the chosen devices, expected times and estimates of all, and the deadline."""
    for k, (selection, _) in choices.items():
        told = {"ids": selection.ids, "overdue": selection.overdue, "seconds": selection.seconds}
        told["estimates"] = {i: (round(mean, 4), round(bonus, 4)) for i, (mean, bonus) in selection.estimates.items()}
        fleet.note("chosen", {"cluster": k, **told, "deadline_s": _or_none(selection.deadline_s)})


def tell_draw(fleet: Fleet, ids: Sequence[str], among: Sequence[str]) -> None:
    """Record the chosen devices of a draw without expected times."""
    fleet.note("chosen", {"ids": ids, "overdue": (), "seconds": dict.fromkeys(among, 0.0), "deadline_s": None})


def _or_none(seconds: float | None) -> float | None:
    return None if seconds is None or math.isinf(seconds) else seconds


def chosen(choices: Choices) -> list[str]:
    """All chosen devices, by ascending id."""
    return sorted(i for selection, _ in choices.values() for i in selection.ids)


def bandits_after(choices: Choices, answers: Mapping[str, Answer]) -> dict[int, ccmab.State]:
    """By cluster: the bandit after the answers of its chosen devices."""
    return {k: observed(bandit, selection, answers) for k, (selection, bandit) in choices.items()}


def arm(device: Device, sgd: Sgd, model: BlobRef) -> ccmab.Arm:
    """A device in its present state; its work is that of one order to train `model`."""
    context = device.context or Context(device_id=device.id)
    return ccmab.Arm(
        id=device.id,
        n_samples=device.n_samples,
        work=sgd.steps_for(device.n_samples) * min(sgd.batch_size, max(device.n_samples, 1)),
        cpu_ghz=context.cpu_ghz,
        free_ram_gb=context.free_ram_gb,
        link_mbit_s=context.link_mbit_s,
        model_bytes=model.size_bytes,
    )


def observed(bandit: ccmab.State, selection: ccmab.Selection, answers: Mapping[str, Answer]) -> ccmab.State:
    """The bandit after a round: the loss drop of each device that trained, -1 for no answer.

    A device that declined, or whose owner withholds losses, counts as never asked.
    """
    outcomes: dict[str, ccmab.Participation | None] = {}
    for i in selection.ids:
        if i not in answers or declined(answers[i]):
            continue
        trained = answers[i].result
        if not isinstance(trained, Trained):
            outcomes[i] = None
        elif trained.loss_before is not None:
            assert trained.loss_after is not None  # `Train.check` refuses an answer with only one of them
            assert trained.gradient_norm is not None
            outcomes[i] = ccmab.Participation(
                gradient_norm=trained.gradient_norm,
                loss_drop=trained.loss_before - trained.loss_after,
                seconds=answers[i].seconds,
            )
    return ccmab.observe(bandit, selection, believed(outcomes))


def believed(outcomes: Mapping[str, ccmab.Participation | None]) -> dict[str, ccmab.Participation | None]:
    """The outcomes, with loss drops and gradient norms limited to ten times the median."""
    told = {i: found for i, found in outcomes.items() if found is not None}
    shorter = rules.factors([abs(o.loss_drop) for o in told.values()], BELIEVED)
    norms = rules.bounded([o.gradient_norm for o in told.values()], BELIEVED)
    return dict(outcomes) | {
        i: msgspec.structs.replace(o, loss_drop=factor * o.loss_drop, gradient_norm=norm)
        for (i, o), factor, norm in zip(told.items(), shorter, norms, strict=True)
    }
