"""SCMoE-PFL: overlapping clusters of update directions, an expert each, private model and energy-aware gate.

Source: Li et al., "SCMoE-PFL: A soft-clustering mixture-of-experts framework for personalized federated learning",
Information Fusion, 2026; specification docs/methods/scmoe_pfl.md. Departures (preset
`default`): updates measured from the initial model, clusters frozen after three rounds, private model on all training
samples from the best expert, gate on validation samples.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Final, Literal

import msgspec
import numpy as np
from msgspec import Meta, Struct
from numpy.typing import NDArray

from coordinator.aggregation import average_all
from coordinator.aggregation.guarded import limit_sizes
from coordinator.aggregation.protection import Answers
from coordinator.clustering import geometry, mctc
from coordinator.clustering.find import Directions, by_label, find_clusters, offer_clusterings
from coordinator.fleet.fleet import Fleet
from coordinator.fleet.versions import put_successor
from coordinator.methods.method import Method
from coordinator.methods.parts.averaging import average_by_cluster
from coordinator.methods.parts.cohort import SELECTIONS, ChoosingState, train_cohort
from coordinator.methods.parts.grouping import select_offered
from coordinator.methods.promises import SHARED
from coordinator.methods.rounds import finish_round, make_round_rng, run_with_retries, select_results
from fedge.steps.descriptions.describe_labels import DescribeLabels, LabelsDescribed
from fedge.steps.mixture.fit_mixture import FitMixture, GateData, Offset
from fedge.steps.mixture.install import Installed
from fedge.steps.training.train import MAX_STARTS, Start, Train, Trained
from fedge.system.loading import FINE_TUNED
from fedge.tensors.layout import Floats, Layout, Model, Tensors
from fedge.wire.messages import BlobRef

log = logging.getLogger("fedge.method")

STALE = 5  # rounds after which a stored direction says nothing any more, section 9
PATIENCE = 10  # rounds without progress, section 8
PROGRESS = 1e-3  # of the mean validation accuracy, section 8


class Parameters(Struct, frozen=True, kw_only=True):
    """The parameters of section 12. `tau`: Otsu's cut if None. `reference`: the model that updates start from."""

    n_clusters: int = 8
    tau: float | None = None
    distinct: bool = True
    centres_join: bool = True
    reference: Literal["initial", "round"] = "initial"
    freeze_after: int = 3
    private_data: Literal["all", "sensitive"] = "all"
    private_start: Literal["best", "initial"] = "best"
    private_steps: int = 40
    gate: GateData = "validation"
    energy_offset: Offset = "untrained"


PRESETS: Final = {
    "default": Parameters(),
    "paper": Parameters(
        n_clusters=4,
        tau=0.2,
        distinct=False,
        centres_join=False,
        reference="round",
        freeze_after=0,
        private_data="sensitive",
        private_start="initial",
        private_steps=300,
        gate="training",
        energy_offset="never",
    ),
}


class Options(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The options of SCMoE-PFL. `preset`: section 12, default or as in the paper; given options override it.

    `clustering` k-means or agglomerative: as many clusters as MCTC would make, or `n_clusters`, each device in one
    cluster; labels: devices of equal label feature (CFIC section 3). With MCTC, `n_clusters` is the most. With
    `freeze_after` 0, every round clusters anew. `private_data`, `private_steps`: of the private model's training.
    `top`: experts of a sample.
    """

    preset: Literal["default", "paper"] = "default"
    clustering: Annotated[str, offer_clusterings("mctc", "k-means", "agglomerative", "labels")] = "mctc"
    n_clusters: Annotated[int, Meta(ge=1, le=MAX_STARTS)] | None = None
    freeze_after: Annotated[int, Meta(ge=0)] | None = None
    private_data: Literal["all", "sensitive"] | None = None
    private_steps: Annotated[int, Meta(ge=0)] | None = None
    top: Annotated[int, Meta(ge=1, le=64)] = 2

    def __post_init__(self) -> None:
        if self.clustering == "labels" and self.n_clusters is not None:
            raise ValueError("n_clusters changes nothing with clustering=labels: label features say how many")


ABLATION: Final = "it only remade a row of scmoe_pfl.md section 17: benchmarks/papers/scmoe_pfl.py has it as a class"
PRESET: Final = "preset=paper or preset=default sets it"


class Clusters(Struct, frozen=True, kw_only=True):
    """The present clusters, the round in which they were `made`, their tau, and Otsu's `separability` (17.4)."""

    made: int
    members: tuple[tuple[str, ...], ...]
    tau: float
    separability: float | None
    silhouette: float


class ScmoeState(ChoosingState, frozen=True, kw_only=True):
    """The state of SCMoE-PFL. `directions`: the last unit updates, of round `seen`; `best`: the best experts.

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
    HEEDS = SHARED
    Options: ClassVar[type[Struct]] = Options
    SELECTIONS = SELECTIONS
    REFUSED = {
        "clustering=aidc": "profiles are taken with a model that all have trained, and from the second round on there "
        "is none; fedge:clustering=aidc:split=always gives every group of profiles an expert and each device a mixture",
        "selection=stratified": "clusters overlap, so a device would be drawn for several; "
        "fedepc:clustering=mctc:selection=stratified draws from clusters of updates that do not",
        **dict.fromkeys(("tau", "distinct", "centres_join", "reference", "private_start"), PRESET),
        **dict.fromkeys(("alone", "centred", "energy", "energy_offset", "gate", "space"), ABLATION),
        **dict.fromkeys(("update", "n_components", "component_energy", "theta", "temperature"), "its default stands"),
        "masking": "its clusters overlap: sums over such clusters differ by few devices, whose updates they show",
        FINE_TUNED: "scmoe-pfl ends in mixtures with a fine-tuned private model",
    }

    def set_up(self) -> None:
        """Set the parameters of all rounds."""
        self._p = self.make_parameters()

    def explain_no_relays(self) -> str:
        """Return why relays are impossible: the experts are means of whole models."""
        return super().explain_no_relays() or "it goes by the model that each device has trained"

    def count_answers(self) -> Answers:
        """Count the choice of a start in each round (section 8), and a label feature if these make the clusters."""
        return Answers(descriptions=int(self.options.clustering == "labels"), examinations=self.settings.rounds)

    def make_parameters(self) -> Parameters:
        """Return the preset's parameters, overridden by options."""
        o = self.options
        names = ("n_clusters", "freeze_after", "private_data", "private_steps")
        given = {name: value for name in names if (value := getattr(o, name)) is not None}
        return msgspec.structs.replace(PRESETS[o.preset], **given)

    def init(self, layout: Layout, model: BlobRef) -> ScmoeState:
        """Return the state before round 1."""
        return ScmoeState(round=0, layout=layout, initial_model=model)

    def begin_campaign(self, state: ScmoeState, changed: Collection[str]) -> ScmoeState:
        """Return the state before the next campaign, which makes clusters anew and has a best round of its own."""
        state = super().begin_campaign(state, changed)
        labels = {i: label for i, label in state.labels.items() if i not in changed}
        return msgspec.structs.replace(
            state, labels=labels, best=(), best_clusters=None, best_attached={}, best_accuracy=-1.0, since_best=0
        )

    async def round(self, state: ScmoeState, fleet: Fleet) -> ScmoeState:
        """Train, cluster and aggregate."""
        r, before = state.round + 1, state
        state, asked, updates = await train_cohort(
            self, state, fleet, state.initial_model, lambda i: self._make_order(before, i)
        )
        if len(updates) >= self.settings.min_reports:
            state = self._record_directions(state, updates, fleet, r)
            state = await self._request_labels(state, updates, fleet)
            if self._p.freeze_after == 0 or r - self.settings.first <= self._p.freeze_after:
                state = self._cluster(state, list(updates), fleet, r)
            state = self._attach(state, fleet)
            state = await aggregate(self, state, before, updates, fleet)
        return self._record_best(finish_round(state, asked, updates), before)

    def _make_order(self, state: ScmoeState, device_id: str) -> Train:
        sgd, codec = self.settings.sgd, self.settings.codec
        return Train(starts=list_starts(state, device_id), sgd=sgd, codec=codec, choose="accuracy")

    def _record_directions(self, state: ScmoeState, updates: Mapping[str, Trained], fleet: Fleet, r: int) -> ScmoeState:
        """Record each update's direction, from the initial model or from the round's start (sections 4 and 5)."""
        directions: Tensors = fleet.get_tensors(state.directions) if state.directions else {}
        w0 = fleet.get(state.initial_model, state.layout).params
        for i, update in updates.items():
            change = fleet.get(update.update, state.layout).params
            if self._p.reference == "initial":
                change = change + (load_start(state, update, fleet).params - w0)
            unit = geometry.compute_direction(change)
            if unit is not None:
                directions[i] = unit.astype(np.float32)
        return msgspec.structs.replace(
            state, directions=fleet.put(directions), seen=state.seen | dict.fromkeys(updates, r)
        )

    async def _request_labels(self, state: ScmoeState, ids: Iterable[str], fleet: Fleet) -> ScmoeState:
        """Ask devices for their missing label features, if features make the clusters."""
        if self.options.clustering != "labels":
            return state
        asked = dict.fromkeys((i for i in ids if i not in state.labels), DescribeLabels())
        results = select_results(await fleet.run("labels", asked), LabelsDescribed) if asked else {}
        return msgspec.structs.replace(state, labels=state.labels | {i: said.feature for i, said in results.items()})

    def _cluster(self, state: ScmoeState, ids: Sequence[str], fleet: Fleet, r: int) -> ScmoeState:
        """Make overlapping clusters of this round's directions (sections 5 to 7)."""
        directions = fleet.get_tensors(state.directions) if state.directions else {}
        o, p = self.options, self._p
        is_by_label = o.clustering == "labels"
        ids = [i for i in ids if i in directions and (not is_by_label or state.labels.get(i, -1) >= 0)]
        if not ids:
            return state
        z = self.compute_embedding(np.stack([directions[i] for i in ids]))
        seen = Directions(
            vectors=z, n_clusters=p.n_clusters, tau=p.tau, distinct=p.distinct, centres_join=p.centres_join
        )
        if is_by_label:
            found = mctc.ClusteringResult(by_label([state.labels[i] for i in ids]))
        else:
            rng = make_round_rng(self.settings, r)
            found = find_clusters(o.clustering, seen, rng=rng, n_clusters=o.n_clusters)  # a preset's is of MCTC
        if found.separability is not None and found.separability < 0.7:
            log.info("event=weak_groups separability=%.2f the clusters may be arbitrary", found.separability)
        made = Clusters(
            made=r,
            members=tuple(tuple(ids[i] for i in cluster) for cluster in found.clusters),
            tau=1.0 if found.tau is None else found.tau,  # late devices join the nearest
            separability=found.separability,
            silhouette=mctc.silhouette(geometry.compute_similarity(z), found.clusters),
        )
        return msgspec.structs.replace(state, clusters=made, attached={})

    def compute_embedding(self, directions: Floats) -> NDArray[np.float64]:
        """Compute the embedding (N, m) of N directions (N, d) (section 5)."""
        return geometry.compute_embedding(directions)

    def _attach(self, state: ScmoeState, fleet: Fleet) -> ScmoeState:
        """Attach devices that did not make the clusters by their last direction, if it is fresh enough (section 9).

        With label features, a device joins the cluster of its feature, if there is one.
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
        z = self.compute_embedding(np.stack([directions[i] for i in ids]))
        means = np.stack([z[[ids.index(i) for i in members]].mean(axis=0) for members in state.clusters.members])
        joined = mctc.attach(z[len(inside) :], means, state.clusters.tau)
        if state.labels:
            labels = [state.labels.get(members[0]) for members in state.clusters.members]
            own = [state.labels.get(i, -1) for i in late]
            joined = tuple(
                (labels.index(psi),) if psi in labels else near for psi, near in zip(own, joined, strict=True)
            )
        return msgspec.structs.replace(state, attached=state.attached | dict(zip(late, joined, strict=True)))

    def _record_best(self, state: ScmoeState, before: ScmoeState) -> ScmoeState:
        """Keep the experts of the best round so far; stop after 10 rounds without progress (section 8)."""
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
        at_end = since >= PATIENCE or state.round == self.last
        if at_end:  # the best round's experts serve
            state = msgspec.structs.replace(
                state, experts=state.best, clusters=state.best_clusters, attached=state.best_attached
            )
        return msgspec.structs.replace(state, since_best=since, round=self.last if since >= PATIENCE else state.round)

    def explain_no_patience(self) -> str:
        """Return why training cannot stop early: it does so by itself."""
        return f"it stops by itself, after {PATIENCE} rounds without progress"

    async def finish(self, state: ScmoeState, fleet: Fleet) -> ScmoeState:
        """Fit the mixture on every device (sections 10 and 11)."""
        orders = {device.id: self.make_mixture_order(state, device.id) for device in fleet.get_devices()}
        installed = select_results(await run_with_retries(fleet, "mixture", orders), Installed)
        return msgspec.structs.replace(state, round=state.round + 1, installed=installed)

    def make_mixture_order(self, state: ScmoeState, device_id: str) -> FitMixture:
        """Make the order of the last round."""
        p = self._p
        return FitMixture(
            experts=list_starts(state, device_id),
            initial_model=state.initial_model,
            sgd=msgspec.structs.replace(self.settings.sgd, steps=p.private_steps, epochs=0),
            private_data=p.private_data,
            private_start=p.private_start,
            gate=p.gate,
            energy_offset=p.energy_offset,
            near_best=bool(state.experts) and not find_own_clusters(state, device_id),
            top=self.options.top,
        )

    def get_model(self, state: ScmoeState, device_id: str) -> BlobRef:
        """Return the first of the device's experts."""
        return list_starts(state, device_id)[0].model

    def summarise(self, state: ScmoeState) -> dict[str, Any]:
        """Return the common figures, and the clusters."""
        clusters = state.clusters
        return super().summarise(state) | {
            "split": len(state.experts) > 1,
            "clusters": {str(k): list(members) for k, members in enumerate(clusters.members)} if clusters else {},
            "tau": clusters.tau if clusters else None,
            "separability": clusters.separability if clusters else None,
            "silhouette": clusters.silhouette if clusters else None,
        }


def find_own_clusters(state: ScmoeState, device_id: str) -> tuple[int, ...]:
    """Return the numbers of the clusters that a device is in, ascending."""
    if state.clusters is None:
        return ()
    own = tuple(k for k, members in enumerate(state.clusters.members) if device_id in members)
    return own or state.attached.get(device_id, ())


def list_starts(state: ScmoeState, device_id: str) -> tuple[Start, ...]:
    """List the experts of a device's clusters, or all if it is in none; before experts, the initial model."""
    if not state.experts or state.clusters is None:
        return (Start(model=state.initial_model),)
    choice = select_offered(find_own_clusters(state, device_id), state.clusters.members)
    return tuple(Start(model=state.experts[k], cluster=k) for k in choice)


def load_start(state: ScmoeState, update: Trained, fleet: Fleet) -> Model:
    """Return the model that a device started from."""
    return fleet.get(state.initial_model if update.cluster < 0 else state.experts[update.cluster], state.layout)


def compute_mean_start(method: ScmoePfl, before: ScmoeState, updates: Mapping[str, Trained], fleet: Fleet) -> Model:
    """Compute the mean of the models that a cluster's members started from, with the weights of their updates."""
    totals: dict[int, float] = defaultdict(float)
    weights = limit_sizes([update.n_samples for update in updates.values()], method.settings.protection)
    for update, weight in zip(updates.values(), weights, strict=True):
        totals[update.cluster] += weight
    firsts = {update.cluster: update for update in updates.values()}
    models = (load_start(before, firsts[k], fleet) for k in totals)
    return average_all(models, list(totals.values()), before.layout).to_model()


async def aggregate(
    method: ScmoePfl, state: ScmoeState, before: ScmoeState, updates: Mapping[str, Trained], fleet: Fleet
) -> ScmoeState:
    """Set omega_k to the mean of its members' models; a cluster without members keeps its expert (Eq. 5).

    The mean is computed as the mean of the members' starts plus the mean of their changes, with the same weights.
    """
    if state.clusters is None:
        return state
    n_clusters = len(state.clusters.members)
    members = [[i for i in updates if k in find_own_clusters(state, i)] for k in range(n_clusters)]
    changes = await average_by_cluster(method, fleet, updates, members, state.layout)
    begun = [
        compute_mean_start(method, before, {i: updates[i] for i in own}, fleet) if own else None for own in members
    ]
    old = before.experts if before.clusters is state.clusters else ()
    experts = tuple(
        put_successor(fleet, old[k] if k < len(old) else state.initial_model, change.add_to(start), state.layout)
        if change and start
        else old[k]
        if k < len(old)
        else state.initial_model
        for k, (start, change) in enumerate(zip(begun, changes, strict=True))
    )
    return msgspec.structs.replace(state, experts=experts)
