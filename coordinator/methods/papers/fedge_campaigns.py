"""fedge over campaigns: what the next one keeps, and what becomes of the experts; docs/methods/fedge.md section 18."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence

import msgspec

from coordinator.aggregation.pooled import compute_trial_statistic
from coordinator.fleet.fleet import Fleet
from coordinator.fleet.versions import put_successor
from coordinator.methods.papers.fedge_state import Fate, FedgeState, PastSplit, TrialOutcome
from coordinator.methods.parts import grouping
from coordinator.methods.parts.server_optimizer import ServerModel
from coordinator.methods.parts.unresponsive import find_responsive, run_and_record
from coordinator.methods.rounds import select_results
from fedge.steps.descriptions.trial import Trial, Tried
from fedge.tensors.layout import Layout, Model
from fedge.wire.messages import BlobRef

Members = Sequence[Collection[str]]
MOST = 0.5
"""Share of the members of a cluster, old or new, above which the other holds most of it."""
REMEMBERED = 20
"""Campaigns whose lineage the state keeps, so that it does not grow for ever."""


def carry_over(state: FedgeState, changed: Collection[str]) -> FedgeState:
    """Return the state with which a campaign begins: w without velocity, groups and profiles, experts put aside.

    `changed`: devices whose samples have changed, and whose profiles are outdated.
    """
    return msgspec.structs.replace(
        state,
        shared=ServerModel(model=state.shared.model),
        profiles=grouping.mark_outdated(state.profiles, changed),
        past=put_aside(state, changed),
        directions=None,
        last={},
        trial=None,
        experts=(),
        primary={},
        pool=None,
    )


def grow_state(state: FedgeState, layout: Layout, grow: Callable[[BlobRef], BlobRef]) -> FedgeState:
    """Return the state of a campaign that begins, with further outputs of all models; profiles do not see outputs."""
    past = state.past
    if past is not None:
        experts = tuple(ServerModel(model=grow(expert.model)) for expert in past.experts)
        past = msgspec.structs.replace(past, experts=experts, shared=grow(past.shared))
    return msgspec.structs.replace(
        state,
        layout=layout,
        initial_model=grow(state.initial_model),
        shared=ServerModel(model=grow(state.shared.model)),
        extractor=None if state.extractor is None else grow(state.extractor),
        past=past,
        seen=(),
        descents={},
    )


def put_aside(state: FedgeState, changed: Collection[str]) -> PastSplit | None:
    """Return the split that the next campaign starts from; that of the campaign before if this one had no trial."""
    if state.trial is None:
        past = state.past
        return past and msgspec.structs.replace(past, changed=tuple(sorted({*past.changed, *changed})))
    if not state.experts:
        return None
    return PastSplit(
        trial=state.trial, experts=state.experts, shared=state.shared.model, changed=tuple(sorted(changed))
    )


def update_past(past: PastSplit, now: BlobRef, fleet: Fleet, layout: Layout) -> PastSplit:
    """Return the past split with each expert moved as w has moved since: e_k + (w - w'). `now`: w."""
    w, before = fleet.get(now, layout), fleet.get(past.shared, layout)

    def move(expert: ServerModel) -> ServerModel:
        params = fleet.get(expert.model, layout).params + (w.params - before.params)
        moved = Model(params, w.buffers, w.counters)
        return ServerModel(model=put_successor(fleet, expert.model, moved, layout))

    return msgspec.structs.replace(past, experts=tuple(map(move, past.experts)), shared=now)


async def try_past(state: FedgeState, fleet: Fleet) -> tuple[FedgeState, dict[str, float]]:
    """Let each device compare w with its first expert of the past; return their answers, by device (section 18)."""
    assert state.past is not None
    first = {i: k for k, cluster in reversed(list(enumerate(state.past.trial.clusters))) for i in cluster}
    trials = {
        i: Trial(global_model=state.shared.model, expert=state.past.experts[first[i]].model)
        for i in find_responsive(state, fleet)
        if i in first
    }
    state, answers = await run_and_record(state, fleet, "trial-past", trials)
    return state, {i: tried.delta for i, tried in select_results(answers, Tried).items() if tried.delta is not None}


def retain_past(state: FedgeState, now: TrialOutcome, deltas: Mapping[str, float]) -> FedgeState:
    """Return the state with the experts of the past; changed devices are in no cluster until they choose an expert.

    `now`: the trial of this campaign's clusters. `deltas`: the answers to the trial of the past's.
    """
    past = state.past
    assert past is not None
    clusters = tuple(tuple(i for i in members if i not in past.changed) for members in past.trial.clusters)
    trial = msgspec.structs.replace(
        now,
        clusters=clusters,
        separability=past.trial.separability,
        statistic=compute_trial_statistic(list(deltas.values())),
        deltas=dict(deltas),
        split=True,
    )
    fates = tuple(
        Fate(campaign=state.campaign, kind="kept", expert=k, sources=(k,)) for k, _ in enumerate(past.experts)
    )
    return msgspec.structs.replace(
        state, trial=trial, experts=past.experts, past=None, lineage=add_fates(state.lineage, fates)
    )


def join_clusters(state: FedgeState, chosen: Mapping[str, int]) -> FedgeState:
    """Return the state in which each device that is in no cluster is in that of the expert it has chosen.

    `chosen`: numbers of experts by device; negative if it trained another model.
    """
    assert state.trial is not None
    inside = {i for members in state.trial.clusters for i in members}
    new = {i: k for i, k in chosen.items() if k >= 0 and i not in inside}
    if not new:
        return state
    clusters = tuple(
        tuple(sorted((*members, *(i for i, own in new.items() if own == k))))
        for k, members in enumerate(state.trial.clusters)
    )
    return msgspec.structs.replace(state, trial=msgspec.structs.replace(state.trial, clusters=clusters))


def restore_past(state: FedgeState) -> FedgeState:
    """Return the state with the past split again if the campaign ends before its trial."""
    if state.trial is not None or state.past is None:
        return state
    return msgspec.structs.replace(state, trial=state.past.trial, experts=state.past.experts, past=None)


def find_sources(old: Members, new: Members) -> list[tuple[int, ...]]:
    """Find for each new cluster the old ones that it has most of, or that have most of it; ascending."""

    def is_source(before: Collection[str], now: Collection[str]) -> bool:
        common = len(set(before).intersection(now))
        return common > MOST * min(len(before), len(now)) if before and now else False

    return [tuple(j for j, before in enumerate(old) if is_source(before, now)) for now in new]


def name_fates(campaign: int, old: Members, new: Members) -> tuple[Fate, ...]:
    """Say what has become of the experts of the last campaign: kept, merged, split or died, and which were born.

    `old`, `new`: the members of the clusters. Without new clusters all old experts are merged in the shared model.
    """
    if not new:
        return (Fate(campaign=campaign, kind="merged", sources=tuple(range(len(old)))),) if old else ()
    sources = find_sources(old, new)
    heirs = [sum(j in own for own in sources) for j in range(len(old))]
    fates = [
        Fate(
            campaign=campaign,
            kind="born" if not own else "merged" if len(own) > 1 else "split" if heirs[own[0]] > 1 else "kept",
            expert=k,
            sources=own,
        )
        for k, own in enumerate(sources)
    ]
    died = [Fate(campaign=campaign, kind="died", sources=(j,)) for j, n in enumerate(heirs) if n == 0]
    return (*fates, *died)


def add_fates(lineage: Sequence[Fate], new: Sequence[Fate]) -> tuple[Fate, ...]:
    """Return the lineage with new fates, without those of campaigns that are too long ago."""
    oldest = max((fate.campaign for fate in new), default=0) - REMEMBERED
    return (*(fate for fate in lineage if fate.campaign > oldest), *new)


def find_start(state: FedgeState, members: Collection[str]) -> BlobRef:
    """Find the model that the expert of a new cluster starts from: that of the old cluster with most of its members.

    The shared model if no old cluster has more than half of them; of several, the first with the largest overlap.
    """
    if state.past is None:
        return state.shared.model
    common = [len(set(members).intersection(old)) for old in state.past.trial.clusters]
    best = max(range(len(common)), key=lambda j: (common[j], -j))
    return state.past.experts[best].model if common[best] > MOST * len(members) else state.shared.model


def describe_fate(fate: Fate) -> str:
    """Describe a fate for people; experts are numbered as in the summary's clusters."""
    before = " and ".join(str(j) for j in fate.sources)
    match fate.kind:
        case "kept":
            return f"expert {fate.expert} goes on from expert {before}"
        case "split":
            return f"expert {fate.expert} was split from expert {before}"
        case "merged" if fate.expert is None:
            return f"the experts {before} were merged in the shared model"
        case "merged":
            return f"expert {fate.expert} was merged from the experts {before}"
        case "born":
            return f"expert {fate.expert} is new"
        case "died":
            return f"expert {before} of the campaign before has ended"
