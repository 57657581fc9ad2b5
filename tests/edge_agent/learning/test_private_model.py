from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from edge_agent.device.device import Device
from edge_agent.learning.private_model import _overfits, average_models, compute_log_likelihood, fit_model, fit_private
from fedge.models import build
from fedge.steps.descriptions.mean_features import MeanFeatures
from fedge.steps.sgd import Sgd
from fedge.tensors.layout import Model
from tests.support.orders import TASK, Blobs
from tests.support.orders import device as device_of

_, START = build.make_initial_model(TASK, 3)
NONE = (np.zeros((0, 6), np.float32), np.zeros(0, np.int64))


@pytest.fixture
def device(tmp_path: Path) -> Device:
    return device_of(tmp_path, MeanFeatures(model=Blobs().model(0)))


def samples(n, seed, shift=0):
    y = np.arange(n) % 3
    x = np.random.default_rng(seed).normal(size=(n, 6)) + 2 * np.eye(6)[y]
    return x.astype(np.float32), (y + shift) % 3


def test_without_validation_samples_it_is_the_model_after_40_steps(device):
    model, steps = fit_private(device, START, samples(40, 0), NONE, Sgd())
    assert steps == 40
    assert (model.params == fit_model(device, START, samples(40, 0), Sgd(), 40).params).all()


@pytest.mark.parametrize("validation", [NONE, samples(60, 5, shift=1)])
def test_a_given_number_of_steps_is_taken_whatever_validation_says(device, validation):
    model, steps = fit_private(device, START, samples(40, 0), validation, Sgd(learning_rate=0.2), steps=33)
    assert steps == 33
    assert (model.params == fit_model(device, START, samples(40, 0), Sgd(learning_rate=0.2), 33).params).all()


def test_a_later_checkpoint_needs_validation_to_ask_for_it(device):
    sgd = Sgd(learning_rate=0.005)
    training, validation = samples(90, 0), samples(60, 5)
    model, steps = fit_private(device, START, training, validation, sgd)
    assert steps == 160
    assert (model.params == fit_model(device, START, training, sgd, 160).params).all()


def test_an_early_checkpoint_is_taken_when_training_only_harms(device):
    _, steps = fit_private(device, START, samples(40, 0), samples(40, 5, shift=1), Sgd(learning_rate=0.2))
    assert steps == 20


def test_training_stops_after_two_worse_checkpoints_in_a_row():
    assert not _overfits([-5, -6])
    assert _overfits([-5, -6, -5.5])
    assert not _overfits([-5, -6, -4])
    assert not _overfits([-5, -4, -6])
    assert _overfits([-5, -4, -6, -4.5])


def test_log_likelihood_is_the_sum_over_the_samples(device):
    x, y = samples(9, 0)
    logits = device.network.compute_logits(START, x)
    p = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
    assert compute_log_likelihood(device.network, START, (x, y)) == pytest.approx(np.log(p[np.arange(9), y]).sum())


def test_mean_of_two_models():
    first = Model(np.array([1, 2], np.float32), np.array([4], np.float32), np.array([3]))
    second = Model(np.array([3, 0], np.float32), np.array([0], np.float32), np.array([5]))
    mean = average_models([first, second])
    assert mean.params.tolist() == [2, 1]
    assert mean.buffers.tolist() == [2]
    assert mean.counters.tolist() == [5]
    assert mean.params.dtype == np.float32
