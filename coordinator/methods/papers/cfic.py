"""CFIC: clustered sampling by label feature, with a momentum correction of the one global model.

Source: Yang et al., "Cluster Federated Learning with Intra-Cluster Correction", CMC 2025, doi 10.32604/cmc.2025.064103,
Algorithm 1; specification docs/methods/cfic.md. Departures (section 9): the label feature is that of the signed
deviation, not of the absolute one, and is reported before training, not with the first model. Local work is counted in
SGD steps unless `--local-epochs` is given (section 8: 5 epochs); integer buffers are averaged by maximum as everywhere.
The gain comes from the momentum rather than from the clusters: `selection=uniform` and `correction=false` switch
either off. Clusters of profiles or update directions, instead of label features, are made after a third of the rounds,
when the model can tell data apart (FedEPC section 9, point 10); until then no device has a cluster.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence
from typing import Annotated, Any, ClassVar

import msgspec
import numpy as np
from msgspec import Meta, Struct

from coordinator.aggregation.correction import Vector, apply_correction, compute_mean_direction
from coordinator.aggregation.protection import Answers
from coordinator.clustering import aidc
from coordinator.clustering.find import Clustering
from coordinator.fleet.fleet import Fleet
from coordinator.fleet.versions import put_successor
from coordinator.methods.method import Method
from coordinator.methods.parts import grouping
from coordinator.methods.parts.averaging import average_by_cluster
from coordinator.methods.parts.cohort import make_bandit_settings
from coordinator.methods.parts.grouping import Choices, Description
from coordinator.methods.parts.unresponsive import AskingState, find_responsive, run_and_record
from coordinator.methods.promises import SHARED
from coordinator.methods.rounds import finish_round, make_round_rng, select_updates
from coordinator.selection import ccmab
from coordinator.selection.select import choose, compute_cohort_size, draw_stratified, draw_uniform
from coordinator.store.records import Device
from fedge.steps.descriptions.describe_labels import DescribeLabels
from fedge.steps.training.train import Start, Train, Trained
from fedge.tensors.layout import Layout, Model
from fedge.wire.messages import BlobRef

log = logging.getLogger("fedge.method")

NO_SAMPLES = -1  # label feature of a device without samples, section 3
NO_FEATURE = -1  # cluster of the server step for devices whose feature is unknown, section 6
LONG = 5.0  # |h| beyond so many times |avg - w| ...
LONG_ROUNDS = 10  # ... for so many rounds in a row means that beta is too large, section 7


class Options(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The options of section 7. `alpha`, `beta`: memory and length of the correction. `correction`: whether to correct.

    `clustering`: of label features, of ReLU-sparsity profiles, or (mctc) of updates. `epsilon`: of label features under
    differential privacy (section 10). Selections: stratified is that of section 5; uniform ignores clusters; ccmab and
    fastest choose the quota of each cluster under FedEPC's deadline.
    """

    alpha: Annotated[float, Meta(ge=0, lt=1)] = 0.9
    beta: Annotated[float, Meta(ge=0)] = 0.2
    correction: bool = True
    clustering: Clustering = "labels"
    epsilon: Annotated[float, Meta(gt=0)] | None = None

    def __post_init__(self) -> None:
        if not self.correction and (self.alpha, self.beta) != (0.9, 0.2):
            raise ValueError("alpha and beta change nothing with correction=false: they make the correction")
        if self.epsilon is not None and self.clustering != "labels":
            raise ValueError(f"epsilon hides label features, and clustering={self.clustering} asks nobody for one")


class CficState(AskingState, frozen=True, kw_only=True):
    """The state of CFIC. `model`: w; `memory`: h, 0 if None; `visits`: by cluster, the last round of a draw.

    `extractor`: the common model for clusters that are not of label features; `bandits`: by cluster, for selections
    with a deadline.
    """

    model: BlobRef
    memory: BlobRef | None = None
    described: dict[str, Description] = {}
    visits: dict[str, int] = {}  # the keys of a state are text
    extractor: BlobRef | None = None
    bandits: dict[str, ccmab.State] = {}
    long_rounds: int = 0  # in a row, up to now


class Cfic(Method[CficState]):
    """CFIC, Algorithm 1; after the last round the global model is installed on every device."""

    name = "cfic"
    HEEDS = SHARED
    Options: ClassVar[type[Struct]] = Options
    State = CficState
    SELECTIONS = ("stratified", "ccmab", "uniform", "fastest")
    REFUSED = {
        **dict.fromkeys(
            ("norm", "scale"),
            "it only remade a row of cfic.md section 8: benchmarks/papers/cfic.py has it as a class",
        ),
        "psi": "the label feature is that of the signed deviation (cfic.md section 9)",
        "registration": "label features are told before training (cfic.md section 9)",
        "n_clusters": "k-means and agglomerative make as many clusters as AIDC would; fedepc has n_clusters",
    }

    def set_up(self) -> None:
        """Prepare the bandits of the clusters, if the selection has a deadline."""
        self._by_label = self.options.clustering == "labels"
        self._unknown = 0 if self._by_label else self.settings.rounds // 3  # rounds in which no device has a cluster
        self._bandit = make_bandit_settings(self.settings)

    def explain_no_relays(self) -> str:
        """Return why relays are impossible: clusters of updates need each update."""
        return super().explain_no_relays() or grouping.explain_no_relays(self.options.clustering)

    def count_answers(self) -> Answers:
        """Count the label feature or profile of each device (section 3); a direction takes a training."""
        return Answers(trainings=1) if self.options.clustering == "mctc" else Answers(descriptions=1)

    def recluster(self, state: CficState) -> CficState | None:
        """Forget the descriptions, so that all devices describe themselves again."""
        return msgspec.structs.replace(state, described={}, visits={}, extractor=None, bandits={})

    def begin_campaign(self, state: CficState, changed: Collection[str]) -> CficState:
        """Return the state before the next campaign, without the memory of the last one's direction."""
        state = super().begin_campaign(state, changed)
        described = grouping.mark_outdated(state.described, changed)
        return msgspec.structs.replace(state, memory=None, described=described, long_rounds=0)

    async def round(self, state: CficState, fleet: Fleet) -> CficState:
        """Do one round of Algorithm 1."""
        r = state.round + 1
        state = await self._describe(state, fleet, "describe", find_responsive(state, fleet))
        devices = find_responsive(state, fleet)
        choices = self._choose(state, devices, r)
        grouping.record_choices(fleet, choices)
        cohort = grouping.list_chosen(choices) or self._draw(state, devices, r)
        start, sgd, codec = Start(model=state.model), self.settings.sgd, self.settings.codec
        order = Train(starts=(start,), sgd=sgd, codec=codec, measure=bool(choices))
        state, answers = await run_and_record(state, fleet, "train", dict.fromkeys(cohort, order))
        bandits = {str(k - 1): bandit for k, bandit in grouping.update_bandits(choices, answers).items()}
        state = msgspec.structs.replace(state, bandits=state.bandits | bandits)
        updates = select_updates(answers)
        trained = {device.id: device for device in fleet.get_devices() if device.id in updates}
        state = await self._describe(state, fleet, "describe-trained", trained)
        if len(updates) >= self.settings.min_reports:
            state = await self._step(state, updates, fleet)
        visits = state.visits | dict.fromkeys(map(str, group_by_feature(state, cohort)), r)
        return finish_round(state, len(cohort), updates, visits=visits)

    async def _describe(self, state: CficState, fleet: Fleet, step: str, devices: Mapping[str, Device]) -> CficState:
        """Have devices whose description is missing or outdated, or that restarted, describe their data (section 4)."""
        known = {i: d for i, d in state.described.items() if d.label >= 0}  # an earlier version stored no label
        now = {(i, d.incarnation): d for i, d in known.items()}
        asked = {
            i: device for i, device in devices.items() if grouping.is_due(now.get((i, device.incarnation)), device)
        }
        needed = self.selection != "uniform" or self.options.correction
        if not asked or not needed or state.round < self._unknown:
            return state
        if not self._by_label:
            state = msgspec.structs.replace(state, extractor=state.extractor or state.model)
        order = grouping.make_describe_action(
            self.options.clustering,
            state.extractor or state.model,
            sgd=self.settings.sgd,
            codec=self.settings.codec,
            labels=DescribeLabels(epsilon=self.options.epsilon),
        )
        state, answers = await run_and_record(state, fleet, step, dict.fromkeys(asked, order))
        new = {
            i: msgspec.structs.replace(described, incarnation=asked[i].incarnation)
            for i, described in grouping.read_descriptions(answers, asked, fleet, state.layout).items()
        }
        comparable = grouping.select_comparable(known, new)
        if self._by_label:
            return msgspec.structs.replace(state, described=comparable)
        return self._remake_clusters(state, comparable, fleet) if new.keys() & comparable.keys() else state

    def _remake_clusters(self, state: CficState, descriptions: Mapping[str, Description], fleet: Fleet) -> CficState:
        """Remake all clusters except those of labels; each inherits the bandit of its largest overlap (FedEPC 4.6)."""
        ids, described = list(descriptions), list(descriptions.values())
        rng = np.random.default_rng(self.settings.seed)
        unit = grouping.compute_unit(described)
        positions = grouping.cluster_devices(self.options.clustering, described, unit, fleet, rng=rng)
        found = [[ids[position] for position in members] for members in positions]
        old = {NO_FEATURE: [i for i in ids if i not in state.described]} | group_by_feature(state, state.described)
        heirs = aidc.inherit(list(old.values()), found)
        kept = {str(k): str(list(old)[heir]) for k, heir in enumerate(heirs) if heir is not None}
        numbers = {i: k for k, members in enumerate(found) for i in members}
        return msgspec.structs.replace(
            state,
            described={i: msgspec.structs.replace(d, label=numbers[i]) for i, d in descriptions.items()},
            visits={k: state.visits[heir] for k, heir in kept.items() if heir in state.visits},
            bandits={k: state.bandits[heir] for k, heir in kept.items() if heir in state.bandits},
        )

    def _draw(self, state: CficState, devices: Mapping[str, Device], r: int) -> list[str]:
        """Draw uniformly in round 1 or without clusters; otherwise about equally many from each cluster (section 5)."""
        ids = find_available(state, devices)
        n = compute_cohort_size(len(ids), self.settings.participation)
        rng = make_round_rng(self.settings, r)
        if r == 1 or self.selection != "stratified":
            return draw_uniform(ids, n, rng)
        unlabelled = [i for i in ids if get_feature(state, i) is None]
        visits = {int(key): last for key, last in state.visits.items()}
        return draw_stratified(group_by_feature(state, ids), n, rng, others=unlabelled, last_visit=visits)

    def _choose(self, state: CficState, devices: Mapping[str, Device], r: int) -> Choices:
        """Choose in each cluster k, under number k + 1, from round 2 on (FedEPC 5); empty for selections by `_draw`."""
        assert self.selection is not None
        if r == 1 or self.selection in {"uniform", "stratified"}:
            return {}
        ids = find_available(state, devices)
        members = group_by_feature(state, ids) | {NO_FEATURE: [i for i in ids if get_feature(state, i) is None]}
        sgd = self.settings.sgd
        arms = {
            k + 1: [grouping.make_arm(devices[i], sgd, state.model) for i in of_cluster]
            for k, of_cluster in members.items()
        }
        bandits = {k + 1: state.bandits.get(str(k), ccmab.State()) for k in members}
        seed = (self.settings.seed, r)
        return choose(self.selection, arms, bandits, self._bandit, seed=seed, last_visit={})

    async def _step(self, state: CficState, updates: Mapping[str, Trained], fleet: Fleet) -> CficState:
        """Do the server's step with the round's updates (section 6)."""
        layout = state.layout
        ids = list(updates)
        features = [get_feature(state, i) for i in ids]
        keys = [NO_FEATURE if feature is None else feature for feature in features]
        members = [[i for i, key in zip(ids, keys, strict=True) if key == cluster] for cluster in sorted(set(keys))]
        mean, *of_clusters = await average_by_cluster(self, fleet, updates, [ids, *members], layout)
        moving = [average for average in of_clusters if average is not None]
        if mean is None:
            return state
        w = fleet.get(state.model, layout)
        h = fleet.get_tensors(state.memory)["h"].astype(np.float32) if state.memory else None
        o = self.options
        alpha, beta = (o.alpha, o.beta) if o.correction else (0.0, 0.0)
        direction = self.compute_direction([d.params for d in moving], [d.n_samples for d in moving], layout)
        step = apply_correction(w.params, h, mean.params, direction, alpha=alpha, beta=beta)
        if step.diverged:
            log.error("event=diverged the model would become non-finite; the old one is kept, h = 0")
            return msgspec.structs.replace(state, memory=None, long_rounds=0)
        long = np.linalg.norm(step.h.astype(np.float64)) > LONG * np.linalg.norm(mean.params)
        long_rounds = state.long_rounds + 1 if long else 0
        if long_rounds == LONG_ROUNDS:
            log.warning("event=long_correction beta is too large for this network: the correction outweighs training")
        model = Model(step.w, mean.buffers.astype(np.float32), mean.counters)
        return msgspec.structs.replace(
            state,
            model=put_successor(fleet, state.model, model, layout),
            memory=fleet.put({"h": step.h}) if o.correction else None,
            long_rounds=long_rounds,
        )

    def compute_direction(self, changes: Sequence[Vector], sizes: Sequence[float], layout: Layout) -> Vector:  # noqa: ARG002
        """Compute the clusters' mean direction, dir (section 6). `layout`: of the changes, for variants."""
        return compute_mean_direction(changes, sizes)

    def summarise(self, state: CficState) -> dict[str, Any]:
        """Return the history, clusters by label feature, selection counts, and bundles."""
        return super().summarise(state) | {
            "clusters": {str(key): members for key, members in group_by_feature(state, state.described).items()}
        }


def get_feature(state: CficState, device_id: str) -> int | None:
    """Return the label feature L_k; None if it is not known."""
    description = state.described.get(device_id)
    return None if description is None else description.label


def find_available(state: CficState, devices: Mapping[str, Device]) -> list[str]:
    """Return the devices that can be drawn: those with samples."""
    return [i for i, d in devices.items() if d.n_samples > 0 and get_feature(state, i) != NO_SAMPLES]


def group_by_feature(state: CficState, ids: Collection[str]) -> dict[int, list[str]]:
    """Group the devices among `ids` by feature >= 0 (section 4); ascending keys, members by ascending id."""
    found: dict[int, list[str]] = {}
    for i in sorted(ids):
        feature = get_feature(state, i)
        if feature is not None and feature != NO_SAMPLES:
            found.setdefault(feature, []).append(i)
    return dict(sorted(found.items()))
