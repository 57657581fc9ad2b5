"""fedge, the default method: shared rounds, experts only where a trial shows a gain, a calibrated mixture.

Source: its specification, docs/methods/fedge.md, which is put together from
  profiles, AIDC groups and bandit selection: Tang et al., FedEPC, CMC 85(2), 2025;
  overlapping clusters of updates (MCTC), private model, energy gate: Li et al., SCMoE-PFL, Information Fusion, 2026.
Departures: in the first `WARM_UP` rounds every device takes part. The global model of these rounds is the extractor of
the profiles, since there are no labelled server data. Every device also takes part in the round of the trial. Clusters
and trial rest on these rounds alone, because only updates from a common start can be compared (docs/results.md has the
gain). Unresponsive devices rest (`coordinator.methods.parts.unresponsive`); the bandits see only the other devices.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any, ClassVar, Final, Literal

import msgspec
import numpy as np
from msgspec import UNSET, Meta, Struct

from coordinator.aggregation.pooled import compute_trial_statistic, wants_split
from coordinator.aggregation.protection import Answers
from coordinator.clustering import find as clustering
from coordinator.clustering import geometry
from coordinator.clustering.find import Clustering, Directions, find_clusters
from coordinator.fleet.fleet import Fleet
from coordinator.fleet.versions import put_successor
from coordinator.methods.installation import equip, install
from coordinator.methods.papers.fedge_campaigns import (
    add_fates,
    carry_over,
    describe_fate,
    find_start,
    grow_state,
    join_clusters,
    name_fates,
    restore_past,
    retain_past,
    try_past,
    update_past,
)
from coordinator.methods.papers.fedge_experts import LOOKUP_EVERY, find_primaries, list_offered_experts, list_starts
from coordinator.methods.papers.fedge_groups import Members, cluster_by_group, profile_devices
from coordinator.methods.papers.fedge_mixture import Mixtures
from coordinator.methods.papers.fedge_state import FedgeState, LastUpdate, TrialOutcome
from coordinator.methods.parts import grouping
from coordinator.methods.parts.asynchronous import ONE_BY_ONE, fill_buffer
from coordinator.methods.parts.averaging import FRESH, average, average_by_cluster
from coordinator.methods.parts.cohort import make_bandit_settings
from coordinator.methods.parts.grouping import Choices
from coordinator.methods.parts.server_optimizer import ServerModel, step_server
from coordinator.methods.parts.unresponsive import find_responsive, run_and_record
from coordinator.methods.promises import SHARED
from coordinator.methods.rounds import finish_round, get_owner, make_round_rng, select_results, select_updates
from coordinator.selection.select import choose, compute_cohort_size, draw_uniform
from coordinator.store.records import Device
from fedge.errors import ConfigError
from fedge.steps.contract import Reveals
from fedge.steps.descriptions.describe_labels import DescribeLabels, LabelsDescribed
from fedge.steps.descriptions.trial import Trial, Tried
from fedge.steps.training.train import Train, Trained
from fedge.tensors.layout import Layout
from fedge.wire.messages import BlobRef

log = logging.getLogger("fedge.method")

WARM_UP = 6  # rounds with everybody, before profiles exist; with 3, some runs at half participation mixed groups
PANEL = 2000  # devices that are "everybody", drawn by lot, where there are more, section 4
MAX_CLUSTERS = 8  # K, section 5
CLUSTERING = 3  # rounds of an asynchronous run that ask everybody and wait; the last is that of the trial
CLASS_MEANS = 0.1  # lambda in a network of convolutions, section 4.1


class Options(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The options of fedge. `mode` shift: for drifting class shares (15.6); all devices install one model, no mixture.

    `split` overrides the trial. never: no experts; always: experts whenever there is more than one cluster.
    `clustering` makes the experts' clusters. mctc: of the updates; aidc: of the groups; labels: of label features (CFIC
    section 3).
    `gamma`: server momentum; `rho`: share of the rounds before the trial. `local_pilot`: a tenth of the devices, at
    least ten, fit a local model and decide whether the others do (section 14). `buffer`: updates per step of an
    asynchronous server (section 4.2); 0: rounds wait for their devices. `class_means`: lambda, how strongly training
    draws features to the device's own class means (section 4.1); by default 0.1 in a network of
    convolutions without running statistics, else 0.
    """

    mode: Literal["mixture", "shift"] = "mixture"
    split: Literal["trial", "never", "always"] = "trial"
    clustering: Clustering = "mctc"
    gamma: Annotated[float, Meta(ge=0, lt=1)] = 0.5
    rho: Annotated[float, Meta(ge=0, le=1)] = 0.4
    local_pilot: bool = False
    buffer: Annotated[int, Meta(ge=0, le=10_000)] = 0
    class_means: Annotated[float, Meta(ge=0, le=1)] | None = None

    def __post_init__(self) -> None:
        if self.mode == "shift" and self.local_pilot:
            raise ValueError("local_pilot changes nothing with mode=shift: no mixture is made")


ABLATION: Final = "it only remade a row of fedge.md section 15.4: benchmarks/default_method.py has it as a class"


class Fedge(Mixtures):
    """fedge, the default method; `round` follows the table in section 1."""

    name = "fedge"
    HEEDS = SHARED
    Options: ClassVar[type[Struct]] = Options
    SELECTIONS = ("ccmab", "uniform", "fastest", "stratified")
    REFUSED = {
        **dict.fromkeys(
            (
                *("candidates", "energy", "final_fit", "gate", "guard", "local", "prior", "private_start"),
                *("private_steps", "shrinkage", "split=statistic", "temperature", "weights"),
            ),
            ABLATION,
        ),
    }

    def explain_no_patience(self) -> str:
        """Return why training cannot stop early: with a buffer orders are under way at any time."""
        busy = "with a buffer devices are at work for later models when it would stop"
        return super().explain_no_patience() or (busy if self.options.buffer else "")

    def set_up(self) -> None:
        """Refuse options that do not combine."""
        if self.settings.fine_tune and self.options.mode == "mixture":
            raise ConfigError("fedge ends in mixtures with a fine-tuned private model: leave out +ft")
        if self.options.buffer and self.settings.options.get("selection", "uniform") != "uniform":
            raise ConfigError(
                "with buffer nobody is chosen for a round: devices that are idle are drawn; leave out selection"
            )
        self._bandit = make_bandit_settings(self.settings)

    @classmethod
    def without_profile(cls, options: Any) -> str:
        """Return what a run does without profiles, which only choose who trains; an asynchronous run never has any."""
        if options.buffer:
            return super().without_profile(options)
        return "all form one group when it is chosen who trains; experts come from their updates, as always"

    def explain_classes(self) -> str:
        """Explain the need of classes, if training is to keep features near their means."""
        if self.options.class_means:
            return "draws features to the means of their classes (class_means): leave the option out"
        return super().explain_classes()

    def explain_no_relays(self) -> str:
        """Return why relays are impossible: an asynchronous run takes answers one by one."""
        return super().explain_no_relays() or (ONE_BY_ONE if self.options.buffer else "")

    def count_answers(self) -> Answers:
        """Count a profile or label feature, and two answers each for the trials and the look-ups (section 5)."""
        lookups = -(-(self.settings.first + self.settings.rounds - self._trial) // LOOKUP_EVERY)
        described = not self.options.buffer or self.options.clustering in {"aidc", "labels"}
        trials = 1 + (self.settings.first > 0)
        splits = self.options.split != "never"
        return Answers(descriptions=int(described), examinations=2 * (trials + lookups) * splits)

    def init(self, layout: Layout, model: BlobRef) -> FedgeState:
        """Return the state before round 1."""
        return FedgeState(round=0, layout=layout, initial_model=model, shared=ServerModel(model=model))

    def begin_campaign(self, state: FedgeState, changed: Collection[str]) -> FedgeState:
        """Return the state before the next campaign, in which the split is tested again (section 18)."""
        return carry_over(super().begin_campaign(state, changed), changed)

    def add_classes(self, state: FedgeState, layout: Layout, grow: Callable[[BlobRef], BlobRef]) -> FedgeState:
        """Return the state for a network with further outputs (section 18)."""
        return grow_state(state, layout, grow)

    async def round(self, state: FedgeState, fleet: Fleet) -> FedgeState:
        """Do steps 1 to 3 of section 1."""
        r = state.round + 1
        if self.options.buffer and not self._trial - CLUSTERING < r <= self._trial:
            return await self._do_server_step(state, fleet, r)
        warm = r - self.settings.first <= WARM_UP
        if not warm and not self.options.buffer:
            state = await profile_devices(state, fleet)
        present = find_responsive(state, fleet)
        tries, panel = not state.experts and r == self._trial, self._select_panel(present)
        choices = {} if tries else self._select(state, present, r)
        grouping.record_choices(fleet, choices)
        cohort = panel if tries or self.options.buffer or warm else self._select_cohort(state, choices, present, r)
        orders = {i: self._make_order(state, i, r, measure=bool(choices)) for i in cohort}
        state, answers = await run_and_record(state, fleet, "train", orders)
        updates = select_updates(answers)
        bandits = dict(enumerate(state.bandits)) | grouping.update_bandits(choices, answers)
        state = msgspec.structs.replace(state, bandits=tuple(bandits.values()))
        state = await self._apply_updates(state, updates, fleet, panel if set(panel) <= set(cohort) else ())
        if tries:
            state = await self._split(state, fleet, r)
        return finish_round(state, len(cohort), updates, primary=state.primary | find_primaries(state, updates, r))

    def recluster(self, state: FedgeState) -> FedgeState | None:
        """Remake profiles and groups with the present model; not after the split, since experts belong to clusters."""
        if state.experts:
            return None
        return msgspec.structs.replace(state, extractor=None, profiles={}, groups=(), bandits=(), n_moved=0)

    async def finish(self, state: FedgeState, fleet: Fleet) -> FedgeState:
        """Do steps 4 to 8 of section 1."""
        state = restore_past(state)
        if self.options.mode == "shift":
            return await install(self, state, fleet)
        r = state.round + 1
        state = await self.personalise(state, fleet, r)
        return msgspec.structs.replace(await self._equip(state, fleet), round=r)

    async def _do_server_step(self, state: FedgeState, fleet: Fleet, r: int) -> FedgeState:
        """Do one asynchronous step of the server with the next updates, before or after the split (section 4.2)."""

        def make_order(device_id: str) -> Train:
            return self._make_order(state, device_id, r, measure=False)

        buffer = await fill_buffer(self, state, fleet, state.seen, self.options.buffer, make_order)
        updates = buffer.updates
        state = await self._apply_updates(
            msgspec.structs.replace(state, seen=buffer.seen), updates, fleet, (), buffer.discounts
        )
        return finish_round(state, buffer.asked, updates, primary=state.primary | find_primaries(state, updates, r))

    async def _apply_updates(
        self,
        state: FedgeState,
        updates: Mapping[str, Trained],
        fleet: Fleet,
        panel: Collection[str],
        discounts: Mapping[str, float] = FRESH,
    ) -> FedgeState:
        """Return the state with models moved by the updates, if there are enough updates."""
        if len(updates) < self.settings.min_reports:
            return state
        if state.experts:
            if state.campaign > 1:
                state = join_clusters(state, {get_owner(key): update.cluster for key, update in updates.items()})
            return await train_experts(self, state, updates, fleet, discounts)
        return await train_shared(self, state, updates, fleet, panel, discounts)

    @property
    def _trial(self) -> int:
        """The round of the trial, R_w."""
        planned: int = round(self.options.rho * self.settings.rounds)
        return self.settings.first + planned

    def _select(self, state: FedgeState, present: Mapping[str, Device], r: int) -> Choices:
        """Select in each group as in FedEPC section 5; empty before there are groups, or with uniform selection."""
        assert self.selection is not None
        if self.selection == "uniform":
            return {}
        return choose(
            self.selection,
            {
                k: [grouping.make_arm(present[i], self.settings.sgd, state.shared.model) for i in group if i in present]
                for k, group in enumerate(state.groups)
            },
            dict(enumerate(state.bandits)),
            self._bandit,
            seed=(self.settings.seed, r),
            last_visit={k: bandit.selections for k, bandit in enumerate(state.bandits)},
        )

    def _select_panel(self, present: Collection[str]) -> list[str]:
        """Return all present devices, or `PANEL` of them if there are more, the same in every round (section 4)."""
        if len(present) <= PANEL:
            return list(present)
        lots = {i: hashlib.sha256(f"{self.settings.seed}.{i}".encode()).digest() for i in present}
        return sorted(sorted(present, key=lots.__getitem__)[:PANEL])

    def _select_cohort(self, state: FedgeState, choices: Choices, present: Mapping[str, Device], r: int) -> list[str]:
        """Return the chosen devices; without a choice, a draw within each group; before there are groups, all devices.

        Devices whose owners withhold profiles form a group of their own, which is always drawn from.
        """
        grouped = {i for group in state.groups for i in group}
        others = [i for i, d in present.items() if i not in grouped and d.n_samples and Reveals.PROFILE in d.withholds]
        if not choices and not state.groups:
            return list(present)
        rng, share = make_round_rng(self.settings, r), self.settings.participation
        if choices:
            return sorted(
                [*grouping.list_chosen(choices), *draw_uniform(others, compute_cohort_size(len(others), share), rng)]
            )
        groups = [others, *([i for i in group if i in present] for group in state.groups)]
        return sorted(i for group in groups for i in draw_uniform(group, compute_cohort_size(len(group), share), rng))

    def _make_order(self, state: FedgeState, device_id: str, r: int, *, measure: bool) -> Train:
        """Make a device's order. If it trained before, it keeps the initial model for step 4.

        `measure`: whether it measures losses for the bandits.
        """
        goes_on = self.options.mode == "mixture" and device_id in state.participations
        return Train(
            starts=list_starts(state, device_id, r),
            sgd=self.settings.sgd,
            codec=self.settings.codec,
            initial=state.initial_model if goes_on else None,
            class_means=self._get_class_means(state.layout, r) or UNSET,
            measure=measure,
        )

    def _get_class_means(self, layout: Layout, r: int) -> float:
        """Return lambda of section 4.1; 0 in the first round, when the features still mean nothing."""
        if r <= 1 or all(info.layer != "head" for info in layout.tensors):
            return 0.0
        asked: float | None = self.options.class_means
        if asked is not None or not self.problem.CLASSED:
            return asked or 0.0
        convolutions = any(len(info.shape) > 2 for info in layout.select_kind("param"))
        return CLASS_MEANS if convolutions and not layout.select_kind("buffer") else 0.0

    async def _split(self, state: FedgeState, fleet: Fleet, r: int) -> FedgeState:
        """Cluster the mean unit updates; make experts if the trial or the option `split` decides so (section 5)."""
        if state.directions is None:
            return state
        directions = dict(sorted(fleet.get_tensors(state.directions).items()))
        ids, z = tuple(directions), geometry.compute_embedding(np.stack(list(directions.values())))
        how = "mctc" if self.options.clustering in {"aidc", "labels"} else self.options.clustering
        seen = Directions(vectors=z, n_clusters=MAX_CLUSTERS)
        found = find_clusters(how, seen, rng=make_round_rng(self.settings, r))
        tau, separability = found.tau or 0.0, found.separability or 0.0
        clusters = tuple(tuple(ids[i] for i in members) for members in found.clusters)
        if self.options.clustering == "aidc":
            state, clusters = await cluster_by_group(state, fleet, ids)
        elif self.options.clustering == "labels":
            state, clusters = await cluster_by_label(state, fleet, ids)
        deltas: dict[str, float] = {}
        if len(clusters) > 1:
            state, deltas = await run_trial(self, state, fleet, clusters)
        statistic = compute_trial_statistic(list(deltas.values()))
        splits = len(clusters) > 1 and self.should_split(statistic, separability, len(ids))
        trial = TrialOutcome(
            ids=ids,
            clusters=clusters,
            tau=tau,
            separability=separability,
            statistic=statistic,
            deltas=deltas,
            split=splits,
            places=tuple((x, y) for x, y in np.round(geometry.project_to_plane(z), 4).tolist()),
        )
        if state.past is not None:
            past = update_past(state.past, state.shared.model, fleet, state.layout)
            state, answers = await try_past(msgspec.structs.replace(state, past=past), fleet)
            before = compute_trial_statistic(list(answers.values()))
            holds = self.should_split(before, past.trial.separability, len(answers))
            if holds and not (splits and statistic is not None and before is not None and statistic > before):
                return msgspec.structs.replace(retain_past(state, trial, answers), directions=None, last={})
        new = clusters if splits else ()
        fates = name_fates(state.campaign, state.past.trial.clusters if state.past else (), new)
        return msgspec.structs.replace(
            state,
            directions=None,
            last={},
            trial=trial,
            experts=tuple(ServerModel(model=find_start(state, members)) for members in new),
            past=None,
            lineage=add_fates(state.lineage, fates),
        )

    def compute_gamma(self, discounts: Collection[float]) -> float:
        """Return the option's momentum, reduced if updates are discounted (section 4.2)."""
        return float(self.options.gamma) * (sum(discounts) / len(discounts) if discounts else 1.0)

    def should_split(self, statistic: float | None, separability: float, n_devices: int) -> bool:
        """Return whether the trial speaks for a split, unless the option `split` decides (section 5, step 5)."""
        if self.options.split == "trial":
            return wants_split(statistic, separability, n_devices)
        return bool(self.options.split == "always")

    async def serve_late_joiners(self, state: FedgeState, fleet: Fleet) -> FedgeState:
        """Leave a mixture on each late joiner, or the global model if the device does not train."""
        if state.pool is not None:
            state = await self.admit(state, fleet, state.pool)
        return await self._equip(state, fleet)

    async def _equip(self, state: FedgeState, fleet: Fleet) -> FedgeState:
        """Install the global model on devices that do not train, since they lack labels to choose by (section 12)."""
        return await equip(self, state, fleet, {d.id: state.shared.model for d in fleet.get_inference_devices()})

    # ------------------------------------------------------------------------------------------------ what is seen

    def get_default_model(self, state: FedgeState) -> BlobRef:
        """Return the global model, which needs no labels to choose by (section 12)."""
        return state.shared.model

    def get_model(self, state: FedgeState, device_id: str) -> BlobRef:
        """Return the device's primary expert, or the global model."""
        if not state.experts:
            return state.shared.model
        primary = state.primary.get(device_id)
        return state.experts[primary.cluster].model if primary else list_offered_experts(state, device_id)[0].model

    def summarise(self, state: FedgeState) -> dict[str, Any]:
        """Return history, groups, clusters, the trial, selection counts, what was pooled, and bundles."""
        trial = msgspec.to_builtins(state.trial) if state.trial else None
        return super().summarise(state) | {
            "groups": {str(k): list(members) for k, members in enumerate(state.groups)},
            "trial": trial,
            "split": bool(state.experts),
            "clusters": {str(k): c for k, c in enumerate(trial["clusters"])} if trial and state.experts else {},
            "pool": msgspec.to_builtins(state.pool) if state.pool else None,
            "lineage": [describe_fate(fate) for fate in state.lineage if fate.campaign == state.campaign],
        }


# --------------------------------------------------------------------------------- step 1: profiles and groups


# ---------------------------------------------------------------------------------------- step 2: shared rounds


async def train_shared(
    method: Fedge,
    state: FedgeState,
    updates: Mapping[str, Trained],
    fleet: Fleet,
    panel: Collection[str],
    discounts: Mapping[str, float] = FRESH,
) -> FedgeState:
    """Move w by the weighted mean of the updates with momentum (section 4).

    Before the trial, the directions and last changes of the `panel` are kept, but only from rounds that asked all of
    it. In other rounds a device's direction depends as much on the round and its cohort as on the device.
    """
    seen = set() if state.trial else set(panel)
    directions = fleet.get_tensors(state.directions) if state.directions else {}

    def record_direction(device_id: str, direction: geometry.Vectors) -> None:
        before = directions[device_id].astype(np.float64) if device_id in directions else 0.0
        directions[device_id] = (before + direction).astype(np.float32)  # the sum of its unit updates (section 4)

    mean = await average(method, fleet, updates, state.layout, note=record_direction, whose=seen, discounts=discounts)
    shared = step_server(state.shared, mean, state.layout, fleet, gamma=method.compute_gamma(discounts.values()))
    if not seen:
        return msgspec.structs.replace(state, shared=shared)
    last = {i: LastUpdate(update=u.update, n_samples=u.n_samples) for i, u in updates.items() if i in seen}
    return msgspec.structs.replace(state, shared=shared, directions=fleet.put(directions), last=state.last | last)


# -------------------------------------------------------------------------------------- step 3: trial and split


async def cluster_by_label(state: FedgeState, fleet: Fleet, ids: Sequence[str]) -> tuple[FedgeState, Members]:
    """Cluster devices by equal label feature (CFIC section 3)."""
    asked = dict.fromkeys((i for i in find_responsive(state, fleet) if i in ids), DescribeLabels())
    state, answers = await run_and_record(state, fleet, "labels", asked)
    psi = {i: result.feature for i, result in select_results(answers, LabelsDescribed).items()}
    found = clustering.by_label([psi.get(i, -1) for i in ids])
    return state, tuple(tuple(ids[i] for i in members) for members in found)


async def run_trial(
    method: Fedge, state: FedgeState, fleet: Fleet, clusters: tuple[tuple[str, ...], ...]
) -> tuple[FedgeState, dict[str, float]]:
    """Make G and each E_k from the last changes; each device compares G with its E_k (section 5, steps 3, 4)."""
    w = fleet.get(state.shared.model, state.layout)
    means = await average_by_cluster(method, fleet, state.last, [state.last, *clusters], state.layout)
    old = state.shared.model
    models = [put_successor(fleet, old, mean.add_to(w), state.layout) if mean is not None else old for mean in means]
    first = {i: k for k, cluster in reversed(list(enumerate(clusters))) for i in cluster}
    trials = {
        i: Trial(global_model=models[0], expert=models[1 + first[i]])
        for i in find_responsive(state, fleet)
        if i in first
    }
    state, answers = await run_and_record(state, fleet, "trial", trials)
    return state, {i: tried.delta for i, tried in select_results(answers, Tried).items() if tried.delta is not None}


async def train_experts(
    method: Fedge,
    state: FedgeState,
    updates: Mapping[str, Trained],
    fleet: Fleet,
    discounts: Mapping[str, float] = FRESH,
) -> FedgeState:
    """Move every expert, after a split, by its members' changes from their own starts; w stays (section 5)."""
    assert state.trial is not None
    members = [[i for i in updates if get_owner(i) in cluster] for cluster in state.trial.clusters]
    means = await average_by_cluster(method, fleet, updates, members, state.layout, discounts=discounts)
    if discounts:  # section 4.2: an expert moves by the share of its members that have answered
        shares = [min(1.0, len(own) / len(cluster)) for own, cluster in zip(members, state.trial.clusters, strict=True)]
        means = tuple(mean and replace(mean, params=s * mean.params) for s, mean in zip(shares, means, strict=True))
    gammas = [method.compute_gamma([discounts[i] for i in own if i in discounts]) for own in members]
    experts = tuple(
        step_server(expert, mean, state.layout, fleet, gamma=gamma)
        for expert, mean, gamma in zip(state.experts, means, gammas, strict=True)
    )
    return msgspec.structs.replace(state, experts=experts)


# ------------------------------------------------------------------------------------------ devices that come late
