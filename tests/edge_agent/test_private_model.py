from __future__ import annotations

import numpy as np
import pytest

from edge_agent.private_model import _overfits, fit, fit_private, log_likelihood, mean_model
from fedge import models
from fedge.models.training import Network
from fedge.sgd import Sgd
from fedge.task import TaskSpec
from fedge.tensors import Model

TASK = TaskSpec(name="toy", classes=("a", "b", "c"), input_shape=(5,), model="mlp", model_options={"hidden": 7})
_, START = models.initial(TASK, 3)
NONE = (np.zeros((0, 5), np.float32), np.zeros(0, np.int64))


def samples(n, seed, shift=0):
    y = np.arange(n) % 3
    x = np.random.default_rng(seed).normal(size=(n, 5)) + 2 * np.eye(5)[y]
    return x.astype(np.float32), (y + shift) % 3


def rng():
    return np.random.default_rng(1)


def test_without_validation_samples_it_is_the_model_after_40_steps():
    network = Network(TASK)
    model, steps = fit_private(network, START, samples(40, 0), NONE, Sgd(), rng())
    assert steps == 40
    assert (model.params == fit(network, START, samples(40, 0), Sgd(), 40, rng()).params).all()


@pytest.mark.parametrize("validation", [NONE, samples(60, 5, shift=1)])
def test_a_given_number_of_steps_is_taken_whatever_validation_says(validation):
    network = Network(TASK)
    model, steps = fit_private(network, START, samples(40, 0), validation, Sgd(learning_rate=0.2), rng(), steps=33)
    assert steps == 33
    assert (model.params == fit(network, START, samples(40, 0), Sgd(learning_rate=0.2), 33, rng()).params).all()


def test_a_later_checkpoint_needs_validation_to_ask_for_it():
    network, sgd = Network(TASK), Sgd(learning_rate=0.005)
    training, validation = samples(90, 0), samples(60, 5)
    model, steps = fit_private(network, START, training, validation, sgd, rng())
    assert steps == 160
    assert (model.params == fit(network, START, training, sgd, 160, rng()).params).all()


def test_an_early_checkpoint_is_taken_when_training_only_harms():
    network = Network(TASK)
    _, steps = fit_private(network, START, samples(40, 0), samples(40, 5, shift=1), Sgd(learning_rate=0.2), rng())
    assert steps == 20


def test_training_stops_after_two_worse_checkpoints_in_a_row():
    assert not _overfits([-5, -6])
    assert _overfits([-5, -6, -5.5])
    assert not _overfits([-5, -6, -4])
    assert not _overfits([-5, -4, -6])
    assert _overfits([-5, -4, -6, -4.5])


def test_log_likelihood_is_the_sum_over_the_samples():
    network = Network(TASK)
    x, y = samples(9, 0)
    logits = network.logits(START, x)
    p = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
    assert log_likelihood(network, START, (x, y)) == pytest.approx(np.log(p[np.arange(9), y]).sum())


def test_mean_of_two_models():
    first = Model(np.array([1, 2], np.float32), np.array([4], np.float32), np.array([3]))
    second = Model(np.array([3, 0], np.float32), np.array([0], np.float32), np.array([5]))
    mean = mean_model([first, second])
    assert mean.params.tolist() == [2, 1]
    assert mean.buffers.tolist() == [2]
    assert mean.counters.tolist() == [5]
    assert mean.params.dtype == np.float32
