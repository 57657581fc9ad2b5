"""Masked sums on simulated fleets: what the server learns, who may drop out, and what is refused."""

from __future__ import annotations

import dataclasses
import logging
from functools import reduce
from pathlib import Path
from typing import ClassVar

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.aggregation.protection import Protection
from coordinator.fleet.fleet import Answer, Fleet
from coordinator.fleet.masked import MaskedFleet, select_summable
from coordinator.methods.baselines.fedavg import FedAvg
from coordinator.methods.catalogue import make_method
from coordinator.methods.method import Method
from coordinator.methods.rounds import select_updates
from coordinator.methods.settings import MethodSettings
from coordinator.methods.state import encode_state
from coordinator.simulation.rounds import run_rounds
from edge_agent.device.worker import Worker
from fedge.errors import ConfigError
from fedge.privacy.egress import PRESETS, Rules
from fedge.privacy.masked_sums import Sums
from fedge.steps.contract import Action, Declined, Reveals, Unsupported, load_installed_steps
from fedge.steps.masked.confirm_sum import ConfirmSum
from fedge.steps.masked.mask_keys import MaskKeys
from fedge.steps.masked.mask_shares import MaskShares
from fedge.steps.masked.train_masked import TrainMasked, compute_common_digest
from fedge.steps.masked.unmask import Unmask
from fedge.steps.sgd import Sgd
from fedge.steps.training.train import Start, Train
from fedge.tensors.fixed_point import PARAMS
from fedge.tensors.layout import Codec, Layout
from fedge.wire.messages import BlobRef, Why
from tests.support import simulation
from tests.support.simulation import digits

MASKED = Protection(average="mean", masking=True)
SETTINGS = MethodSettings(
    rounds=3, sgd=Sgd(steps=3), codec=Codec.FLOAT32, down="float32", protection=MASKED, participation=1.0
)
PLAIN = MethodSettings(
    rounds=3, sgd=Sgd(steps=3), codec=Codec.FLOAT32, down="float32", protection=Protection(average="mean")
)
STEPS = (MaskKeys, MaskShares, TrainMasked, ConfirmSum, Unmask)
NONE = Sums()
LATE = (ConfirmSum, Unmask)
"""Who is silent then is summed all the same."""


class Lossy(simulation.Fleet):
    """Devices that drop out at a step, by its name; `seen`: all actions, by step and device."""

    unresponsive_at: dict[str, frozenset[str]] = {}

    async def run(self, label: str, actions: dict[str, Action]) -> dict[str, Answer]:
        self.seen = getattr(self, "seen", {})
        for i, action in actions.items():
            self.seen[action.STEP, i] = action
        step = next((action.STEP for action in actions.values()), "")
        self.unresponsive = self.unresponsive_at.get(step, frozenset())
        return await super().run(label, actions)


def fleet_of(home: Path, n: int = 8, **made: object) -> tuple[Lossy, Layout, BlobRef]:
    fleet, layout, first, _ = digits(home, n=n, limit=60 * n, **made)
    fleet.__class__ = Lossy
    return fleet, layout, first  # type: ignore[return-value]


def masked(fleet: Fleet, layout: Layout, sums: Sums = NONE, **options: object) -> MaskedFleet:
    given = {"weights": "samples", "min_cohort": 5, "sums": sums, "seed": (0, 1), **options}
    return MaskedFleet(fleet, layout, **given)  # type: ignore[arg-type]


def order(first: BlobRef, cluster: int = -1) -> Train:
    return Train(starts=(Start(model=first, cluster=cluster),), sgd=Sgd(steps=3), codec=Codec.FLOAT32)


def bound(fleet: Fleet, devices: list[str]) -> float:
    """What the rounding may move a parameter's mean by: cohort / 2 units, and float32 of the result."""
    n = {device.id: device.n_samples for device in fleet.get_devices()}
    heaviest, total = max(n[i] for i in devices), sum(n[i] for i in devices)
    return len(devices) / 2 * 2.0 ** -PARAMS.compute_fraction_bits(len(devices), heaviest) / total + 1e-6


@pytest.mark.parametrize("model", ["mlp", "cnn"])
async def test_the_sum_is_the_plain_one_up_to_the_stated_rounding(tmp_path, model) -> None:
    """With the cnn, also of what is no parameter."""
    fleet, layout, first = fleet_of(tmp_path, model=model)
    ids = [device.id for device in fleet.get_devices()]
    plain = select_updates(await fleet.run("plain", {i: order(first) for i in ids}))
    found = select_updates(await masked(fleet, layout).run("train", {i: order(first) for i in ids}))
    assert list(found) == ids
    (mean,) = {u.update for u in found.values()}
    n = np.array([u.n_samples for u in plain.values()])
    for name in ("params", "buffers", "counters"):
        rows = np.stack([getattr(fleet.get(u.update, layout), name) for u in plain.values()])
        np.testing.assert_allclose(getattr(fleet.get(mean, layout), name), n @ rows / n.sum(), atol=bound(fleet, ids))
    assert {i: u.val_score for i, u in found.items()} == {i: u.val_score for i, u in plain.items()}


@pytest.mark.parametrize("step", STEPS, ids=lambda step: step.STEP)
async def test_who_drops_out_at_any_step_is_recovered_from(tmp_path, step) -> None:
    """The sum is that of the others; who only does not help to open it is in it."""
    fleet, layout, first = fleet_of(tmp_path, n=9)
    fleet.unresponsive_at = {step.STEP: frozenset({"d01", "d04"})}
    found = await masked(fleet, layout).run("train", dict.fromkeys([d.id for d in fleet.get_devices()], order(first)))
    there = [i for i in found if step in LATE or i not in {"d01", "d04"}]
    assert sorted(select_updates(found)) == there
    assert [i for i, answer in found.items() if answer.result is None] == [i for i in found if i not in there]
    fleet.unresponsive_at = {}
    plain = select_updates(await fleet.run("plain", dict.fromkeys(there, order(first))))
    n = np.array([u.n_samples for u in plain.values()])
    rows = np.stack([fleet.get(u.update, layout).params for u in plain.values()])
    mean = fleet.get(select_updates(found)[there[0]].update, layout).params
    np.testing.assert_allclose(mean, n @ rows / n.sum(), atol=bound(fleet, list(found)))


async def test_dropouts_at_all_steps_of_one_round(tmp_path) -> None:
    fleet, layout, first = fleet_of(tmp_path, n=12)
    fleet.unresponsive_at = {step.STEP: frozenset({f"d{2 * k + 1:02d}"}) for k, step in enumerate(STEPS)}
    found = await masked(fleet, layout).run("train", dict.fromkeys([d.id for d in fleet.get_devices()], order(first)))
    assert sorted(set(found) - set(select_updates(found))) == ["d01", "d03", "d05"]


@pytest.mark.parametrize("step", STEPS, ids=lambda step: step.STEP)
@pytest.mark.parametrize(("n", "silent"), [(6, 1), (10, 3)])
async def test_a_third_of_a_small_cohort_may_drop_out_at_any_step(tmp_path, step, n, silent) -> None:
    """Where enough are left for a sum: of six one, of ten three."""
    fleet, layout, first = fleet_of(tmp_path, n=n)
    fleet.unresponsive_at = {step.STEP: frozenset(f"d{k:02d}" for k in range(silent))}
    found = await masked(fleet, layout).run("train", dict.fromkeys([d.id for d in fleet.get_devices()], order(first)))
    assert len(select_updates(found)) == (n if step in LATE else n - silent)


@pytest.mark.parametrize("step", STEPS, ids=lambda step: step.STEP)
async def test_of_a_cohort_of_which_not_all_are_neighbours_some_may_drop_out_at_any_step(tmp_path, step) -> None:
    fleet, layout, first = fleet_of(tmp_path, n=88)
    gone = frozenset(f"d{k:02d}" for k in range(0, 88, 16))  # 82 are left
    fleet.unresponsive_at = {step.STEP: gone}
    ids = [device.id for device in fleet.get_devices()]
    found = await masked(fleet, layout).run("train", dict.fromkeys(ids, order(first)))
    there = [i for i in ids if step in LATE or i not in gone]
    assert sorted(select_updates(found)) == there
    if step is not Unmask:  # not twice the same
        return
    plain = select_updates(await fleet.run("plain", dict.fromkeys(there, order(first))))
    n = np.array([u.n_samples for u in plain.values()])
    rows = np.stack([fleet.get(u.update, layout).params for u in plain.values()])
    mean = fleet.get(select_updates(found)[there[0]].update, layout).params
    np.testing.assert_allclose(mean, n @ rows / n.sum(), atol=bound(fleet, there))


@pytest.mark.parametrize(("n", "silent"), [(5, 2), (10, 4), (12, 4)])
async def test_a_sum_that_too_few_confirm_stays_closed_and_it_is_said(tmp_path, caplog, n, silent) -> None:
    fleet, layout, first = fleet_of(tmp_path, n=n)
    fleet.unresponsive_at = {"confirm_sum": frozenset(f"d{k:02d}" for k in range(silent))}
    wrapped = masked(fleet, layout)
    with caplog.at_level(logging.WARNING, logger="fedge"):
        found = await wrapped.run("train", dict.fromkeys([d.id for d in fleet.get_devices()], order(first)))
    assert all(isinstance(answer.result, Declined) for answer in found.values())
    assert f"{n - silent} of {n} devices of the cohort have confirmed the sum" in caplog.text
    assert not any(name == "unmask" for name, _ in fleet.seen)
    assert list(wrapped.sums) == [tuple(found)], "some have confirmed it, and would refuse one that is close to it"


async def test_who_has_not_trained_but_is_there_confirms_as_well(tmp_path) -> None:
    """Of ten four have no samples: six confirm are too few."""
    fleet, layout, first = fleet_of(tmp_path, n=10)
    for i in ("d00", "d03", "d05", "d08"):
        data = fleet.data(i)
        fleet.give(i, dataclasses.replace(data, sensitive=np.ones_like(data.sensitive)))
    found = await masked(fleet, layout).run("train", dict.fromkeys([d.id for d in fleet.get_devices()], order(first)))
    assert len(select_updates(found)) == 6
    assert sum(name == "confirm_sum" for name, _ in fleet.seen) == 10
    assert sum(name == "unmask" for name, _ in fleet.seen) == 6


async def test_a_device_with_the_four_steps_of_before_is_left_out_with_what_to_do(tmp_path) -> None:
    """It is asked for nothing."""

    class Earlier(MaskKeys, frozen=True, kw_only=True):
        VERSION: ClassVar = 1

    fleet, layout, first = fleet_of(tmp_path)
    old = fleet.workers["d02"]
    fleet.workers["d02"] = Worker(
        "d02", old.task, old.data, old.home, steps={**load_installed_steps(), "mask_keys": Earlier}
    )
    found = await masked(fleet, layout).run("train", dict.fromkeys([d.id for d in fleet.get_devices()], order(first)))
    assert len(select_updates(found)) == 7
    refused = found["d02"].result
    assert isinstance(refused, Unsupported)
    assert refused.reason == ("it does not know step mask_keys version 2: update fedge there, or install the step")
    assert [name for name, i in fleet.seen if i == "d02"] == ["mask_keys"]


async def test_too_many_dropouts_change_nothing_and_it_is_said(tmp_path, caplog) -> None:
    """Of eight devices each has seven neighbours, of whom four must show their shares."""
    fleet, layout, first = fleet_of(tmp_path)
    fleet.unresponsive_at = {"unmask": frozenset(f"d{k:02d}" for k in range(5))}
    method = FedAvg(SETTINGS)
    fleet.round = 1
    with caplog.at_level(logging.WARNING, logger="fedge"):
        after = await method.advance(method.init(layout, first), fleet)
    assert (after.model, after.history[-1].answered, after.participations) == (first, 0, {})
    assert "event=sum_lost devices=8" in caplog.text
    assert "of 7 neighbours of d00 have answered, 4 are needed" in caplog.text
    assert list(after.sums) == [tuple(f"d{k:02d}" for k in range(8))], "some devices have opened it"


async def test_devices_whose_sum_is_lost_are_not_taken_for_unresponsive(tmp_path) -> None:
    fleet, layout, first = fleet_of(tmp_path)
    fleet.unresponsive_at = {"unmask": frozenset(f"d{k:02d}" for k in range(5))}
    found = await masked(fleet, layout).run("train", dict.fromkeys([d.id for d in fleet.get_devices()], order(first)))
    assert all(isinstance(answer.result, Declined) for answer in found.values())


@pytest.mark.parametrize("step", [step for step in STEPS if step not in LATE], ids=lambda step: step.STEP)
async def test_fewer_than_the_smallest_cohort_are_not_summed(tmp_path, step) -> None:
    fleet, layout, first = fleet_of(tmp_path, n=5)
    fleet.unresponsive_at = {step.STEP: frozenset({"d00"})}
    wrapped = masked(fleet, layout)
    found = await wrapped.run("train", dict.fromkeys([d.id for d in fleet.get_devices()], order(first)))
    assert not select_updates(found)
    assert wrapped.sums == NONE
    assert not any(name in {"confirm_sum", "unmask"} for name, _ in fleet.seen)


async def test_a_device_wants_no_fewer_than_its_owner(tmp_path) -> None:
    """Whatever the coordinator says."""
    fleet, layout, first = fleet_of(tmp_path, n=4)
    wrapped = masked(fleet, layout, min_cohort=3)
    found = await wrapped.run("train", dict.fromkeys([d.id for d in fleet.get_devices()], order(first)))
    assert not select_updates(found)
    assert not any(name == "train_masked" for name, _ in fleet.seen)


async def test_some_are_left_out_where_a_sum_would_differ_by_few(tmp_path) -> None:
    fleet, layout, first = fleet_of(tmp_path, n=12)
    everybody = tuple(device.id for device in fleet.get_devices())
    wrapped = masked(fleet, layout, sums=NONE.with_sum(everybody))
    fleet.unresponsive_at = {"train_masked": frozenset({"d03"})}
    found = await wrapped.run("train", dict.fromkeys(everybody, order(first)))
    assert len(select_updates(found)) == 7
    assert list(wrapped.sums) == [everybody, tuple(select_updates(found))]
    left_out = [i for i, answer in found.items() if isinstance(answer.result, Declined)]
    assert len(left_out) == 4, "they have dropped out as well, for the sum"


async def test_the_sums_of_a_run_never_differ_by_few(tmp_path) -> None:
    """One device more in each round drops out in the middle of it, then comes back."""
    fleet, layout, first = fleet_of(tmp_path, n=12)
    method = FedAvg(MethodSettings(rounds=6, sgd=Sgd(steps=1), protection=MASKED))
    state = method.init(layout, first)
    for number in range(1, 7):
        fleet.round = number
        fleet.unresponsive_at = {"train_masked": frozenset(f"d{k:02d}" for k in range(number // 2))}
        state = await method.advance(state, fleet)
    assert len(sums := list(state.sums)) > 1
    assert not any(reduce(Sums.with_sum, sums[:k], NONE).explain_too_close(one, 5) for k, one in enumerate(sums))


@given(st.data())
def test_whoever_may_be_summed_is_admissible(data) -> None:
    names = [f"d{k}" for k in range(14)]
    subsets = st.lists(st.sampled_from(names), unique=True, max_size=14).map(lambda x: tuple(sorted(x)))
    earlier = NONE
    for k in range(data.draw(st.integers(1, 6))):
        there = data.draw(subsets)
        found = select_summable(there, earlier, 4, np.random.default_rng(k))
        assert set(found) <= set(there)
        assert not found or not earlier.explain_too_close(found, 4)
        assert found or earlier == NONE or len(there) < 14
        earlier = earlier.with_sum(found) if found else earlier


def test_admissible_by_hand() -> None:
    rng = np.random.default_rng(0)
    letters = tuple("abcdefgh")
    assert select_summable(letters, NONE, 3, rng) == letters
    assert select_summable(letters, NONE.with_sum(letters), 3, rng) == letters, "the same once more"
    assert len(select_summable(letters[1:], NONE.with_sum(letters), 3, rng)) == 5
    assert select_summable(letters, NONE.with_sum(letters[:7]), 3, rng) == letters[:7], "the eighth alone would be seen"
    assert select_summable("ab", NONE, 3, rng) == ()


# --------------------------------------------------------------------------------------------------- hostile devices


class Lying(Lossy):
    """d02 shows false shares of the secrets of all its neighbours."""

    async def run(self, label: str, actions: dict[str, Action]) -> dict[str, Answer]:
        found = await super().run(label, actions)
        if "d02" in found and label.endswith("-unmask"):
            shown = found["d02"].result
            seeds = {k: bytes([share[0], share[1] ^ 1]) + share[2:] for k, share in shown.seeds.items()}
            found["d02"] = Answer("d02", type(shown)(seeds=seeds, keys=shown.keys))
        return found


class Forging(Lossy):
    """d02 signs something else at a step: `forged_at`, by the label."""

    forged_at = ""

    async def run(self, label: str, actions: dict[str, Action]) -> dict[str, Answer]:
        found = await super().run(label, actions)
        if "d02" in found and label == self.forged_at:
            field = "confirmation" if label.endswith("-confirm") else "statement"
            found["d02"] = Answer("d02", msgspec.structs.replace(found["d02"].result, **{field: bytes(64)}))
        return found


@pytest.mark.parametrize(("label", "n_summed"), [("train", 7), ("train-confirm", 8)])
async def test_a_forged_signature_costs_its_device_alone(tmp_path, label, n_summed) -> None:
    """The neighbours would not confirm a sum with it; of its confirmation nobody hears."""
    fleet, layout, first = fleet_of(tmp_path)
    fleet.__class__ = Forging
    fleet.forged_at = label
    found = await masked(fleet, layout).run("train", dict.fromkeys([d.id for d in fleet.get_devices()], order(first)))
    assert len(select_updates(found)) == n_summed
    assert sum(name == "unmask" for name, _ in fleet.seen) == 7


async def test_who_does_not_measure_its_losses_is_in_the_sum_and_may_drop_out(tmp_path) -> None:
    """Its masks cancel with those of who does; the server takes off those of d00 and d01."""
    fleet, layout, first = fleet_of(tmp_path, n=9)
    quiet = msgspec.structs.replace(order(first), measure=False)
    asked = {d.id: quiet if d.id in {"d01", "d02"} else order(first) for d in fleet.get_devices()}
    fleet.unresponsive_at = {"train_masked": frozenset({"d00", "d01"})}
    assert sorted(select_updates(await masked(fleet, layout).run("train", asked))) == sorted(
        set(asked) - {"d00", "d01"}
    )


async def test_devices_of_a_cluster_that_should_learn_differently_are_not_asked(tmp_path) -> None:
    fleet, layout, first = fleet_of(tmp_path)
    asked = {d.id: order(first) for d in fleet.get_devices()}
    asked["d03"] = msgspec.structs.replace(order(first), sgd=Sgd(steps=2))
    with pytest.raises(ConfigError, match="masks cancel only if they train alike"):
        await masked(fleet, layout).run("train", asked)
    assert not hasattr(fleet, "seen")


def test_an_order_is_alike_before_and_after_it_has_travelled() -> None:
    """A whole number where any may stand travels as it is, and is a float for who receives it."""
    ref = BlobRef(digest="0" * 64, size_bytes=1, codec=Codec.INT8)
    sent = Train(starts=(Start(model=ref),), sgd=Sgd(learning_rate=1), codec=Codec.INT8)
    received = msgspec.msgpack.decode(msgspec.msgpack.encode(sent), type=Train)
    assert compute_common_digest(sent, 5) == compute_common_digest(received, 5) != compute_common_digest(sent, 6)


async def test_a_false_share_is_noticed(tmp_path, caplog) -> None:
    fleet, layout, first = fleet_of(tmp_path)
    fleet.__class__ = Lying
    with caplog.at_level(logging.WARNING, logger="fedge"):
        found = await masked(fleet, layout).run(
            "train", dict.fromkeys([d.id for d in fleet.get_devices()], order(first))
        )
    assert not select_updates(found)
    assert "or one of its neighbours has shown a false share" in caplog.text


# ---------------------------------------------------------------------------------------------------- whole methods


@pytest.mark.parametrize("name", ["fedavg", "fedprox", "fedavgm", "fedadam", "fedyogi", "fedepc"])
async def test_a_masked_method_learns_what_the_plain_one_does(tmp_path, name) -> None:
    """FedEPC's clusters are groups of six; each is a sum of its own."""
    states = []
    for settings in (PLAIN, SETTINGS, SETTINGS):
        fleet, layout, first = fleet_of(tmp_path / str(len(states)), n=12, n_groups=2)
        method: Method = make_method(name, settings)
        states.append(await run_rounds(method, method.init(layout, first), fleet))
        last = [fleet.get(method.get_model(states[-1], device.id), layout).params for device in fleet.get_devices()]
        if len(states) == 1:
            plain = last
        np.testing.assert_allclose(last, plain, atol=1e-4)
    assert states[0].sums == NONE
    assert encode_state(states[1]) == encode_state(states[2]), "masks are random, their sums are not"
    assert {len(devices) for devices in states[1].sums} <= ({12, 6} if name == "fedepc" else {12})
    assert [r.accuracy for r in states[1].history] == pytest.approx([r.accuracy for r in states[0].history], abs=0.02)


async def test_clusters_smaller_than_a_cohort_learn_nothing(tmp_path, caplog) -> None:
    fleet, layout, first = fleet_of(tmp_path, n=8, n_groups=2)
    method = make_method("fedepc", SETTINGS)
    state = await run_rounds(method, method.init(layout, first), fleet)
    assert state.clusters
    assert {len(devices) for devices in state.sums} == {8}, "the warm-up alone"
    assert "which may not be summed: a sum of 4 devices, 5 are the fewest" in caplog.text


@pytest.mark.parametrize(
    ("name", "options", "reason"),
    [
        ("scmoe-pfl", {}, "its clusters overlap"),
        ("fedge", {}, "its server needs more of updates than their sum"),
        ("fedepc", {"clustering": "mctc"}, "needs single updates"),
    ],
)
def test_what_cannot_be_masked_is_refused_before_the_run(name, options, reason) -> None:
    with pytest.raises(ConfigError, match=reason):
        make_method(name, MethodSettings(protection=MASKED, options=options))


@pytest.mark.parametrize("rule", ["clipped", "median", "multi-krum"])
def test_rules_that_look_at_single_updates_are_refused(rule) -> None:
    with pytest.raises(ConfigError, match="masking shows the server sums alone: take --average mean"):
        make_method("fedavg", MethodSettings(protection=Protection(average=rule, masking=True)))


async def test_who_lets_out_no_update_takes_part_in_masked_sums(tmp_path) -> None:
    """So that no coordinator has it by asking for plain training instead."""
    fleet, layout, first = fleet_of(tmp_path)
    fleet._rules = dict.fromkeys(fleet.workers, Rules(PRESETS["strict"] - {Reveals.UPDATE, Reveals.ACCOUNTED}))
    plain = await fleet.run("plain", {d.id: order(first) for d in fleet.get_devices()})
    assert {getattr(answer.result, "why", None) for answer in plain.values()} == {Why.NOT_ALLOWED}
    method: Method = make_method("fedavg", SETTINGS)
    state = await run_rounds(method, method.init(layout, first), fleet)
    assert state.model != first
    assert len(next(iter(state.sums))) == 8
