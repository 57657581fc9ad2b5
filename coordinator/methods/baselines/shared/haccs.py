"""HACCS: devices of alike label shares stand for each other, so each round takes the fastest ones of drawn clusters.

Source: Wolfrath et al., "HACCS: Heterogeneity-Aware Clustered Client Selection for Accelerated Federated Learning",
IPDPS 2022, Algorithm 1 with the summary P(y), and the authors' code (github.com/NS-PhD-Research/HACCS); baselines.md
section 26. The server clusters the devices' label shares by density. In each round it draws clusters with replacement,
with weights

    tau_i = 1 - latency_i / max latency                                                 paper Eq. (6)
    theta_i = rho tau_i + (1 - rho) ACL_i / sum_j ACL_j                                 paper Eq. (7)

where latency_i and ACL_i are means over cluster i, and takes the fastest device left in each drawn cluster. The rest is
FedAvg. Where the code differs from the paper, section 26 says which of them we follow.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Final

import msgspec
import numpy as np
from msgspec import Meta, Struct
from numpy.typing import NDArray

from coordinator.aggregation.protection import Answers
from coordinator.aggregation.rules import bound_sizes
from coordinator.clustering.aidc import number_clusters
from coordinator.methods.method import Method
from coordinator.methods.parts import grouping
from coordinator.methods.parts.averaging import average
from coordinator.methods.parts.grouping import Description
from coordinator.methods.parts.server_optimizer import apply
from coordinator.methods.parts.unresponsive import AskingState, find_responsive, run_and_record
from coordinator.methods.promises import SHARED
from coordinator.methods.rounds import finish_round, make_round_rng, select_results, select_updates
from coordinator.selection import ccmab
from coordinator.selection.select import compute_cohort_size
from fedge.steps.descriptions.label_shares import LabelShares, LabelSharesMeasured
from fedge.steps.training.train import Start, Train
from fedge.tensors.layout import Layout
from fedge.wire.messages import BlobRef

if TYPE_CHECKING:
    from coordinator.fleet.fleet import Fleet

Vector = NDArray[np.float64]
RADIUS: Final = 0.25  # Euclidean distance of label shares, as in the authors' code
MIN_SAMPLES: Final = 2  # a cluster is two devices at least
NO_DEADLINE: Final = ccmab.Settings(deadline_s=math.inf, fairness=False)


class Options(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The options of HACCS. `rho`: how much a cluster's speed counts beside its loss, as in Eq. (7)."""

    rho: Annotated[float, Meta(ge=0, le=1)] = 0.5


class HaccsState(AskingState, frozen=True, kw_only=True):
    """The state of HACCS. `model`: the global model; `times`: of the devices' rounds, as a bandit keeps them.

    `described`: label shares, as profiles; `clusters`: ids of alike devices; `losses`: the last of each device.
    """

    model: BlobRef
    described: dict[str, Description] = {}
    clusters: tuple[tuple[str, ...], ...] = ()
    losses: dict[str, float] = {}
    times: ccmab.State = ccmab.State()


class Haccs(Method[HaccsState]):
    """HACCS, Algorithm 1; after the last round every device installs the global model."""

    name = "haccs"
    HEEDS = SHARED
    State = HaccsState
    Options: ClassVar[type[Struct]] = Options
    SUMS = "samples"
    CLASSES = "clusters devices by the shares of their classes"
    REFUSED = {
        "clustering": "it clusters devices by the shares of their classes",
        "selection": "it takes the fastest devices of clusters that it draws",
    }

    def count_answers(self) -> Answers:
        """Count the label shares of each device."""
        return Answers(descriptions=1)

    def begin_campaign(self, state: HaccsState, changed: Collection[str]) -> HaccsState:
        """Return the state before the next campaign, in which changed devices describe themselves again."""
        state = super().begin_campaign(state, changed)
        return msgspec.structs.replace(state, described=grouping.mark_outdated(state.described, changed))

    def add_classes(self, state: HaccsState, layout: Layout, grow: Callable[[BlobRef], BlobRef]) -> HaccsState:
        """Return the state for a network with further outputs; all devices describe themselves again."""
        return msgspec.structs.replace(
            state, layout=layout, model=grow(state.model), described={}, clusters=(), descents={}
        )

    async def round(self, state: HaccsState, fleet: Fleet) -> HaccsState:
        """Do one round of Algorithm 1."""
        state = await self._describe(state, fleet)
        devices = find_responsive(state, fleet)
        size = compute_cohort_size(len(devices), self.settings.participation)
        rng = make_round_rng(self.settings, state.round + 1)

        def choose(ids: Sequence[str], n: int, seconds: Mapping[str, float]) -> list[str]:
            return choose_fastest(group(state.clusters, ids), state.losses, seconds, n, rho=self.options.rho, rng=rng)

        arms = [grouping.make_arm(device, self.settings.sgd, state.model) for device in devices.values()]
        choices = {0: ccmab.select(state.times, arms, NO_DEADLINE, size=size, rule=choose)}
        grouping.record_choices(fleet, choices)
        order = Train(starts=(Start(model=state.model),), sgd=self.settings.sgd, codec=self.settings.codec)
        cohort = choices[0][0].ids
        state, answers = await run_and_record(state, fleet, "train", dict.fromkeys(cohort, order))
        updates, model = select_updates(answers), state.model
        if len(updates) >= self.settings.min_reports:
            model = apply(model, await average(self, fleet, updates, state.layout), state.layout, fleet)
        losses = {i: u.loss_before for i, u in updates.items() if u.loss_before is not None}
        times = grouping.update_bandits(choices, answers)[0]
        return finish_round(state, len(cohort), updates, model=model, losses=state.losses | losses, times=times)

    async def _describe(self, state: HaccsState, fleet: Fleet) -> HaccsState:
        """Have devices whose label shares are missing or outdated describe themselves, and cluster all anew."""
        due = {i: d for i, d in find_responsive(state, fleet).items() if grouping.is_due(state.described.get(i), d)}
        state, answers = await run_and_record(state, fleet, "describe", dict.fromkeys(due, LabelShares()))
        told = select_results(answers, LabelSharesMeasured)
        if not told:
            return state
        new = {i: Description(n_samples=due[i].n_samples, profile=t.shares) for i, t in told.items()}
        described = dict(sorted((state.described | new).items()))
        ids, found = list(described), find_alike(np.array([d.profile for d in described.values()]))
        clusters = tuple(tuple(ids[position] for position in members) for members in found)
        return msgspec.structs.replace(state, described=described, clusters=clusters)

    def summarise(self, state: HaccsState) -> dict[str, Any]:
        """Return the figures of every method, with the clusters."""
        return super().summarise(state) | {"clusters": {str(k): list(ids) for k, ids in enumerate(state.clusters)}}


def find_alike(shares: Vector) -> tuple[tuple[int, ...], ...]:
    """Cluster label shares (N, C) by density (DBSCAN); a device that is noise is a cluster by itself.

    Cost: O(N^2) memory if all are alike.

    Example:
        >>> find_alike(np.array([[1, 0, 0], [0, 1, 0], [0.9, 0.1, 0], [0.8, 0.2, 0], [0, 0, 1.0]]))
        ((0, 2, 3), (1,), (4,))
    """
    from sklearn.cluster import dbscan

    _, labels = dbscan(shares, eps=RADIUS, min_samples=MIN_SAMPLES)
    alone = [[position] for position in np.flatnonzero(labels < 0).tolist()]
    return number_clusters([*alone, *(np.flatnonzero(labels == k).tolist() for k in range(labels.max() + 1))])


def group(clusters: Sequence[Sequence[str]], ids: Collection[str]) -> list[list[str]]:
    """Return the clusters with those of `ids` that they have; an undescribed device is a cluster by itself."""
    present = [[i for i in members if i in ids] for members in clusters]
    known = {i for members in clusters for i in members}
    return [members for members in (*present, *([i] for i in ids if i not in known)) if members]


def choose_fastest(
    clusters: Sequence[Sequence[str]],
    losses: Mapping[str, float],
    seconds: Mapping[str, float],
    n: int,
    *,
    rho: float,
    rng: np.random.Generator,
) -> list[str]:
    """Draw clusters n times with replacement, and take the fastest device left in each (Algorithm 1).

    Args:
        clusters: ids of the devices that can be asked, each in one cluster; none is empty.
        losses: of the devices whose losses are known; one counts as ten times the median at most.
        seconds: expected time of each device, with the transfer; at least 0.
        n: how many to choose; if there are fewer devices, all are chosen.
        rho: of Eq. (7).
        rng: draws the clusters.

    Returns:
        Ids, in the order of the clusters; the lowest id on a tie.
    """
    believed = dict(zip(losses, bound_sizes(list(losses.values()), grouping.BELIEVED), strict=True))
    own = [[believed[i] for i in members if i in believed] for members in clusters]
    weights = compute_weights(
        np.array([np.mean(found) if found else np.nan for found in own]),
        np.array([np.mean([seconds[i] for i in members]) for members in clusters]),
        rho=rho,
    )
    left = np.array([len(members) for members in clusters])
    taken = np.zeros(len(clusters), np.int64)
    for _ in range(min(n, int(left.sum()))):
        theta = np.where(taken < left, weights, 0.0)
        theta = theta if theta.any() else (taken < left) * 1.0
        taken[rng.choice(len(clusters), p=theta / theta.sum())] += 1
    order = [sorted(members, key=lambda i: (seconds[i], i)) for members in clusters]
    return [i for members, count in zip(order, taken.tolist(), strict=True) for i in members[:count]]


def compute_weights(losses: Vector, seconds: Vector, *, rho: float) -> Vector:
    """Compute theta_i of k clusters, Eqs. (6) and (7).

    Args:
        losses: ACL_i, (k,), at least 0; NaN for a cluster of which no loss is known, which has the largest known one.
        seconds: mean expected time of each cluster, (k,), at least 0.
        rho: within [0, 1].

    Example:
        >>> compute_weights(np.array([3.0, 1.0]), np.array([2.0, 8.0]), rho=0.5).tolist()
        [0.75, 0.125]
        >>> compute_weights(np.array([np.nan, 2.0]), np.array([0.0, 0.0]), rho=0.5).tolist()
        [0.25, 0.25]
    """
    known = losses[np.isfinite(losses)]
    full = np.where(np.isfinite(losses), losses, known.max(initial=0.0))
    full = full if full.any() else np.ones(len(full))
    slowest = seconds.max(initial=0.0)
    tau = 1 - seconds / slowest if slowest > 0 else np.zeros(len(seconds))
    return np.asarray(rho * tau + (1 - rho) * full / full.sum())
