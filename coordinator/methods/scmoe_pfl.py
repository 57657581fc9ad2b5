"""SCMoE-PFL: overlapping clusters of update directions, an expert each, private model and energy-aware gate.

Source: Li et al., "SCMoE-PFL: A soft-clustering mixture-of-experts framework for personalized federated learning",
Information Fusion, 2026; specification docs/methods/scmoe_pfl.md. Departures (preset
`default`): updates measured from the initial model, clusters frozen after three rounds, private model on all training
samples from the best expert, gate on validation samples.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Final, Literal

import msgspec
import numpy as np
from msgspec import Meta, Struct
from numpy.typing import NDArray

from coordinator.aggregation import cluster_averages
from coordinator.clustering import Directions, Features, Labels, find_clusters, mctc
from coordinator.fleet import Fleet
from coordinator.methods import (
    NO_DATA,
    Idle,
    Method,
    MethodSettings,
    Server,
    accepted,
    counted,
    insist,
    results,
    round_rng,
    sizes,
    summarise,
)
from coordinator.methods.cohort import Choice, ChoosingState, drawn, learned
from coordinator.methods.grouping import offered
from fedge.messages import BlobRef
from fedge.steps.describe_labels import DescribeLabels, LabelsDescribed
from fedge.steps.fit_mixture import Alone, FitMixture, GateData
from fedge.steps.install import Installed
from fedge.steps.train import MAX_STARTS, Start, Train, Trained
from fedge.tensors import Layout, Model, Tensors, unflatten

log = logging.getLogger("fedge.method")

STALE = 5  # rounds after which a stored direction says nothing any more, section 9
PATIENCE = 10  # rounds without progress, section 8
PROGRESS = 1e-3  # of the mean validation accuracy, section 8


PRESETS: Final[dict[str, dict[str, object]]] = {
    "default": {
        "n_clusters": 8,
        "tau": "otsu",
        "distinct": True,
        "centres_join": True,
        "update": "sequential",
        "reference": "initial",
        "freeze_after": 3,
        "private_data": "all",
        "private_start": "best",
        "private_steps": 40,
        "gate": "validation",
        "energy_offset": "untrained",
    },
    "paper": {
        "n_clusters": 4,
        "tau": 0.2,
        "distinct": False,
        "centres_join": False,
        "update": "sequential",
        "reference": "round",
        "freeze_after": 0,
        "private_data": "sensitive",
        "private_start": "initial",
        "private_steps": 300,
        "gate": "training",
        "energy_offset": "never",
    },
}


class Options(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Section 12; None: what the preset says. `freeze_after` 0: cluster in every round.

    Ablations (section 14): `clustering` k-means or agglomerative: without MCTC, as many clusters, each device in one,
    or `n_clusters`, which of MCTC is the most there may be;
    labels: devices of equal label feature (CFIC section 3), in one cluster each; `selection`: who trains in a round;
    `alone`: without gate and private model, the experts averaged, or the best on validation samples; or without gate
    and experts, the private model, where a device has one;
    `gate`: the samples it learns from; untrained: equal priors, energies alone decide; uniform: the mean of all
    outputs; `energy` false: without energy; `energy_offset` always: with offsets; `top` 1 or 64: top-1, top-all;
    n_clusters=1 with energy=false: PFMoE-style.
    `n_components`, `component_energy`, `centred`: of the embedding (section 5: m, rho, centring); `theta`: largest mean
    cosine of valid clusters (7); `temperature`: T of the energies (11.2); `space`: what is mixed (11.3).
    """

    REFUSED: ClassVar[dict[str, str]] = {
        "clustering=aidc": "profiles are taken with a model that all have trained, and from the second round on there "
        "is none; fedge:clustering=aidc:split=always gives every group of profiles an expert and each device a mixture",
        "selection=stratified": "clusters overlap, so a device would be drawn for several; "
        "fedepc:clustering=mctc:selection=stratified draws from clusters of updates that do not",
    }
    PRESETS: ClassVar[dict[str, dict[str, object]]] = PRESETS
    IDLE: ClassVar[tuple[Idle, ...]] = (
        Idle(
            ("n_clusters", "tau", "distinct", "centres_join", "update", "theta"),
            {"clustering": ("labels",)},
            "label features alone make the clusters",
        ),
        Idle(
            ("gate", "top", "energy", "energy_offset", "temperature", "space"),
            {"alone": ("average", "best", "private")},
            "one model is all that there is",
        ),
        Idle(
            ("private_data", "private_start", "private_steps"),
            {"alone": ("average", "best")},
            "there is no private model",
        ),
        Idle(("energy", "energy_offset", "temperature"), {"gate": ("uniform",)}, "all outputs count the same"),
        Idle(("energy_offset", "temperature"), {"energy": (False,)}, "there are no energies"),
        Idle(("private_data",), {"private_steps": (0,)}, "nothing is learnt from them"),
    )
    preset: Literal["default", "paper"] = "default"
    clustering: Literal["mctc", "k-means", "agglomerative", "labels"] = "mctc"
    selection: Choice = "uniform"
    n_clusters: Annotated[int, Meta(ge=1, le=MAX_STARTS)] | None = None
    tau: Annotated[float, Meta(ge=-1, le=1)] | Literal["otsu"] | None = None
    distinct: bool | None = None
    centres_join: bool | None = None
    update: Literal["sequential", "batch"] | None = None
    reference: Literal["initial", "round"] | None = None
    freeze_after: Annotated[int, Meta(ge=0)] | None = None
    private_data: Literal["all", "sensitive"] | None = None
    private_start: Literal["best", "initial"] | None = None
    private_steps: Annotated[int, Meta(ge=0)] | None = None
    gate: GateData | None = None
    n_components: Annotated[int, Meta(ge=1)] | None = None
    component_energy: Annotated[float, Meta(gt=0, le=1)] | None = None
    centred: bool = False
    theta: Annotated[float, Meta(ge=-1, le=1)] = 0.9
    energy: bool = True
    energy_offset: Literal["never", "untrained", "always"] | None = None
    alone: Alone | None = None
    top: Annotated[int, Meta(ge=1, le=64)] = 2
    temperature: Annotated[float, Meta(gt=0)] = 1.0
    space: Literal["prob", "logit"] = "prob"


class Clusters(Struct, frozen=True, kw_only=True):
    """The clusters in force: `made` in which round, by whom, with which tau; `separability` of Otsu's cut (17.5)."""

    made: int
    members: tuple[tuple[str, ...], ...]
    tau: float
    separability: float | None
    silhouette: float


class ScmoeState(ChoosingState, frozen=True, kw_only=True):
    """`directions`: the last unit update of each device, of round `seen`; `best`: experts of the best round so far.

    `labels`: features of the devices that trained, of clustering=labels.
    """

    initial_model: BlobRef
    experts: tuple[BlobRef, ...] = ()
    clusters: Clusters | None = None
    attached: dict[str, tuple[int, ...]] = {}  # section 9: clusters of those that did not make them
    directions: BlobRef | None = None
    seen: dict[str, int] = {}
    labels: dict[str, int] = {}
    best: tuple[BlobRef, ...] = ()
    best_clusters: Clusters | None = None
    best_attached: dict[str, tuple[int, ...]] = {}
    best_accuracy: float = -1.0
    since_best: int = 0


class ScmoePfl(Method[ScmoeState]):
    """SCMoE-PFL; section 12 is its pseudocode."""

    name = "scmoe-pfl"
    Options: ClassVar[type[Struct]] = Options
    NO_FINE_TUNING = "scmoe-pfl ends in mixtures with a fine-tuned private model"

    def __init__(self, settings: MethodSettings, server: Server = NO_DATA) -> None:
        super().__init__(settings, server)
        own = "n_clusters" in settings.options  # a preset's number is of MCTC
        self._rivals_clusters = self.options.n_clusters if own else None

    def init(self, layout: Layout, model: BlobRef) -> ScmoeState:
        """The state before round 1."""
        return ScmoeState(round=0, layout=layout, initial_model=model)

    async def round(self, state: ScmoeState, fleet: Fleet) -> ScmoeState:
        """Train, cluster, aggregate."""
        r = state.round + 1
        cohort = drawn(self.options.selection, state, fleet.devices(), self.settings, state.initial_model)
        answers = await fleet.run("train", {i: self._order(state, i, measure=cohort.measured) for i in cohort.ids})
        updates = accepted(answers)
        before = state
        if len(updates) >= self.settings.min_reports:
            state = self._remember(state, updates, fleet, r)
            state = await self._labelled(state, updates, fleet)
            if self.options.freeze_after == 0 or r <= (self.options.freeze_after or 0):
                state = self._cluster(state, list(updates), fleet, r)
            state = self._attach(state, fleet)
            state = aggregate(state, before, updates, fleet)
        state = msgspec.structs.replace(
            learned(self.options.selection, state, cohort, answers, self.settings),
            round=r,
            participations=counted(state.participations, updates),
            history=(*state.history, summarise(r, len(cohort.ids), updates)),
        )
        return self._converged(state, before)

    def _order(self, state: ScmoeState, device_id: str, *, measure: bool) -> Train:
        return Train(
            starts=starts(state, device_id),
            sgd=self.settings.sgd,
            codec=self.settings.codec,
            choose="accuracy",
            measure=measure,
        )

    def _remember(self, state: ScmoeState, updates: Mapping[str, Trained], fleet: Fleet, r: int) -> ScmoeState:
        """Sections 4 and 5: the direction of each update, from the initial model or from the round's start."""
        directions: Tensors = fleet.get_tensors(state.directions) if state.directions else {}
        w0 = fleet.get(state.initial_model, state.layout).params
        for i, update in updates.items():
            change = fleet.get(update.update, state.layout).params
            if self.options.reference == "initial":
                change = change + (start_of(state, update, fleet).params - w0)
            unit = mctc.direction(change)
            if unit is not None:
                directions[i] = unit.astype(np.float32)
        return msgspec.structs.replace(
            state, directions=fleet.put(directions), seen=state.seen | dict.fromkeys(updates, r)
        )

    async def _labelled(self, state: ScmoeState, ids: Iterable[str], fleet: Fleet) -> ScmoeState:
        """Label features, where they make the clusters: of those that have not told theirs."""
        if self.options.clustering != "labels":
            return state
        asked = dict.fromkeys((i for i in ids if i not in state.labels), DescribeLabels())
        told = results(await fleet.run("labels", asked), LabelsDescribed) if asked else {}
        return msgspec.structs.replace(state, labels=state.labels | {i: said.feature for i, said in told.items()})

    def _cluster(self, state: ScmoeState, ids: Sequence[str], fleet: Fleet, r: int) -> ScmoeState:
        """Sections 5 to 7: overlapping clusters of this round's directions."""
        directions = fleet.get_tensors(state.directions) if state.directions else {}
        o = self.options
        by_label = o.clustering == "labels"
        ids = [i for i in ids if i in directions and (not by_label or state.labels.get(i, -1) >= 0)]
        if not ids:
            return state
        z = self._embedding(directions, ids)
        seen: Features = Directions(
            vectors=z,
            n_clusters=o.n_clusters or len(ids),
            tau=o.tau if isinstance(o.tau, float | int) else None,
            theta=o.theta,
            distinct=bool(o.distinct),
            centres_join=bool(o.centres_join),
            update=o.update or "sequential",
        )
        if by_label:
            seen = Labels(tuple(state.labels[i] for i in ids))
        rng = round_rng(self.settings, r)
        found = find_clusters(o.clustering, seen, rng=rng, n_clusters=self._rivals_clusters)
        if found.separability is not None and found.separability < 0.7:
            log.info("event=weak_groups separability=%.2f: the clusters may be arbitrary", found.separability)
        made = Clusters(
            made=r,
            members=tuple(tuple(ids[i] for i in cluster) for cluster in found.clusters),
            tau=1.0 if found.tau is None else found.tau,  # who comes late joins the nearest
            separability=found.separability,
            silhouette=mctc.silhouette(mctc.similarity(z), found.clusters),
        )
        return msgspec.structs.replace(state, clusters=made, attached={})

    def _embedding(self, directions: Tensors, ids: Sequence[str]) -> NDArray[np.float64]:
        """Section 5, (N, m)."""
        o = self.options
        return mctc.embedding(
            np.stack([directions[i] for i in ids]),
            n_components=o.n_components,
            energy=o.component_energy,
            centred=o.centred,
        )

    def _attach(self, state: ScmoeState, fleet: Fleet) -> ScmoeState:
        """Section 9: devices that did not make the clusters, by their last direction, if it is fresh enough.

        Where label features made them: to the cluster of the device's own, if there is one.
        """
        if state.clusters is None or state.directions is None:
            return state
        inside = {i for members in state.clusters.members for i in members}
        r = max(state.seen.values())
        late = [i for i, seen in state.seen.items() if i not in inside | set(state.attached) and r - seen <= STALE]
        directions = fleet.get_tensors(state.directions)
        late = [i for i in late if i in directions]
        if not late:
            return state
        ids = [*sorted(inside), *late]
        z = self._embedding(directions, ids)
        means = np.stack([z[[ids.index(i) for i in members]].mean(axis=0) for members in state.clusters.members])
        joined = mctc.attach(z[len(inside) :], means, state.clusters.tau)
        if state.labels:
            labels = [state.labels.get(members[0]) for members in state.clusters.members]
            own = [state.labels.get(i, -1) for i in late]
            joined = tuple(
                (labels.index(psi),) if psi in labels else near for psi, near in zip(own, joined, strict=True)
            )
        return msgspec.structs.replace(state, attached=state.attached | dict(zip(late, joined, strict=True)))

    def _converged(self, state: ScmoeState, before: ScmoeState) -> ScmoeState:
        """Section 8: the experts that this round started from were measured; stop after 10 rounds without progress."""
        accuracy = state.history[-1].accuracy
        if accuracy is None or not before.experts:
            return state
        if accuracy > state.best_accuracy + PROGRESS:
            return msgspec.structs.replace(
                state,
                best=before.experts,
                best_clusters=before.clusters,
                best_attached=before.attached,
                best_accuracy=accuracy,
                since_best=0,
            )
        since = state.since_best + 1
        at_end = since >= PATIENCE or state.round == self.settings.rounds
        if at_end:  # the best round's experts serve
            state = msgspec.structs.replace(
                state, experts=state.best, clusters=state.best_clusters, attached=state.best_attached
            )
        return msgspec.structs.replace(
            state, since_best=since, round=self.settings.rounds if since >= PATIENCE else state.round
        )

    async def finish(self, state: ScmoeState, fleet: Fleet) -> ScmoeState:
        """Sections 10 and 11, on every device."""
        o, sgd = self.options, self.settings.sgd
        sgd = msgspec.structs.replace(sgd, steps=o.private_steps or 0, epochs=0)
        orders = {
            device.id: FitMixture(
                experts=starts(state, device.id),
                initial_model=state.initial_model,
                sgd=sgd,
                private_data=o.private_data or "all",
                private_start=o.private_start or "best",
                gate=o.gate or "validation",
                energy=o.energy,
                energy_offset=o.energy_offset or "never",
                alone=o.alone,
                near_best=bool(state.experts) and not clusters_of(state, device.id),
                top=o.top,
                space=o.space,
                temperature=o.temperature,
            )
            for device in fleet.devices()
        }
        installed = results(await insist(fleet, "mixture", orders), Installed)
        return msgspec.structs.replace(state, round=state.round + 1, installed=installed)

    def serves(self, state: ScmoeState, device_id: str) -> BlobRef:
        """The first of the device's experts."""
        return starts(state, device_id)[0].model

    def summary(self, state: ScmoeState) -> dict[str, Any]:
        """What all methods tell, and the clusters."""
        clusters = state.clusters
        return super().summary(state) | {
            "split": len(state.experts) > 1,
            "clusters": {str(k): list(members) for k, members in enumerate(clusters.members)} if clusters else {},
            "tau": clusters.tau if clusters else None,
            "separability": clusters.separability if clusters else None,
            "silhouette": clusters.silhouette if clusters else None,
        }


def clusters_of(state: ScmoeState, device_id: str) -> tuple[int, ...]:
    """Numbers of the clusters that a device is in, ascending."""
    if state.clusters is None:
        return ()
    own = tuple(k for k, members in enumerate(state.clusters.members) if device_id in members)
    return own or state.attached.get(device_id, ())


def starts(state: ScmoeState, device_id: str) -> tuple[Start, ...]:
    """The experts of a device's clusters; of one that is in none, any; before there are experts, the initial model."""
    if not state.experts or state.clusters is None:
        return (Start(model=state.initial_model),)
    choice = offered(clusters_of(state, device_id), state.clusters.members)
    return tuple(Start(model=state.experts[k], cluster=k) for k in choice)


def start_of(state: ScmoeState, update: Trained, fleet: Fleet) -> Model:
    """The model that a device started from."""
    return fleet.get(state.initial_model if update.cluster < 0 else state.experts[update.cluster], state.layout)


def aggregate(state: ScmoeState, before: ScmoeState, updates: Mapping[str, Trained], fleet: Fleet) -> ScmoeState:
    """Eq. 5: omega_k is the mean of its members' models; a cluster without members this round keeps its expert."""
    if state.clusters is None:
        return state
    ids = list(updates)
    n_clusters = len(state.clusters.members)
    members = [[p for p, i in enumerate(ids) if k in clusters_of(state, i)] for k in range(n_clusters)]

    def models() -> Iterator[Model]:
        for update in updates.values():
            start, change = start_of(before, update, fleet), fleet.get(update.update, state.layout)
            yield Model(start.params + change.params, change.buffers, change.counters)

    means = cluster_averages(models(), sizes(updates), members, state.layout)
    old = before.experts if before.clusters is state.clusters else ()
    experts = tuple(
        fleet.put(unflatten(mean.as_model(), state.layout)) if mean else old[k] if k < len(old) else state.initial_model
        for k, mean in enumerate(means)
    )
    return msgspec.structs.replace(state, experts=experts)
