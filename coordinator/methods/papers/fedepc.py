"""FedEPC: clusters of devices by ReLU sparsity, one model per cluster, a bandit that picks who trains.

Source: Tang et al., "FedEPC: An Efficient and Privacy-Enhancing Clustering Federated Learning Method for
Sensing-Computing Fusion Scenarios", CMC 85(2), 2025; specification docs/methods/fedepc.md, whose section 9 lists the
departures. Above all, a warm-up of shared rounds gives all clusters their start (point 10). Unless the coordinator uses
labelled samples of its own (extractor=server, and --server-data), the warm-up's model is the extractor of the profiles,
and D_ref comes from the devices' split halves (4.1). Unresponsive devices rest
(`coordinator.methods.parts.unresponsive`). The paper's method is warm_up=0 without the rule for overdue devices (5.5);
selection=uniform with deadline=none shows the gain of its clusters.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any, ClassVar, Final, Literal

import msgspec
import numpy as np
from msgspec import Meta, Struct
from numpy.typing import NDArray

from coordinator.aggregation import average_all
from coordinator.aggregation.protection import Answers
from coordinator.clustering import aidc, geometry
from coordinator.clustering.aidc import Place
from coordinator.clustering.find import Clustering
from coordinator.fleet.fleet import Fleet
from coordinator.methods.installation import install
from coordinator.methods.method import Method
from coordinator.methods.parts import grouping
from coordinator.methods.parts.averaging import average, average_by_cluster
from coordinator.methods.parts.cohort import make_bandit_settings
from coordinator.methods.parts.grouping import Choices, Description
from coordinator.methods.parts.server_optimizer import apply
from coordinator.methods.parts.unresponsive import AskingState, find_responsive, run_and_record
from coordinator.methods.promises import SHARED
from coordinator.methods.rounds import compute_mean_loss, finish_round, make_round_rng, select_updates
from coordinator.methods.server.extractor import require_samples, train_extractor
from coordinator.methods.settings import Option
from coordinator.selection import ccmab
from coordinator.selection.select import choose, compute_cohort_size, draw_uniform
from coordinator.store.records import Device
from fedge.errors import ConfigError, raise_as
from fedge.steps.training.train import Start, Train, Trained
from fedge.tensors.layout import Layout
from fedge.wire.messages import BlobRef

log = logging.getLogger("fedge.method")

Vectors = NDArray[np.float64]

WINDOW: Final = 5  # rounds with participants that are compared with as many before them, section 6
LEAST_GAIN: Final = 0.001  # relative, section 6
PROXIMAL_MU: Final = 0.01  # mu of the local step, (13)
GONE_AFTER: Final = 10  # rounds of absence after which a device has left (ours; 4.6 does not say when)


class Options(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The options of section 7. `participation` of the settings is the quota rho_c.

    `warm_up`: R_w, shared rounds before the clusters; by default a third of all. `clustering`: of profiles; labels: of
    label features; mctc: of updates of the common model. `n_clusters`: number of clusters with k-means and
    agglomerative, and the most with mctc. `extractor`: whether W_ext is the warm-up's model or one trained on the
    server's samples. `sigma_dp`: standard deviation of the noise on a profile (3). `deadline`: T_max, seconds.
    `budget`: device-seconds of a cluster's round (5.2), for ccmab. `stop`: whether a cluster whose loss no longer falls
    stops training (6).
    """

    warm_up: Annotated[int, Meta(ge=0)] | None = None
    clustering: Clustering = "aidc"
    n_clusters: Annotated[int, Meta(ge=1)] | None = None
    extractor: Literal["shared", "server"] = "shared"
    sigma_dp: Annotated[float, Meta(ge=0)] = 0.0
    deadline: Literal["quantile", "none"] | Annotated[float, Meta(gt=0)] = "quantile"
    budget: Annotated[float, Meta(gt=0)] | None = None
    stop: bool = False

    def __post_init__(self) -> None:
        if self.sigma_dp and self.clustering in {"labels", "mctc"}:
            raise ValueError(f"sigma_dp hides profiles, and clustering={self.clustering} asks nobody for one")
        if self.sigma_dp and self.extractor == "shared":
            raise ValueError("with sigma_dp devices do not report split halves: set extractor=server")
        if self.n_clusters is not None and self.clustering in {"aidc", "labels"}:
            raise ValueError(f"n_clusters changes nothing with clustering={self.clustering}, which finds the number")


class RoundLoss(Struct, frozen=True, kw_only=True):
    """A cluster's loss in a round: the n_i-weighted mean of loss_before over participants, and the sum of their n_i."""

    loss: float
    n_samples: int


class Cluster(Struct, frozen=True, kw_only=True):
    """A cluster C_k with model W_k. `losses`: of the last rounds in which it trained; `visited`: its last round."""

    members: tuple[str, ...]
    model: BlobRef
    bandit: ccmab.State = ccmab.State()
    losses: tuple[RoundLoss, ...] = ()
    converged: bool = False
    visited: int = 0


class FedEpcState(AskingState, frozen=True, kw_only=True):
    """The state of FedEPC between two rounds.

    `shared`: the model of the warm-up. `extractor`: W_ext, and `unit`: its D_ref, if it comes from the server data.
    `n_moved`: devices that joined, left or changed since the clusters were made. `seen`: the last round in which a
    device was present.
    """

    shared: BlobRef
    extractor: BlobRef | None = None
    unit: float | None = None
    described: dict[str, Description] = {}
    clusters: tuple[Cluster, ...] = ()
    n_moved: int = 0
    seen: dict[str, int] = {}


class FedEpc(Method[FedEpcState]):
    """FedEPC, the method of Tang et al.; after the last round every device installs its cluster's model."""

    name = "fedepc"
    HEEDS = SHARED
    Options: ClassVar[type[Struct]] = Options
    SELECTIONS = ("ccmab", "uniform", "fastest", "stratified")
    SUMS = "equal"
    REFUSED = {
        "extractor=proxy": "it is called server now",
        **dict.fromkeys(
            ("eta", "gamma", "proximal_mu", "theta_merge", "theta_split", "unit", "weighted"), "its default stands"
        ),
        **dict.fromkeys(
            ("fairness", "search"),
            "it only remade a row of fedepc.md section 8.3: benchmarks/papers/fedepc.py has it as a class",
        ),
    }

    def set_up(self) -> None:
        """Refuse options that do not combine."""
        options, settings, task, samples = self.options, self.settings, self.server.task, self.server.samples
        if options.extractor == "server":
            if task is None or samples is None:
                raise ConfigError(
                    "option of the method: extractor=server needs labelled samples on the server: name them with "
                    "--server-data (an .npz or a folder of images; in a simulation a share of the global test set)"
                )
            require_samples(task, *samples)
        if options.budget is not None and self.selection != "ccmab":
            raise ConfigError("option of the method: budget is of the bandit: leave it out, or take selection=ccmab")
        if settings.protection.masking and options.clustering == "mctc":
            raise ConfigError("clustering=mctc needs single updates, which masking hides: take another clustering")
        self._by_label = options.clustering == "labels"
        self._warm_up = settings.rounds // 3 if options.warm_up is None else min(options.warm_up, settings.rounds)
        self._sgd = msgspec.structs.replace(settings.sgd, proximal_mu=PROXIMAL_MU)
        self._bandit = self.make_bandit_settings()

    def explain_classes(self) -> str:
        """Explain the need of classes: the server's extractor has a profile for each."""
        if self.options.extractor == "server":
            return "measures profiles by the classes of the server's samples (extractor=server): take extractor=shared"
        return super().explain_classes()

    @classmethod
    def needs_server_data(cls, options: Mapping[str, Option]) -> bool:
        """Return whether the extractor is trained on the server's samples."""
        return options.get("extractor") == "server"

    def explain_no_relays(self) -> str:
        """Return why relays are impossible: clusters of updates need each update."""
        return super().explain_no_relays() or grouping.explain_no_relays(self.options.clustering)

    def count_answers(self) -> Answers:
        """Count the profile or label feature of each device (sections 3 and 4); a direction takes a training."""
        return Answers(trainings=1) if self.options.clustering == "mctc" else Answers(descriptions=1)

    def make_bandit_settings(self) -> ccmab.Settings:
        """Return the settings of the clusters' bandits; by default no deadline if all devices train."""
        common, deadline = make_bandit_settings(self.settings), self.options.deadline
        if deadline != "quantile":
            common = replace(common, deadline_s=math.inf if deadline == "none" else deadline)
        return replace(common, budget_s=self.options.budget)

    def init(self, layout: Layout, model: BlobRef) -> FedEpcState:
        """Return the state before round 1."""
        return FedEpcState(round=0, layout=layout, shared=model)

    def begin_campaign(self, state: FedEpcState, changed: Collection[str]) -> FedEpcState:
        """Return the state before the next campaign, in which every cluster trains again."""
        state = super().begin_campaign(state, changed)
        described = grouping.mark_outdated(state.described, changed)
        clusters = tuple(msgspec.structs.replace(c, losses=(), converged=False) for c in state.clusters)
        return msgspec.structs.replace(state, described=described, clusters=clusters)

    async def round(self, state: FedEpcState, fleet: Fleet) -> FedEpcState:
        """Do one round of section 1, of the warm-up or of the clusters, after describing and placing new devices."""
        r = state.round + 1
        if r <= self._warm_up:
            return await self._do_shared_round(self._record_seen(state, fleet, r), fleet, r)
        return await self._do_cluster_round(await self._update_devices(state, fleet, r), fleet, r)

    async def finish(self, state: FedEpcState, fleet: Fleet) -> FedEpcState:
        """Place new devices, too; then every device installs the model of its cluster."""
        r = state.round + 1
        state = (
            self._record_seen(state, fleet, r) if r <= self._warm_up else await self._update_devices(state, fleet, r)
        )
        return await install(self, state, fleet)

    @staticmethod
    def _record_seen(state: FedEpcState, fleet: Fleet, r: int) -> FedEpcState:
        return msgspec.structs.replace(state, seen=state.seen | dict.fromkeys((d.id for d in fleet.get_devices()), r))

    async def _update_devices(self, state: FedEpcState, fleet: Fleet, r: int) -> FedEpcState:
        """Forget devices that have left; describe and place those that came or changed (4.6)."""
        return await self._describe(self._without_gone(self._record_seen(state, fleet, r), r), fleet)

    # ------------------------------------------------------------------------------------------ section 6: warm-up

    async def _do_shared_round(self, state: FedEpcState, fleet: Fleet, r: int) -> FedEpcState:
        """Train all devices as one cluster: uniformly random selection, n_i-weighted mean."""
        present = find_responsive(state, fleet)
        size = compute_cohort_size(len(present), self.settings.participation)
        cohort = draw_uniform(list(present), size, make_round_rng(self.settings, r))
        state, answers = await run_and_record(
            state, fleet, "train", dict.fromkeys(cohort, self._make_order(state.shared))
        )
        updates = select_updates(answers)
        shared = state.shared
        if len(updates) >= self.settings.min_reports:
            shared = apply(shared, await average(self, fleet, updates, state.layout), state.layout, fleet)
        return finish_round(state, len(cohort), updates, shared=shared)

    def _make_order(self, model: BlobRef, cluster: int = -1) -> Train:
        start = Start(model=model, cluster=cluster)
        return Train(starts=(start,), sgd=self._sgd, codec=self.settings.codec, measure=cluster >= 0)

    # ------------------------------------------------------------------ sections 3 and 4: descriptions and clusters

    def _without_gone(self, state: FedEpcState, r: int) -> FedEpcState:
        """Forget devices that have left, and clusters that are then empty, with model and bandit (4.6, point 2)."""
        gone = {i for i, seen in state.seen.items() if r - seen > GONE_AFTER}
        return msgspec.structs.replace(
            state,
            seen={i: seen for i, seen in state.seen.items() if i not in gone},
            described={i: d for i, d in state.described.items() if i not in gone},
            clusters=remove_devices(state.clusters, gone),
            n_moved=state.n_moved + len(gone & state.described.keys()),
        )

    async def _describe(self, state: FedEpcState, fleet: Fleet) -> FedEpcState:
        """Have devices describe their data if they have not, or if their number of samples has changed (SPRE)."""
        state = await self._with_extractor(state, fleet)
        assert state.extractor is not None
        due = {i: d for i, d in find_responsive(state, fleet).items() if grouping.is_due(state.described.get(i), d)}
        action = grouping.make_describe_action(
            self.options.clustering,
            state.extractor,
            sgd=self._sgd,
            codec=self.settings.codec,
            noise=self.options.sigma_dp,
        )
        state, answers = await run_and_record(state, fleet, "describe", dict.fromkeys(due, action))
        return self._arrange(state, grouping.read_descriptions(answers, due, fleet, state.layout), fleet)

    async def _with_extractor(self, state: FedEpcState, fleet: Fleet) -> FedEpcState:
        """Make W_ext, once: the model of the warm-up, or a model trained on the server data with its D_ref (4.1)."""
        if state.extractor is not None:
            return state
        if self.options.extractor == "shared":
            return msgspec.structs.replace(state, extractor=state.shared)
        task, samples = self.server.task, self.server.samples
        assert task is not None
        assert samples is not None
        found = await asyncio.to_thread(train_extractor, task, *samples, seed=self.settings.seed)
        with raise_as(ConfigError, "the labelled samples of the server make no useful extractor", on=ValueError):
            unit = aidc.compute_class_unit(found.class_profiles)
        extractor = fleet.put_model(found.model, state.layout)
        return msgspec.structs.replace(state, extractor=extractor, unit=unit)

    def _arrange(self, state: FedEpcState, new: dict[str, Description], fleet: Fleet) -> FedEpcState:
        """Place new and changed devices; remake all clusters at first, and after many moves (4.6)."""
        described = grouping.select_comparable(state.described, new)
        unit = state.unit or grouping.compute_unit(described.values())  # None if nothing tells devices apart
        strangers = [i for i in new if i in described and self._is_strange(state.described.get(i), new[i], unit)]
        state = msgspec.structs.replace(
            state,
            described=described,
            clusters=remove_devices(state.clusters, {*strangers, *(state.described.keys() - described.keys())}),
            n_moved=state.n_moved + len(strangers),
        )
        if not state.clusters or aidc.needs_reclustering(state.n_moved, len(described)):
            return self._remake_clusters(state, unit, fleet)
        for stranger in strangers:
            state = msgspec.structs.replace(state, clusters=self._join_cluster(state, stranger, unit, fleet))
        return state

    def _is_strange(self, before: Description | None, now: Description, unit: float | None) -> bool:
        """Return whether a device is new, or has changed so much that it must be placed again (4.6, point 3)."""
        if before is None or self._by_label:
            return before is None or before.label != now.label
        if now.direction is not None:  # the device's data changed, so the direction may be any
            return now.direction != before.direction
        return unit is not None and grouping.has_changed(before, now, unit)

    def _remake_clusters(self, state: FedEpcState, unit: float | None, fleet: Fleet) -> FedEpcState:
        """Remake all clusters; each inherits models, and the bandit of the old one it overlaps most (4.6, point 4)."""
        ids = list(state.described)
        o, rng = self.options, np.random.default_rng(self.settings.seed)
        described = list(state.described.values())
        positions = grouping.cluster_devices(o.clustering, described, unit, fleet, rng=rng, n_clusters=o.n_clusters)
        found = [tuple(ids[i] for i in members) for members in positions]
        heirs = aidc.inherit([cluster.members for cluster in state.clusters], found)
        clusters = tuple(
            Cluster(
                members=members,
                model=inherit_model(members, state, fleet),
                bandit=ccmab.State() if heir is None else state.clusters[heir].bandit,
            )
            for members, heir in zip(found, heirs, strict=True)
        )
        return msgspec.structs.replace(state, clusters=clusters, n_moved=0)

    def _join_cluster(self, state: FedEpcState, stranger: str, unit: float | None, fleet: Fleet) -> tuple[Cluster, ...]:
        """Let the stranger join a cluster, which then trains again, or found a new cluster (4.6, point 1)."""
        spot = self._place(state, stranger, unit, fleet)
        if spot.cluster is None:
            model = state.shared if spot.nearest is None else state.clusters[spot.nearest].model
            return (*state.clusters, Cluster(members=(stranger,), model=model))
        host = state.clusters[spot.cluster]
        joined = msgspec.structs.replace(
            host, members=tuple(sorted((*host.members, stranger))), losses=(), converged=False
        )
        return tuple(joined if cluster is host else cluster for cluster in state.clusters)

    def _place(self, state: FedEpcState, stranger: str, unit: float | None, fleet: Fleet) -> Place:
        """Place a device by the NOISE rule; with labels, by equal label; with mctc, by the nearest mean."""
        mine = state.described[stranger]
        if self._by_label:
            same = [k for k, c in enumerate(state.clusters) if state.described[c.members[0]].label == mine.label]
            return Place(same[0] if same else None, None)
        if self.options.clustering == "mctc":
            ids = [i for cluster in state.clusters for i in cluster.members]
            z = grouping.embed_directions((state.described[i] for i in (*ids, stranger)), fleet)
            means = np.stack([z[[ids.index(i) for i in cluster.members]].mean(axis=0) for cluster in state.clusters])
            nearest = int(geometry.compute_cosines(z[-1:], means).argmax())
            return Place(nearest, nearest)
        if unit is None:
            return Place(0, 0)
        return grouping.place(stranger, state.described, [cluster.members for cluster in state.clusters], unit)

    # ------------------------------------------------------------- sections 5 and 6: selection, training, the mean

    async def _do_cluster_round(self, state: FedEpcState, fleet: Fleet, r: int) -> FedEpcState:
        """Let each cluster that has not converged select, train and average; clusters exchange no weights."""
        present = find_responsive(state, fleet)
        chosen = self._select(state, present, r)
        grouping.record_choices(fleet, chosen)
        orders = {i: self._make_order(state.clusters[k].model, k) for k, (s, _) in chosen.items() for i in s.ids}
        state, answers = await run_and_record(state, fleet, "train", orders)
        updates = select_updates(answers)
        members = [[i for i in selection.ids if i in updates] for selection, _ in chosen.values()]
        means = await average_by_cluster(self, fleet, updates, members, state.layout, alike=True)  # (15)
        clusters = list(state.clusters)
        for (k, (selection, bandit)), mean in zip(chosen.items(), means, strict=True):
            own = [updates[i] for i in selection.ids if i in updates]
            cluster = msgspec.structs.replace(
                clusters[k],
                bandit=grouping.update_bandit(bandit, selection, answers),
                visited=r if selection.ids else clusters[k].visited,
            )
            if mean is not None and len(own) >= min(self.settings.min_reports, len(selection.ids)):
                model = apply(cluster.model, mean, state.layout, fleet)
                losses = (*cluster.losses, *compute_round_loss(own))[-2 * WINDOW :]
                converged = self.options.stop and has_converged(losses)
                cluster = msgspec.structs.replace(cluster, model=model, losses=losses, converged=converged)
            clusters[k] = cluster
        return finish_round(state, len(orders), updates, clusters=tuple(clusters))

    def _select(self, state: FedEpcState, present: Mapping[str, Device], r: int) -> Choices:
        """Select devices in each open cluster, by number (section 5); every cluster has its own random numbers."""
        arms = {
            k: [grouping.make_arm(present[i], self._sgd, cluster.model) for i in cluster.members if i in present]
            for k, cluster in enumerate(state.clusters)
            if not cluster.converged
        }
        assert self.selection is not None
        return choose(
            self.selection,
            arms,
            dict(enumerate(cluster.bandit for cluster in state.clusters)),
            self._bandit,
            seed=(self.settings.seed, r),
            last_visit=dict(enumerate(cluster.visited for cluster in state.clusters)),
        )

    # --------------------------------------------------------------------------------------------------- what it serves

    def get_model(self, state: FedEpcState, device_id: str) -> BlobRef:
        """Return the model of the device's cluster; the warm-up's for a stranger, or before there are clusters."""
        return next((c.model for c in state.clusters if device_id in c.members), state.shared)

    def summarise(self, state: FedEpcState) -> dict[str, Any]:
        """Return the history, clusters, which of them have converged, selection counts, and bundles."""
        return super().summarise(state) | {
            "split": len(state.clusters) > 1,
            "clusters": {str(k): list(cluster.members) for k, cluster in enumerate(state.clusters)},
            "converged": [k for k, cluster in enumerate(state.clusters) if cluster.converged],
        }


def remove_devices(clusters: Iterable[Cluster], ids: Collection[str]) -> tuple[Cluster, ...]:
    """Return the clusters without some devices; empty clusters are deleted."""
    left = (
        msgspec.structs.replace(c, members=tuple(i for i in c.members if i not in ids)) if ids else c for c in clusters
    )
    return tuple(c for c in left if c.members)


def inherit_model(members: Sequence[str], state: FedEpcState, fleet: Fleet) -> BlobRef:
    """Average the models of the members' last clusters, one term per member; without any, the shared (4.6, point 4)."""
    terms = Counter(cluster.model for cluster in state.clusters for i in members if i in cluster.members)
    if not terms:
        return state.shared
    models = (fleet.get(model, state.layout) for model in terms)
    return fleet.put_model(average_all(models, list(terms.values()), state.layout).to_model(), state.layout)


def compute_round_loss(updates: Sequence[Trained]) -> tuple[RoundLoss, ...]:
    """Compute the n_i-weighted mean of loss_before over devices that report it; empty if none does."""
    measured = [u for u in updates if u.loss_before is not None]
    loss = compute_mean_loss(measured)
    return () if loss is None else (RoundLoss(loss=loss, n_samples=sum(u.n_samples for u in measured)),)


def has_converged(losses: Sequence[RoundLoss]) -> bool:
    """Return whether the mean loss of the last 5 rounds is less than 0.1 % below that of the 5 before (section 6).

    `losses`: of rounds with participants, oldest first; False for fewer than 10.
    """
    if len(losses) < 2 * WINDOW:
        return False
    before, after = (
        sum(x.n_samples * x.loss for x in part) / sum(x.n_samples for x in part)
        for part in (losses[-2 * WINDOW : -WINDOW], losses[-WINDOW:])
    )
    return before <= 0 or (before - after) / before < LEAST_GAIN
