"""Noisy answers: no sample adds more than the noise hides, every answer is paid for, and nobody knows the noise."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from coordinator.methods.server.learning import Gate
from edge_agent.device.device import Budget
from edge_agent.device.worker import Worker
from edge_agent.learning import noisy_choice
from edge_agent.learning.profile import randomise_sums
from edge_agent.privacy.answers import Noise
from edge_agent.privacy.dp_ledger import Ledger
from edge_agent.steps.descriptions import describe_labels, label_shares, profile
from export.gate import encode_gate
from fedge.steps.contract import Action, Declined
from fedge.steps.descriptions.describe_labels import DescribeLabels
from fedge.steps.descriptions.label_shares import LabelShares
from fedge.steps.descriptions.profile import Profile, Profiled
from fedge.steps.descriptions.route import Route
from fedge.steps.descriptions.trial import Trial, Tried
from fedge.steps.noise import Privacy
from fedge.steps.sgd import Sgd
from fedge.steps.training.train import Start
from fedge.steps.training.train_dp import TrainDp
from fedge.tasks import DeviceData
from fedge.wire.messages import Why
from tests.support.orders import TASK, Blobs, device_data, order

PRIVACY = Privacy(clip_norm=1.0, delta=1e-5, participations=4, epsilon=8.0, descriptions=1, examinations=2)
LOUD = Privacy(clip_norm=1.0, delta=1e-5, participations=1, noise_multiplier=1.0)


def gate() -> bytes:
    made = Gate(TASK.input_shape, 3)
    return encode_gate({name: value.detach().numpy() for name, value in made.state_dict().items()}, TASK.input_shape)


ASKED: dict[str, Callable[[Blobs, Privacy], Action]] = {
    "profile": lambda blobs, privacy: Profile(extractor=blobs.model(1), privacy=privacy),
    "labels": lambda _, privacy: DescribeLabels(privacy=privacy),
    "shares": lambda _, privacy: LabelShares(privacy=privacy),
    "route": lambda blobs, privacy: Route(gate=blobs.file(gate()), privacy=privacy),
    "trial": lambda blobs, privacy: Trial(
        global_model=blobs.model(1, scale=9), expert=blobs.model(2, scale=9), privacy=privacy
    ),
}


def worker(home: Path, data: DeviceData | None = None, seed: int | None = 0, **budget: Any) -> Worker:
    source = {} if seed is None else {"source": lambda _: np.random.default_rng(seed).bytes}
    return Worker("d", TASK, data or device_data(sensitive=0), home, budget=Budget(**budget), **source)


@dataclass(frozen=True, slots=True)
class Heard(Noise):
    """Noise that notes what it is added to, and the bound of a sample."""

    sums: list[tuple[np.ndarray, float]] = field(default_factory=list)

    def add_to(self, total: np.ndarray, bound: float) -> np.ndarray:
        self.sums.append((np.asarray(total, np.float64), bound))
        return np.asarray(total, np.float64)


def neighbours(data: DeviceData) -> Iterator[DeviceData]:
    """Data in which one sample, of either place, is another one, near or far."""
    for place in ("train", "val"):
        for k in (0, 7):
            for scale in (1.0, 1e6, -1e6):
                x, y = getattr(data, f"x_{place}").copy(), getattr(data, f"y_{place}").copy()
                x[k], y[k] = scale, (y[k] + 1) % 3
                yield replace(data, **{f"x_{place}": x, f"y_{place}": y})


@pytest.mark.parametrize("what", ASKED)
def test_another_sample_moves_a_sum_by_no_more_than_twice_its_bound(
    what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One sample away and another one there are two steps between neighbours."""
    heard: list[tuple[np.ndarray, float]] = []
    for module in (
        "edge_agent.privacy.answers",
        *(m.__name__ for m in (noisy_choice, describe_labels, label_shares, profile)),
    ):
        monkeypatch.setattr(f"{module}.take_noise", lambda *_: Heard(1.0, bytes, heard))
    blobs = Blobs()
    asked, data = order(ASKED[what](blobs, LOUD)), device_data(sensitive=0)
    moved = []

    def sums(own: DeviceData) -> list[tuple[np.ndarray, float]]:
        heard.clear()
        worker(tmp_path, own).execute(asked, blobs)
        return list(heard)

    first = sums(data)
    assert first
    for other in neighbours(data):
        (_, bound), (one, _), (two, _) = first[-1], first[-1], sums(other)[-1]
        moved.append(np.linalg.norm(one - two) / (2 * bound))
    assert 0.2 < max(moved) <= 1 + 1e-9


def test_a_sample_moves_the_sums_of_a_profile_by_their_bound_at_most() -> None:
    """All rows of zeros and ones: a sample that does not count stands for 1/2."""
    n, q = 3, 2
    rows = np.array(np.meshgrid(*[[0.0, 1.0]] * (n * q))).reshape(n * q, -1).T.reshape(-1, n, q)
    for own in rows:
        heard = Heard(1.0, bytes)
        randomise_sums(np.stack([own[::2].sum(axis=0), own[1::2].sum(axis=0)]), n, heard)
        ((total, bound),) = heard.sums
        for k in range(n):
            without = total.reshape(2, q).copy()
            without[k % 2] -= own[k] - 0.5
            assert np.linalg.norm(total.reshape(2, q) - without) <= bound + 1e-12
        assert bound == math.sqrt(q) / 2


def test_rows_are_clipped_and_the_noise_is_as_strong_as_it_says() -> None:
    noise = Noise(3.0, np.random.default_rng(0).bytes)
    rows = np.array([[30.0, 40.0], [0.3, 0.4], [math.inf, 0.0]])
    silent = Noise(0.0, np.random.default_rng(0).bytes)
    np.testing.assert_allclose(silent.compute_sum(rows, 1.0), [0.6 + 0.3, 0.8 + 0.4])
    drawn = noise.add_to(np.zeros(4000), 2.0)
    assert np.std(drawn) == pytest.approx(6.0, rel=0.05)
    assert abs(np.mean(drawn)) < 0.5


@pytest.mark.parametrize("what", ASKED)
def test_noise_is_the_systems_and_paid_for_before_the_answer(what: str, tmp_path: Path) -> None:
    blobs = Blobs()
    asked = order(ASKED[what](blobs, msgspec.structs.replace(LOUD, noise_multiplier=20.0)))
    place = "validation" if what == "trial" else "training"
    results = set()
    for name in "abcdefgh":
        finished = worker(tmp_path / name, seed=None).execute(asked, blobs)
        assert not isinstance(finished.result, Declined)
        results.add(repr(finished.result))
        charges = Ledger(tmp_path / name).charges
        assert {(charge.place, charge.mechanism.sample_rate) for charge in charges} == {(place, 1.0)}
    assert len(results) > 1, "the same order, again and again"


def test_descriptions_and_trainings_together_keep_the_promise_and_more_are_declined(tmp_path: Path) -> None:
    blobs, own = Blobs(), worker(tmp_path)
    profile_, trial = (order(ASKED[what](blobs, PRIVACY)) for what in ("profile", "trial"))
    assert isinstance(own.execute(profile_, blobs).result, Profiled)
    described = Ledger(tmp_path).compute_spent(1e-5)
    assert 1.9 < described <= 2, "a quarter of epsilon"
    train = TrainDp(starts=(Start(model=blobs.model(1)),), sgd=Sgd(steps=5, batch_size=8), privacy=PRIVACY)
    for number in range(4):
        assert not isinstance(own.execute(order(train, number), blobs).result, Declined)
    assert 7.7 < Ledger(tmp_path).compute_spent(1e-5) <= 8 * (1 + 1e-9)
    assert own.execute(profile_, blobs).result.why is Why.BUDGET
    assert isinstance(own.execute(trial, blobs).result, Tried), "other samples, which have spent nothing"
    assert 7.7 < Ledger(tmp_path).compute_spent(1e-5) <= 8 * (1 + 1e-9), "the larger of two places"
    assert own.execute(trial, blobs).result.why is Why.BUDGET


def test_a_budget_allows_answers_with_noise_until_it_is_spent(tmp_path: Path) -> None:
    blobs, own = Blobs(), worker(tmp_path, max_epsilon=3.0)
    assert own.execute(order(Profile(extractor=blobs.model(1))), blobs).result.why is Why.BUDGET
    noisy = order(ASKED["profile"](blobs, PRIVACY))
    assert [isinstance(own.execute(noisy, blobs).result, Profiled) for _ in range(3)] == [True, True, False]


def test_a_noisy_profile_comes_with_halves_that_differ_by_the_noise(tmp_path: Path) -> None:
    blobs = Blobs()
    plain, noisy = (
        worker(tmp_path).execute(order(Profile(extractor=blobs.model(1), **how)), blobs).result
        for how in ({}, {"privacy": LOUD})
    )
    assert isinstance(plain, Profiled)
    assert isinstance(noisy, Profiled)
    assert noisy.halves is not None
    assert plain.halves is not None
    assert noisy.halves > plain.halves
    assert all(0 <= share <= 1 for share in noisy.profile)
    assert 0 < np.abs(np.subtract(noisy.profile, plain.profile)).mean() < 0.2
