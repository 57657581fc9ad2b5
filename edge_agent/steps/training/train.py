"""Train the shared model on D_L: FedAvg, methods whose layers stay on the device, and fedge's own loss.

Model split (baselines.md sections 6 to 10): some layers stay on the device. FedPer: Arivazhagan et al., "Federated
Learning with Personalization Layers", 2019. LG-FedAvg: Liang et al., "Think Locally, Act Globally", 2020. FedRep:
Collins et al., "Exploiting Shared Representations for Personalized Federated Learning", ICML 2021, Algorithm 1.

Everything learns from D_L, because the layers that stay shape the gradient of the shared layers, so that whatever they
learned from a sensitive sample would show in the upload. FedRep's head is trained for steps of SGD, not epochs; running
statistics belong to the base and change in both phases.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Final

from msgspec import UNSET

from edge_agent.device.device import Device
from edge_agent.learning.class_means import NearClassMeans
from edge_agent.learning.frame import Learned, Recipe, fit, train_alone, train_together
from fedge.steps.contract import Result
from fedge.steps.training.train import Train
from fedge.tensors.layers import Layers, cut, paste
from fedge.tensors.layout import Model, Tensors, flatten

THREADED: Final = True
"""Whether orders may run in threads, because the step draws from no generator of the process."""

overlay = paste
"""The function that replaces a model's personal layers by the kept ones."""


def run(device: Device, action: Train) -> Result:
    """Train by FedAvg, or a method whose layers `action.personal` stay on the device."""
    return train_alone(device, action, lambda start, _: learn(device, action, start))


def many(devices: Sequence[Device], actions: Sequence[Train]) -> list[Result | None]:
    """Train several devices as `run` does, side by side: small networks without personal layers."""
    return train_together(devices, actions, make_recipe)


def make_recipe(action: Train) -> Recipe:
    """Make the recipe by which the order moves the weights."""
    if action.personal:
        return Recipe(action.sgd, head_steps=action.head_steps)
    if action.class_means is UNSET:
        return Recipe(action.sgd)
    return Recipe(action.sgd, objective=NearClassMeans(action.class_means, action.sgd))


def learn(device: Device, action: Train, start: Model) -> Learned:
    """Train, and return the trained model with its personal layers."""
    network = device.network
    network.load(start)
    fit(network, [device], make_recipe(action))
    if not action.personal:
        return Learned(network.present())
    trained = network.dump()
    return Learned(trained, cut(trained, device.layout, device.layout.select(action.personal)))


def train(device: Device, action: Train, learn: Callable[[Model, Tensors | None], tuple[Model, Tensors]]) -> Result:
    """Train in the frame of version 0.1, with kept tensors by name; version 0.3 removes this function."""
    text = "edge_agent.steps.training.train.train is edge_agent.steps.train_alone now; it goes with version 0.3"
    warnings.warn(text, FutureWarning, stacklevel=2)
    keeps = action.select_kept(action.personal, device.layout)
    assert keeps is not None

    def learn_vectors(start: Model, mine: Layers | None) -> Learned:
        trained, kept = learn(start, None if mine is None else mine.get_tensors())
        return Learned(trained, flatten(kept, keeps))

    return train_alone(device, action, learn_vectors)
