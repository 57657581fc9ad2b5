"""fedge over campaigns: docs/methods/fedge.md section 18."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from coordinator.methods.papers.fedge import Fedge
from coordinator.methods.papers.fedge_campaigns import (
    REMEMBERED,
    add_fates,
    describe_fate,
    find_sources,
    find_start,
    join_clusters,
    name_fates,
    retain_past,
    update_past,
)
from coordinator.methods.papers.fedge_state import Fate, FedgeState, PastSplit, TrialOutcome
from coordinator.methods.parts.server_optimizer import ServerModel
from coordinator.methods.settings import MethodSettings
from coordinator.methods.state import decode_state, encode_state
from coordinator.simulation.rounds import run_rounds
from fedge.steps.descriptions.profile import Profile
from fedge.steps.sgd import Sgd
from fedge.tensors.layout import Layout, Model, TensorInfo
from fedge.wire.messages import BlobRef
from tests.support.simulation import digits

SETTINGS = MethodSettings(rounds=10, sgd=Sgd(steps=5), options={"split": "always"})


def model(name: str) -> BlobRef:
    return BlobRef(digest=name * 64, size_bytes=1)


def split_state(*clusters: tuple[str, ...]) -> FedgeState:
    """The state at the end of a campaign with an expert, 0, 1, ... for each of these clusters."""
    trial = TrialOutcome(
        ids=(), clusters=clusters, tau=0.5, separability=0.9, statistic=2.0, deltas={}, split=bool(clusters)
    )
    return FedgeState(
        round=11,
        layout=Layout(tensors=(TensorInfo(name="w", shape=(1,)),)),
        initial_model=model("a"),
        shared=ServerModel(model=model("b"), velocity=model("c")),
        trial=trial,
        experts=tuple(ServerModel(model=model(str(k))) for k, _ in enumerate(clusters)),
    )


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        ("", "ab cd", "expert 0 is new; expert 1 is new"),
        ("ab cd", "cd ab", "expert 0 goes on from expert 1; expert 1 goes on from expert 0"),
        ("abcd", "ab cd", "expert 0 was split from expert 0; expert 1 was split from expert 0"),
        ("ab cd ef", "abcd ef", "expert 0 was merged from the experts 0 and 1; expert 1 goes on from expert 2"),
        ("abc def", "abf dec", "expert 0 goes on from expert 0; expert 1 goes on from expert 1"),
        (
            "ab cd",
            "ab xy",
            "expert 0 goes on from expert 0; expert 1 is new; expert 1 of the campaign before has ended",
        ),
        ("ab cd", "", "the experts 0 and 1 were merged in the shared model"),
        ("", "", ""),
    ],
)
def test_what_becomes_of_experts_is_told(old: str, new: str, told: str) -> None:
    assert "; ".join(map(describe_fate, name_fates(2, old.split(), new.split()))) == told


def test_half_of_the_members_make_no_source() -> None:
    assert find_sources(["abcd"], ["abxy", "abc", ""]) == [(), (0,), ()]


def test_the_lineage_does_not_grow_for_ever() -> None:
    lineage: tuple[Fate, ...] = ()
    for campaign in range(1, 3 * REMEMBERED):
        lineage = add_fates(lineage, [Fate(campaign=campaign, kind="born", expert=k) for k in range(2)])
    assert len(lineage) == 2 * REMEMBERED
    assert lineage[-1].campaign == 3 * REMEMBERED - 1
    assert add_fates(lineage, ()) == lineage


def test_a_campaign_keeps_the_models_and_puts_the_experts_aside() -> None:
    method, state = Fedge(SETTINGS), split_state(("a", "b"), ("c", "d"))
    begun = method.begin_campaign(state, ["a"])
    assert (begun.campaign, begun.round) == (2, 11)
    assert begun.shared == ServerModel(model=state.shared.model)
    assert (begun.experts, begun.trial, begun.primary, begun.installed) == ((), None, {}, {})
    assert begun.past == PastSplit(trial=state.trial, experts=state.experts, shared=state.shared.model, changed=("a",))
    later = method.begin_campaign(begun, ["c"]).past
    assert later is not None
    assert later == msgspec.structs.replace(begun.past, changed=("a", "c")), "a campaign without a trial hands it on"
    without = msgspec.structs.replace(state, trial=msgspec.structs.replace(state.trial, split=False), experts=())
    assert method.begin_campaign(without, []).past is None
    assert decode_state(encode_state(begun), FedgeState) == begun


def test_an_expert_goes_on_from_the_one_with_most_of_its_members() -> None:
    begun = Fedge(SETTINGS).begin_campaign(split_state(("a", "b"), ("c", "d")), [])
    assert find_start(begun, ("a", "b", "c")) == model("0")
    assert find_start(begun, ("c", "d")) == model("1")
    assert find_start(begun, ("a", "c")) == begun.shared.model
    assert find_start(begun, ("x",)) == begun.shared.model
    assert find_start(split_state(), ("a",)) == model("b")


def test_experts_move_as_the_shared_model_has_moved(tmp_path: Path) -> None:
    fleet, layout, first, _ = digits(tmp_path, n=2, limit=100)
    w = fleet.get(first, layout)
    nothing = w.buffers, w.counters
    expert, now = (fleet.put_model(Model(w.params + step, *nothing), layout) for step in (1.0, 0.25))
    past = PastSplit(
        trial=split_state(("a",)).trial, experts=(ServerModel(model=expert, velocity=expert),), shared=first
    )
    moved = update_past(past, now, fleet, layout)
    assert moved.shared == now
    assert moved.experts[0].velocity is None
    assert fleet.get(moved.experts[0].model, layout).params == pytest.approx(w.params + 1.25, abs=0.02)  # int8


def test_kept_experts_keep_who_has_not_changed_and_others_choose() -> None:
    begun = Fedge(SETTINGS).begin_campaign(split_state(("a", "b"), ("b", "c")), ["a", "b"])
    now = msgspec.structs.replace(split_state(("x",)).trial, ids=("a", "b", "c"), separability=0.3, split=False)
    kept = retain_past(begun, now, {"a": 0.5, "c": 0.7})
    assert kept.trial is not None
    assert kept.trial.clusters == ((), ("c",))
    assert (kept.trial.ids, kept.trial.separability, kept.trial.split) == (("a", "b", "c"), 0.9, True)
    assert kept.trial.statistic == pytest.approx(6.0)
    assert kept.experts == split_state(("a", "b"), ("b", "c")).experts
    assert kept.past is None
    assert [describe_fate(fate) for fate in kept.lineage] == [f"expert {k} goes on from expert {k}" for k in (0, 1)]
    joined = join_clusters(kept, {"b": 0, "a": 1, "c": 0, "x": -1})
    assert joined.trial is not None
    assert joined.trial.clusters == (("b",), ("a", "c")), "who is in a cluster stays there"
    assert join_clusters(joined, {"c": 0}) == joined


async def test_experts_are_kept_while_they_are_better_than_the_shared_model(tmp_path: Path) -> None:
    """The devices of the turned group and the others find their expert again, also those that changed places."""
    fleet, layout, first, group_of = digits(tmp_path, n=6, limit=1200, n_groups=2)
    settings = msgspec.structs.replace(SETTINGS, options={}, rounds=12, sgd=Sgd())
    method = Fedge(msgspec.structs.replace(settings, options={"split": "always"}))
    state = await run_rounds(method, method.init(layout, first), fleet)
    groups = {tuple(sorted({group_of[i] for i in members})) for members in state.trial.clusters}
    assert groups == {(0,), (1,)}, "the toy has clear groups"
    one, other = (next(i for i in fleet.workers if group_of[i] == group) for group in (0, 1))
    mine, theirs = fleet.data(one), fleet.data(other)
    fleet.give(one, theirs)
    fleet.give(other, mine)
    again = Fedge(msgspec.structs.replace(settings, first=state.round, options={"split": "always"}))
    ended = await run_rounds(again, again.begin_campaign(state, [one, other]), fleet)
    moved = group_of | {one: group_of[other], other: group_of[one]}
    assert {tuple(sorted({moved[i] for i in members})) for members in ended.trial.clusters if members} == {(0,), (1,)}


async def test_the_next_campaign_tests_the_split_again_and_profiles_only_who_changed(tmp_path: Path) -> None:
    fleet, layout, first, _ = digits(tmp_path, n=6, limit=600)
    method = Fedge(SETTINGS)
    state = await run_rounds(method, method.init(layout, first), fleet)
    assert state.lineage == tuple(Fate(campaign=1, kind="born", expert=k) for k in range(len(state.experts)))
    profiled = state.profiles["d01"].profile
    again = Fedge(msgspec.structs.replace(SETTINGS, first=state.round))
    fleet.orders.clear()
    begun = again.begin_campaign(state, ["d01"])
    ended = await run_rounds(again, begun, fleet)
    assert fleet.sent(Profile).keys() == {"d01"}
    assert ended.profiles["d01"].profile == profiled, "the same samples, the same extractor"
    trials = {number for number, label, *_ in fleet.asked if label == "trial" and number > state.round}
    assert trials == {state.round + 4}
    assert {number for number, label, *_ in fleet.asked if label == "trial-past"} == trials
    assert {fate.kind for fate in ended.lineage if fate.campaign == 2} <= {"kept", "merged", "split", "born", "died"}
    assert again.summarise(ended)["lineage"] == [describe_fate(f) for f in ended.lineage if f.campaign == 2]
    assert ended.round == again.last + 1 == state.round + 11


async def test_a_campaign_that_ends_before_its_trial_goes_on_with_the_last_experts(tmp_path: Path) -> None:
    fleet, layout, first, _ = digits(tmp_path, n=4, limit=300)
    method = Fedge(SETTINGS)
    state = await run_rounds(method, method.init(layout, first), fleet)
    again = Fedge(msgspec.structs.replace(SETTINGS, rounds=1, first=state.round))
    ended = await run_rounds(again, again.begin_campaign(state, []), fleet)
    assert ended.experts == state.experts
    assert ended.trial == state.trial
    assert len(ended.installed) == 4
