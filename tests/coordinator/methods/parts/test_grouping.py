"""Devices as arms, answers as outcomes."""

from dataclasses import replace

import numpy as np

from coordinator.fleet.fleet import Answer
from coordinator.methods.parts.grouping import (
    Description,
    cluster_devices,
    limit_outcomes,
    make_arm,
    make_describe_action,
    read_descriptions,
    record_choices,
    select_comparable,
    update_bandit,
)
from coordinator.selection import ccmab
from coordinator.store.records import Device
from fedge.steps.contract import Declined, Failed
from fedge.steps.descriptions.describe_labels import LabelsDescribed
from fedge.steps.descriptions.profile import Profiled
from fedge.steps.sgd import Sgd
from fedge.steps.training.train import Start, Train, Trained
from fedge.tensors.layout import Codec, unflatten
from fedge.wire.messages import BlobRef, Context
from tests.support.simulation import digits

SETTINGS = ccmab.Settings(deadline_s=10.0)


def trained(before: float, after: float) -> Trained:
    update = BlobRef(digest="0" * 64, size_bytes=1)
    return Trained(update=update, n_samples=5, loss_before=before, loss_after=after, gradient_norm=2.0)


def test_an_arm_is_the_device_with_the_work_of_one_order() -> None:
    sgd, model = Sgd(steps=7, batch_size=3), BlobRef(digest="0" * 64, size_bytes=123)
    assert make_arm(Device("a", 9), sgd, model) == ccmab.Arm(id="a", n_samples=9, work=21, model_bytes=123)
    context = Context(device_id="a", cpu_ghz=1.5, free_ram_gb=0.5, link_mbit_s=8.0)
    full = ccmab.Arm(id="a", n_samples=9, work=21, cpu_ghz=1.5, free_ram_gb=0.5, link_mbit_s=8.0, model_bytes=123)
    assert make_arm(Device("a", 9, context), sgd, model) == full
    assert (
        make_arm(Device("a", 10), Sgd(epochs=2, batch_size=3), model).work == 7 * 3
    )  # two passes over 10 in batches of 3


def profiled(n: int) -> Description:
    return Description(profile=(0.5,) * n, n_samples=5)


def test_profiles_that_are_not_as_long_as_most_are_left_out() -> None:
    new = {"b": profiled(2), "a": profiled(2), "c": profiled(1)}
    assert list(select_comparable({}, new)) == ["a", "b"]
    assert list(select_comparable({"d": profiled(1)}, {"a": profiled(2)})) == ["d"], "on a tie the known ones stay"
    assert select_comparable({}, {}) == {}


def test_an_odd_device_that_came_first_settles_nothing() -> None:
    """The majority of all that are known decides, each time."""
    known = select_comparable({}, {"odd": profiled(3)})
    assert list(known) == ["odd"]
    assert list(select_comparable(known, {"a": profiled(2), "b": profiled(2)})) == ["a", "b"]


def test_a_bandit_learns_the_loss_drop_minus_one_of_no_answer_and_nothing_of_a_refusal() -> None:
    arms = [ccmab.Arm(id=i, n_samples=5, work=5) for i in "abcd"]
    selection, bandit = ccmab.select(ccmab.State(), arms, SETTINGS, size=4)
    answers = {
        "a": Answer("a", trained(1.0, 0.4), seconds=3.0),
        "b": Answer("b", None),
        "c": Answer("c", Declined(reason="")),
        "d": Answer("d", Failed(reason="")),
    }
    after = update_bandit(bandit, selection, answers)
    np.testing.assert_allclose(after.rewards, [0.6, -1.0, -1.0])
    assert after.participations == {"a": (ccmab.Participation(loss_drop=0.6, gradient_norm=2.0, seconds=3.0),)}


async def test_of_a_choice_everybodys_time_and_the_context_of_those_who_are_asked_are_recorded(tmp_path) -> None:
    fleet, *_ = digits(tmp_path, n=2)
    told: list[dict[str, object]] = []
    fleet.on_event = lambda _, fields: told.append(dict(fields))
    arms = [ccmab.Arm(id=i, n_samples=5, work=5, cpu_ghz=2.0) for i in "ab"]
    choice = ccmab.select(ccmab.State(), arms, SETTINGS, size=1)
    record_choices(fleet, {0: choice})
    assert told[0]["ids"] == ("a",)
    assert list(told[0]["seconds"]) == ["a", "b"]
    assert told[0]["contexts"] == {"a": (2.0, 0.0, 5.0, 0.0, 0.0)}


async def test_directions_of_a_common_model_find_planted_groups(tmp_path) -> None:
    """One update of each device from the same model; a device that learned nothing, or did not answer, has none."""
    fleet, layout, first, group_of = digits(tmp_path, n=12, alpha=10.0, n_groups=4, groups="labels")
    fleet.unresponsive = frozenset({"d03"})
    order = make_describe_action("mctc", first, sgd=Sgd(steps=10), codec=Codec.FLOAT32)
    assert order == Train(starts=(Start(model=first),), sgd=Sgd(steps=10), codec=Codec.FLOAT32, measure=False)
    fleet.round = 1
    answers = await fleet.run("describe", {device.id: order for device in fleet.get_devices()})
    w = fleet.get(first, layout)
    still = fleet.put(unflatten(replace(w, params=np.zeros_like(w.params)), layout))
    answers["d07"] = Answer("d07", Trained(update=still, n_samples=5))
    told = read_descriptions(answers, {device.id: device for device in fleet.get_devices()}, fleet, layout)
    assert sorted(told) == sorted(set(group_of) - {"d03", "d07"})
    ids = list(told)
    found = cluster_devices("mctc", list(told.values()), None, fleet, rng=np.random.default_rng(0))
    assert sorted(i for cluster in found for i in cluster) == list(range(len(ids)))
    assert {frozenset(ids[i] for i in cluster) for cluster in found} == {
        frozenset(i for i in ids if group_of[i] == group) for group in range(4)
    }
    assert (
        len(cluster_devices("mctc", list(told.values()), None, fleet, rng=np.random.default_rng(0), n_clusters=2)) <= 2
    )


def test_a_liar_does_not_stretch_the_scale_of_the_bandit() -> None:
    honest = ccmab.Participation(loss_drop=0.5, gradient_norm=3.0, seconds=1.0)
    liar = ccmab.Participation(loss_drop=1e9, gradient_norm=1e30, seconds=1.0)
    found = limit_outcomes({"a": honest, "b": honest, "c": None, "d": honest, "e": liar})
    assert (found["a"], found["c"]) == (honest, None)
    assert found["e"] == ccmab.Participation(loss_drop=5.0, gradient_norm=30.0, seconds=1.0)


def test_what_devices_say_of_themselves() -> None:
    device = Device("a", 7, incarnation="1")
    answers = {"a": Answer("a", Profiled(extractor="0" * 64, profile=(0.1,), n_samples=3)), "d": Answer("d", None)}
    at = {"n_samples": 7}
    asked = dict.fromkeys("abcd", device)
    assert read_descriptions(answers, asked, None, None) == {"a": Description(profile=(0.1,), **at)}
    labels = {"a": Answer("a", LabelsDescribed(feature=2, n_samples=3)), "b": Answer("b", Failed(reason=""))}
    labels["c"] = Answer("c", LabelsDescribed(feature=-1, n_samples=0))
    assert read_descriptions(labels, asked, None, None) == {"a": Description(label=2, **at)}
