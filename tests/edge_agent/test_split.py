from __future__ import annotations

import numpy as np
import pytest

from edge_agent import split
from fedge import models
from fedge.errors import ConfigError
from fedge.messages import KeepPart, Part
from fedge.models.training import Network, Trainer
from fedge.sgd import Sgd
from fedge.task import TaskSpec
from fedge.tensors import Model
from tests.support.orders import INITIAL, LAYOUT, TASK, part_of, samples

SGD = Sgd(steps=5, batch_size=8)
DATA = samples(30, 1)
BASE, HEAD = Network(TASK).slice_of(Part.BASE), Network(TASK).slice_of(Part.HEAD)


def learn(keep: KeepPart, sgd: Sgd = SGD) -> tuple[Model, dict[str, np.ndarray]]:
    return split.learn(Network(TASK), INITIAL, DATA, keep, sgd, np.random.default_rng(3))


@pytest.mark.parametrize("private", [Part.HEAD, Part.BASE])
def test_head_and_base_learn_together_as_in_fedavg_and_the_private_part_stays(private: Part) -> None:
    network = Network(TASK)
    network.load(INITIAL)
    Trainer(network, *DATA, SGD, np.random.default_rng(3)).run(5)
    trained, kept = learn(KeepPart(private=private))
    np.testing.assert_array_equal(trained.params, network.dump().params)
    expected = part_of(trained, private)
    assert set(kept) == set(expected) == {info.name for info in LAYOUT.part(private).tensors}
    for name, tensor in kept.items():
        np.testing.assert_array_equal(tensor, expected[name])


def test_fedrep_trains_the_head_first_and_then_the_base_on_that_head() -> None:
    """The base's phase sees the head as its own phase left it, and leaves it so."""
    network = Network(TASK)
    network.load(INITIAL)
    rng = np.random.default_rng(3)
    Trainer(network, *DATA, SGD, rng, moves=Part.HEAD).run(7)
    after_head = network.dump().params
    Trainer(network, *DATA, SGD, rng, moves=Part.BASE).run(5)
    trained, kept = learn(KeepPart(private=Part.HEAD, head_steps=7))
    np.testing.assert_array_equal(trained.params, network.dump().params)
    np.testing.assert_array_equal(after_head[BASE], INITIAL.params[BASE])
    np.testing.assert_array_equal(trained.params[HEAD], after_head[HEAD])
    assert (trained.params[BASE] != INITIAL.params[BASE]).any()
    np.testing.assert_array_equal(np.concatenate([t.ravel() for t in kept.values()]), after_head[HEAD])


def test_fedrep_without_steps_of_the_base_moves_the_head_alone() -> None:
    trained, _ = learn(KeepPart(private=Part.HEAD, head_steps=3), Sgd(steps=0))
    np.testing.assert_array_equal(trained.params[BASE], INITIAL.params[BASE])
    assert (trained.params[HEAD] != INITIAL.params[HEAD]).all()


def test_what_is_kept_is_none_of_the_networks_own_memory() -> None:
    network = Network(TASK)
    _, kept = split.learn(network, INITIAL, DATA, KeepPart(private=Part.HEAD), SGD, np.random.default_rng(3))
    before = {name: tensor.copy() for name, tensor in kept.items()}
    network.load(models.initial(TASK, 9)[1])
    for name, tensor in kept.items():
        np.testing.assert_array_equal(tensor, before[name])


def test_a_network_that_does_not_end_in_a_linear_layer_cannot_be_split() -> None:
    task = TaskSpec(
        name="t", classes=("a", "b"), input_shape=(6,), model="tests.support.networks:without_head", model_options={}
    )
    network = Network(task)
    with pytest.raises(ConfigError, match="last layer"):
        split.learn(network, network.dump(), DATA, KeepPart(private=Part.HEAD), Sgd(steps=0), np.random.default_rng(0))
