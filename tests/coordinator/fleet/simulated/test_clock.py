from __future__ import annotations

import math

import msgspec
import numpy as np
import pytest

from coordinator.fleet.simulated import clock
from coordinator.fleet.simulated.clock import Occasion
from coordinator.fleet.simulated.devices import Hardware
from fedge.steps.descriptions.mean_features import MeanFeatures
from fedge.steps.descriptions.profile import Profile
from fedge.steps.descriptions.trial import Trial
from fedge.steps.mixture.fit_candidates import FitCandidates
from fedge.steps.mixture.install import FineTune, Install
from fedge.steps.personal.train_apfl import TrainApfl
from fedge.steps.personal.train_pfedme import TrainPFedMe
from fedge.steps.sgd import Sgd
from fedge.steps.training.train import Start, Train
from fedge.steps.training.train_ditto import TrainDitto
from fedge.tensors.layout import HEAD
from fedge.wire.messages import BlobRef

REF = BlobRef(digest="0" * 64, size_bytes=1)
STEADY = Hardware(speed=2.0, up_mbit_s=8, down_mbit_s=16, latency_s=0.5)
ORDER = Occasion(1, 3, "train", "d1")
SAMPLES = {"n_shared": 30, "n_train": 40, "n_val": 10}
SGD = Sgd(steps=7, batch_size=20)


def train(**rest) -> Train:
    return Train(starts=(Start(model=REF),), sgd=SGD, **rest)


DITTO = TrainDitto(starts=(Start(model=REF),), sgd=SGD, proximal_lambda=1.0)


def test_the_worked_order():
    taken = clock.compute_seconds(STEADY, ORDER, work=4e9, bytes_down=4_000_000, bytes_up=1_000_000)
    assert taken == pytest.approx(0.5 + 4e6 * 8 / 16e6 + 4e9 / (2 * clock.FLOPS) + 1e6 * 8 / 8e6)


def test_no_hardware_takes_no_time():
    assert clock.compute_seconds(Hardware(), ORDER, work=1e15, bytes_down=10**9, bytes_up=10**9) == 0


@pytest.mark.parametrize(
    ("action", "passes"),
    [
        (train(), 4 * 30 + 10 + 3 * 7 * 20),
        (DITTO, 4 * 30 + 10 + 2 * 3 * 7 * 20),
        (
            msgspec.structs.replace(DITTO, sgd=Sgd(epochs=3, batch_size=20)),
            4 * 30 + 10 + 3 * 5 * 20 + 3 * 6 * 20,  # the personal model learns from the sensitive samples, too
        ),
        (
            TrainApfl(starts=(Start(model=REF),), sgd=Sgd(epochs=3, batch_size=20), alpha=0.5),
            4 * 30 + 10 + 2 * 3 * 5 * 20,
        ),
        (
            TrainPFedMe(starts=(Start(model=REF),), sgd=SGD, inner_steps=4, moreau_lambda=1.0, outer_rate=1.0),
            4 * 30 + 10 + 4 * 3 * 7 * 20,
        ),
        (train(personal=HEAD, initial=REF, head_steps=2), 4 * 30 + 10 + 3 * 9 * 20),
        (Train(starts=(Start(model=REF),) * 3, sgd=SGD), 4 * 30 + 10 + 2 * 10 + 3 * 7 * 20),
        (Train(starts=(Start(model=REF),), sgd=Sgd(epochs=3, batch_size=20)), 4 * 30 + 10 + 3 * 5 * 20),
        (Profile(extractor=REF), 30),
        (Trial(global_model=REF, expert=REF), 20),
        (FitCandidates(global_model=REF, initial_model=REF, sgd=SGD, local_steps=100), 50 + 3 * 260 * 20),
        (Install(model=REF, method="m"), 10),
        (
            Install(model=REF, method="m", fine_tune=FineTune(sgd=SGD, checkpoints=(0, 80), otherwise=40)),
            10 + 3 * 80 * 20,
        ),
        (MeanFeatures(model=REF), 50),
    ],
)
def test_the_work_of_orders(action, passes):
    assert action.passes(**SAMPLES) == passes


def test_a_batch_is_never_larger_than_the_data():
    assert train().passes(n_shared=5, n_train=5, n_val=0) == 4 * 5 + 3 * 7 * 5


def test_noise_is_log_normal_and_its_own_for_each_order():
    jittery = Hardware(jitter=0.3)
    drawn = np.log([clock.draw_noise(jittery, Occasion(0, 1, "train", f"d{i}")) for i in range(2000)])
    assert abs(drawn.mean()) < 4 * 0.3 / math.sqrt(2000)
    assert drawn.std() == pytest.approx(0.3, rel=0.08)
    assert clock.draw_noise(jittery, Occasion(0, 1, "train", "a")) == clock.draw_noise(
        jittery, Occasion(0, 1, "train", "a")
    )
    others = [(1, 1, "train", "a"), (0, 2, "train", "a"), (0, 1, "trial", "a"), (0, 1, "train", "b")]
    assert len({clock.draw_noise(jittery, Occasion(*where)) for where in [(0, 1, "train", "a"), *others]}) == 5


def test_stragglers_are_as_frequent_as_told_and_only_slower():
    drawn = np.array([clock.draw_noise(Hardware(straggles=0.1), Occasion(0, 1, "train", f"d{i}")) for i in range(3000)])
    assert (drawn >= 1).all()
    assert (drawn > 1).mean() == pytest.approx(0.1, abs=4 * math.sqrt(0.09 / 3000))


def test_orders_are_dropped_as_often_as_told():
    def share(drops: float) -> float:
        own = Hardware(drops=drops)
        return float(np.mean([clock.is_dropped(own, Occasion(0, 1, "s", f"d{i}")) for i in range(3000)]))

    assert share(0.0) == 0
    assert share(1.0) == 1
    assert share(0.2) == pytest.approx(0.2, abs=4 * math.sqrt(0.16 / 3000))


def test_presence_is_the_markov_chain():
    own = Hardware(stays=0.9, returns=0.4)

    def share(before: bool | None) -> float:
        return float(np.mean([clock.is_present(own, before, Occasion(0, 1, "", f"d{i}")) for i in range(3000)]))

    for before, chance in ((True, 0.9), (False, 0.4), (None, 0.8)):
        assert share(before) == pytest.approx(chance, abs=4 * math.sqrt(chance * (1 - chance) / 3000))
    assert clock.is_present(Hardware(), None, Occasion(0, 0, "", "d"))
