"""Real bundles over digits whose classes come in other shares, that are turned, or that are called otherwise."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from deploy.updates.answering import ActiveBundle
from deploy.updates.examination import Limits
from deploy.updates.slots import Slots
from fedge.bundle.manifest import MANIFEST
from fedge.data.preprocessing import preprocess
from fedge.data.validation import Validation
from fedge.tasks import load_pool, load_task
from fedge.wire.messages import DriftKind
from tests.support.trained_bundles import mixed_bundle, trained_bundle

SHARES = 0.75 ** np.arange(10) / (0.75 ** np.arange(10)).sum()
"""How the digits are shared at home: a nine comes with every thirteenth zero."""


class Place:
    """A device with a bundle of what it has seen, its validation samples, and digits that it has never seen."""

    def __init__(self, folder: Path, seed: int, *, mixed: bool = False) -> None:
        pool, self.rng = load_pool("digits", seed=seed), np.random.default_rng(seed)
        self.task = load_task("digits")
        self.x, self.y = pool.x[1100:], pool.y[1100:]
        seen = draw(self.rng, pool.y[:1100], SHARES, 750)
        x, y = pool.x[:1100][seen], pool.y[:1100][seen]
        self.home = folder / "home"
        slots = Slots(self.home)
        own = x[:600], y[:600]
        everybodys = np.concatenate([x[:600], turn(x[:600])]), np.tile(y[:600], 2)
        bundle = (
            mixed_bundle(folder / "bundle", self.task, own, everybodys, release=1)
            if mixed
            else trained_bundle(folder / "bundle", self.task, *own, release=1, steps=300)
        )
        slots.stage((bundle / MANIFEST).read_bytes(), bundle)
        slots.switch()
        slots.confirm()
        self.slots = slots
        Validation(preprocess(self.task, x[600:]), y[600:]).save(self.home)

    def serve(self, *, adapts_prior: bool = False) -> ActiveBundle:
        answering = ActiveBundle(self.slots, Limits(), adapts_prior=adapts_prior)
        answering.learn_home(self.home)
        return answering

    def see(self, answering: ActiveBundle, shares: NDArray[np.float64], n: int = 600, **how: object) -> float:
        """Ask for samples one by one; the share that was answered rightly."""
        chosen = draw(self.rng, self.y, shares, n)
        x, y = self.x[chosen], self.y[chosen]
        if how.get("turned"):
            x = turn(x)
        right = []
        for sample, label in zip(x, y, strict=True):
            runtime, answer = answering.answer(sample)
            if how.get("told"):
                wanted = np.array([how["told"](label)])  # type: ignore[operator]
                answering.record_labels(runtime.digest, answer.class_index == wanted, answer.probabilities.max(axis=1))
            right.append(int(answer.class_index[0]) == label)
        return float(np.mean(right))


def turn(x: NDArray[np.float32]) -> NDArray[np.float32]:
    """As a camera sees it that is turned by 90 degrees."""
    return np.rot90(x, axes=(-2, -1)).copy()


def draw(rng: np.random.Generator, y: NDArray[np.int64], shares: NDArray[np.float64], n: int) -> NDArray[np.int64]:
    """Draw samples so that their classes have these shares."""
    each = (shares / np.bincount(y, minlength=10))[y]
    return rng.choice(len(y), n, p=each / each.sum())


@pytest.fixture(scope="module", params=[0, 1])
def place(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Place:
    return Place(tmp_path_factory.mktemp("place"), request.param)


def test_at_home_there_is_no_drift(place: Place) -> None:
    answering = place.serve()
    place.see(answering, SHARES, 1000, told=lambda label: label)
    assert answering.alarm is None


def test_other_shares_other_inputs_and_other_labels_are_told_apart(place: Place) -> None:
    shares, inputs, labels = (place.serve() for _ in range(3))
    place.see(shares, SHARES[::-1])
    place.see(inputs, SHARES, turned=True)
    place.see(labels, SHARES, told=lambda label: (label + 1) % 10)
    assert (shares.drift_kind, inputs.drift_kind, labels.drift_kind) == (
        DriftKind.SHARES, DriftKind.INPUTS, DriftKind.LABELS,
    )  # fmt: skip


def test_turned_samples_with_their_labels_are_other_inputs_that_labels_do_not_excuse(place: Place) -> None:
    answering = place.serve()
    place.see(answering, SHARES, turned=True, told=lambda label: label)
    assert answering.drift_kind is DriftKind.INPUTS
    place.see(answering, SHARES, 2000, told=lambda label: label)
    assert answering.alarm is None


def test_the_prior_gains_where_shares_changed_and_loses_nothing_at_home(place: Place) -> None:
    plain, adapting = place.serve(), place.serve(adapts_prior=True)

    before = place.see(plain, SHARES[::-1], 2000)
    after = place.see(adapting, SHARES[::-1], 2000)
    assert adapting.drift_kind is DriftKind.SHARES
    assert after > before + 0.02

    home = place.serve(), place.serve(adapts_prior=True)
    there = [place.see(answering, SHARES, 2000) for answering in home]
    assert there[1] > there[0] - 0.01


@pytest.mark.parametrize("seed", [0, 1])
def test_the_weights_gain_where_another_candidate_knows_the_inputs_and_go_back(tmp_path: Path, seed: int) -> None:
    """The private candidate knows the device's own samples, the global one also those of a camera that is turned."""
    place = Place(tmp_path, seed, mixed=True)
    plain, adapting = place.serve(), place.serve(adapts_prior=True)
    assert (plain.runtime.engine, adapting.runtime.engine) == ("fused", "separate")

    place.see(adapting, SHARES, turned=True)
    before, after = (place.see(answering, SHARES, turned=True) for answering in (plain, adapting))
    assert adapting.drift_kind is DriftKind.INPUTS
    assert after > before + 0.03

    place.see(adapting, SHARES, 1500)
    assert adapting.alarm is None
    sample = place.x[:20]
    own, given = adapting.runtime.predict(sample), adapting.answer(sample)[1]
    assert not given.adapted
    assert np.array_equal(given.probabilities, own.probabilities)
