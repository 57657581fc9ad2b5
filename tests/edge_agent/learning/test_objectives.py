"""The objective of an order: its loss, with each device's own class weights."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn import functional

from edge_agent.device.device import Device
from edge_agent.learning.objectives import LossOfOrder, use_cross_entropy
from fedge.models.training import Network, Stack, to_tensor
from fedge.steps.sgd import Sgd
from fedge.steps.training.train import Start, Train
from tests.support.orders import INITIAL, TASK, Blobs, device, mixed_data, samples

BALANCED = Sgd(class_weights="balanced", label_smoothing=0.1)


def make_device(home: Path) -> Device:
    (x, y), marked = samples(20, 1), samples(12, 2)
    data = mixed_data((x, np.where(y == 2, 0, y)), marked)
    return device(home, Train(starts=(Start(model=Blobs().model(0)),), sgd=BALANCED), data=data, seed=3)


def test_classes_weigh_by_the_samples_that_may_be_shared(tmp_path: Path) -> None:
    here = make_device(tmp_path)
    x, y = here.data.shared
    counts = np.bincount(y, minlength=3)
    weights = torch.tensor([20 / 2 / counts[0], 20 / 2 / counts[1], 0.0], dtype=torch.float32)
    network = Network(TASK)
    network.load(INITIAL)
    with LossOfOrder(BALANCED)(network, [here]) as loss:
        found = loss(network.module, to_tensor(x), to_tensor(y), *network.given)
    expected = functional.cross_entropy(network.module(to_tensor(x)), to_tensor(y), weights, label_smoothing=0.1)
    assert found.item() == pytest.approx(expected.item(), rel=1e-5)
    assert network.given == ()


def test_models_side_by_side_have_a_row_of_weights_each(tmp_path: Path) -> None:
    devices = [make_device(tmp_path / str(n)) for n in range(2)]
    stack = Stack(Network(TASK), [INITIAL, INITIAL])
    with LossOfOrder(BALANCED)(stack, devices):
        assert [tuple(given.shape) for given in stack.given] == [(2, 3)]
    with LossOfOrder(Sgd())(stack, devices):
        assert stack.given == ()


def test_plain_cross_entropy_is_plain_whatever_the_order_says(tmp_path: Path) -> None:
    here = make_device(tmp_path)
    network = Network(TASK)
    network.load(INITIAL)
    x, y = map(to_tensor, here.data.shared)
    with use_cross_entropy(network, [here]) as loss:
        found = loss(network.module, x, y, *network.given)
    assert found.item() == functional.cross_entropy(network.module(x), y).item()
