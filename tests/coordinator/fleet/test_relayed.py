"""Devices behind relays as methods see them: what relays are asked, and what is believed of their answers."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import msgspec
import numpy as np
import pytest

from coordinator.fleet.fleet import Answer, Fleet
from coordinator.fleet.relayed import Relay, Relayed, RelayFleet, SiteAnswer, SiteOrders, Sum, Summed
from coordinator.fleet.simulated.fleet import SimulatedFleet
from coordinator.fleet.sites import SiteSums
from coordinator.methods.parts.averaging import ignore
from coordinator.store.records import Device
from fedge.errors import ConfigError
from fedge.steps.contract import Action, Declined, Result, encode_body
from fedge.steps.descriptions.describe_labels import DescribeLabels, LabelsDescribed
from fedge.steps.mixture.install import Install
from fedge.steps.sgd import Sgd
from fedge.steps.training.share_private import PrivateShared, SharePrivate
from fedge.steps.training.train import Start, Train, Trained
from fedge.steps.training.train_scaffold import TrainedScaffold, TrainScaffold
from fedge.tensors import codecs
from fedge.tensors.layers import select_params
from fedge.tensors.layout import Codec, unflatten
from fedge.wire.messages import BlobRef, Outcome, Why
from tests.support.simulation import digits


class Below(Fleet):
    """One device, and two behind relay "s", of whom d1 withholds labels. `answers`: what the relay says next."""

    def __init__(self, home: Path) -> None:
        fleet, self.layout, self.first, _ = digits(home, n=1, limit=60)
        super().__init__(fleet)
        self.answers: list[Result | None] = []
        self.asked: list[Action] = []

    def get_devices(self) -> tuple[Device, ...]:
        behind = (Device(f"s.d{k}", 10 + k, via="s", withholds=("labels",) * k) for k in range(2))
        return (*super().get_devices(), *behind)

    async def run(self, label: str, actions: Mapping[str, Action]) -> dict[str, Answer]:
        answers = await super().run(label, {i: a for i, a in actions.items() if i != "s"})
        if "s" in actions:
            self.asked.append(actions["s"])
            answers["s"] = Answer("s", self.answers.pop(0))
        return answers

    def file(self, content: object) -> BlobRef:
        return self.put_bytes(msgspec.msgpack.encode(content))

    def accused(self) -> set[str]:
        """The names of the evidence against the relay."""
        assert isinstance(self._fleet, SimulatedFleet)
        return {name for device, _, name in self._fleet.offences if device == "s"}

    def update(self, value: float) -> BlobRef:
        w = unflatten(self.get(self.first, self.layout), self.layout)
        return self.put({name: np.full_like(tensor, value) for name, tensor in w.items()})

    def above(self) -> RelayFleet:
        return RelayFleet(self, layout=self.layout, seed=4)


def done(result: Result, **more: object) -> SiteAnswer:
    return SiteAnswer(seconds=1.0, outcome=Outcome.DONE, body=encode_body(result), **more)  # type: ignore[arg-type]


async def test_a_site_is_asked_once_and_each_of_its_devices_answers(tmp_path: Path) -> None:
    below = Below(tmp_path)
    below.answers = [Relayed(answers=below.file({"d0": done(LabelsDescribed(feature=3, n_samples=9))}))]
    answers = await below.above().run("labels", dict.fromkeys(("d00", "s.d0", "s.d1"), DescribeLabels()))
    assert isinstance(answers["d00"].result, LabelsDescribed)
    assert answers["s.d0"] == Answer("s.d0", LabelsDescribed(feature=3, n_samples=9), 1.0)
    assert isinstance(answers["s.d1"].result, Declined), "its owner withholds labels, and it is not asked"
    (asked,) = below.asked
    assert isinstance(asked, Relay)
    orders = msgspec.msgpack.decode(below.get_bytes(asked.orders), type=SiteOrders)
    assert (orders.seed, orders.devices) == (4, {"d0": 0})


async def test_a_site_whose_devices_write_bundles_has_as_long_as_a_device_that_does(tmp_path: Path) -> None:
    below = Below(tmp_path)
    below.answers = [None, None]
    above = below.above()
    bundle = Install(model=below.first, method="fedavg")
    await above.run("bundle", {"s.d0": DescribeLabels(), "s.d1": bundle})
    await above.run("labels", {"s.d0": DescribeLabels()})
    assert [asked.exports for asked in below.asked] == [True, False]


@pytest.mark.parametrize(
    ("said", "expected", "evidence"),
    [
        (None, None, set()),
        (Declined(why=Why.DISK), Declined(why=Why.DISK), set()),
        ({"d0": done(LabelsDescribed(feature=3000, n_samples=9))}, None, {"wrong-result"}),
        ({"d0": SiteAnswer(seconds=0.0, outcome=Outcome.DONE, body=b"\x01")}, None, {"malformed"}),
        ({"d0": SiteAnswer(seconds=0.0, outcome=Outcome.FAILED, why=Why.ERROR)}, "failed", set()),
        ([1, 2], None, {"malformed"}),
        ({}, None, set()),
    ],
)
async def test_what_does_not_answer_is_no_answer(
    tmp_path: Path, said: object, expected: object, evidence: set[str]
) -> None:
    below = Below(tmp_path)
    below.answers = [said if said is None or isinstance(said, Declined) else Relayed(answers=below.file(said))]
    (answer,) = (await below.above().run("labels", {"s.d0": DescribeLabels()})).values()
    assert answer.result == expected or (expected == "failed" and "Failed" in type(answer.result).__name__)
    assert below.accused() == evidence, "what a relay sends amiss is evidence against it, and an absent one has none"


async def test_updates_stay_on_the_site_and_their_means_come(tmp_path: Path) -> None:
    below = Below(tmp_path)
    train = Train(starts=(Start(model=below.first),), sgd=Sgd(steps=1), codec=Codec.FLOAT32, measure=False)
    there = BlobRef(digest="ab" * 32, size_bytes=5000)
    told = {f"d{k}": done(Trained(update=there, n_samples=10 + k), norms=(300.0, 0.0)) for k in range(2)}
    below.answers = [Relayed(answers=below.file(told)), Summed(means=(below.update(2.0), None), missing=("d1",))]
    fleet = below.above()
    answers = await fleet.run("train", dict.fromkeys(("s.d0", "s.d1"), train))
    updates = {i: a.result.update for i, a in answers.items() if isinstance(a.result, Trained)}
    assert fleet.get_norms(updates["s.d0"], below.layout) == (300.0, 0.0)
    with pytest.raises(ConfigError, match="needs single updates, but those of s stay"):
        fleet.get(updates["s.d0"], below.layout)

    again = RelayFleet(below, layout=below.layout, seed=4, named=updates.values())
    assert again.find_remote(updates) == set(updates)
    both = dict.fromkeys(updates, (0.5, 1.0))
    sums = SiteSums(
        layout=below.layout, updates=updates, weights={"s.d0": 10.0, "s.d1": 11.0}, sums=(both, {}), directions=()
    )
    (mean,) = await again.compute_means(sums, ignore)
    assert (mean.cluster, mean.devices) == (0, ("s.d0",)), "without the update that is lost"
    assert set(mean.model.params) == {2.0}
    assert isinstance(below.asked[1], Sum)
    wanted = msgspec.msgpack.decode(below.get_bytes(below.asked[1].wanted), type=SiteSums)
    assert wanted.updates == {"d0": there, "d1": there}

    below.answers = [None]
    assert await again.compute_means(msgspec.structs.replace(sums, sums=(both,)), ignore) == []
    assert below.accused() == set()
    below.answers = [Summed(means=(below.file("no tensors"),))]
    assert await again.compute_means(msgspec.structs.replace(sums, sums=(both,)), ignore) == []
    below.answers = [Relayed(answers=below.file({}))]
    await again.run("train", {"s.d0": train})
    assert isinstance(below.asked[-1], Relay)
    orders = msgspec.msgpack.decode(below.get_bytes(below.asked[-1].orders), type=SiteOrders)
    assert orders.keep == (there.digest,)


async def test_further_updates_of_a_device_stay_on_its_site_too(tmp_path: Path) -> None:
    """Such as the change of SCAFFOLD's control variate. d1's relay leaves its norms out."""
    below = Below(tmp_path)
    train = TrainScaffold(starts=(Start(model=below.first),), sgd=Sgd(steps=1), codec=Codec.FLOAT32, measure=False)
    update, control = (BlobRef(digest=digits * 32, size_bytes=5000) for digits in ("ab", "cd"))
    trained = TrainedScaffold(update=update, n_samples=10, control=control)
    told = {"d0": done(trained, norms=(3.0, 0.0), further=((2.0, 0.0),)), "d1": done(trained, norms=(3.0, 0.0))}
    below.answers = [
        Relayed(answers=below.file(told)),
        *(Summed(means=(below.update(value),)) for value in (0.01, 0.02)),
    ]
    fleet, part = below.above(), select_params(below.layout)
    answers = await fleet.run("train", dict.fromkeys(("s.d0", "s.d1"), train))
    result = answers["s.d0"].result
    assert isinstance(result, TrainedScaffold)
    assert (fleet.get_norms(result.update, below.layout), fleet.get_norms(result.control, part)) == (
        (3.0, 0.0),
        (2.0, 0.0),
    )
    for ref, value in ((result.update, 0.01), (result.control, 0.02)):
        whole = {"s.d0": (1.0, 1.0)}
        sums = SiteSums(layout=below.layout, updates={"s.d0": ref}, weights={"s.d0": 1.0}, sums=(whole,))
        (mean,) = await fleet.compute_means(sums, ignore)
        assert set(mean.model.params) == {np.float32(value)}
        wanted = msgspec.msgpack.decode(below.get_bytes(below.asked[-1].wanted), type=SiteSums)  # type: ignore[attr-defined]
        assert wanted.updates == {"d0": update if ref is result.update else control}
    assert answers["s.d1"].result is None
    assert below.accused() == {"wrong-result"}


async def test_a_mean_longer_than_the_updates_that_a_relay_told_of_does_not_count(tmp_path: Path) -> None:
    """Averages are bounded by what updates are said to be: a relay must not say one thing and send another."""
    below = Below(tmp_path)
    train = Train(starts=(Start(model=below.first),), sgd=Sgd(steps=1), codec=Codec.FLOAT32, measure=False)
    there = BlobRef(digest="ab" * 32, size_bytes=5000)
    told = {f"d{k}": done(Trained(update=there, n_samples=10), norms=(1.0, 0.0)) for k in range(2)}
    below.answers = [Relayed(answers=below.file(told)), *(Summed(means=(below.update(v),)) for v in (0.001, 1e6))]
    fleet = below.above()
    answers = await fleet.run("train", dict.fromkeys(("s.d0", "s.d1"), train))
    updates = {i: a.result.update for i, a in answers.items() if isinstance(a.result, Trained)}
    whole, weights = dict.fromkeys(updates, (1.0, 1.0)), dict.fromkeys(updates, 10.0)
    sums = SiteSums(layout=below.layout, updates=updates, weights=weights, sums=(whole,))
    assert len(await fleet.compute_means(sums, ignore)) == 1
    assert below.accused() == set()
    assert await fleet.compute_means(sums, ignore) == []
    assert below.accused() == {"wrong-result"}


async def test_a_mean_of_updates_of_hardly_anything_is_nobodys_fault(tmp_path: Path) -> None:
    """Squares of such numbers are rounded in float32: this mean seems longer than its only update, in int8."""
    below = Below(tmp_path)
    train = Train(starts=(Start(model=below.first),), sgd=Sgd(steps=1), measure=False)
    mean = below.update(2.8e-23)
    model = unflatten(below.get(mean, below.layout), below.layout)
    norms = codecs.check_blob(codecs.encode(model, Codec.INT8), Codec.INT8, below.layout)
    assert norms[0] * 1.2 < codecs.check_blob(below.get_bytes(mean), mean.codec, below.layout)[0] < 1e-20
    there = BlobRef(digest="ab" * 32, size_bytes=5000, codec=Codec.INT8)
    told = {"d0": done(Trained(update=there, n_samples=10), norms=norms)}
    below.answers = [Relayed(answers=below.file(told)), Summed(means=(mean,))]
    fleet = below.above()
    (answer,) = (await fleet.run("train", {"s.d0": train})).values()
    assert isinstance(answer.result, Trained)
    updates = {"s.d0": answer.result.update}
    sums = SiteSums(layout=below.layout, updates=updates, weights={"s.d0": 1.0}, sums=({"s.d0": (1.0, 1.0)},))
    assert len(await fleet.compute_means(sums, ignore)) == 1
    assert below.accused() == set()


async def test_tensors_that_no_relay_hands_on_are_no_evidence_against_it(tmp_path: Path) -> None:
    """The method should not have asked."""
    below = Below(tmp_path)
    module = BlobRef(digest="ab" * 32, size_bytes=5000, codec=Codec.FLOAT32)
    below.answers = [Relayed(answers=below.file({"d0": done(PrivateShared(module=module))}))]
    asked = SharePrivate(kept_by="train_rod")
    assert (await below.above().run("share", {"s.d0": asked}))["s.d0"].result is None
    assert below.accused() == set()


async def test_what_is_taken_one_by_one_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="takes answers one by one"):
        Below(tmp_path).above().stream("train", {"s.d0": DescribeLabels()})
