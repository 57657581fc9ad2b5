"""What simpler ways to learn reach with the same budget: the same training code, in this process, without a network.

Every choice is made on validation samples. Personal parts may use all training samples of their device; what would be
uploaded uses only those that are not marked sensitive.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from coordinator.fleet.simulated import SimulatedFleet
from coordinator.methods import MethodSettings, RoundSummary
from coordinator.methods.fedavg import FedAvg
from edge_agent.worker import Worker
from fedge.messages import Sgd, blobs_of
from fedge.models import initial
from fedge.models.training import Network, Trainer, mean_loss
from fedge.task import TaskSpec
from fedge.tasks import DeviceData
from fedge.tensors import Layout, Model, unflatten

CHECKPOINTS: Final = (0, 10, 20, 40, 80)
"""Steps of fine-tuning that compete on validation samples, fedge.md section 15.1; 0 is FedAvg's own model."""
WITHOUT_VALIDATION: Final = 40
"""Steps where a device has nothing to choose by, fedge.md section 6."""


@dataclass(frozen=True, slots=True)
class Baselines:
    """Models of the baselines, by device id where every device has its own; `history` is FedAvg's."""

    fedavg: Model
    local_only: dict[str, Model]
    fedavg_finetuned: dict[str, Model]
    history: tuple[RoundSummary, ...]


async def learn(
    task: TaskSpec,
    data: Mapping[str, DeviceData],
    settings: MethodSettings,
    participations: Mapping[str, int],
    home: Path,
) -> Baselines:
    """Train all baselines.

    Args:
        task: what is learned.
        data: by device id.
        settings: rounds, participation, local training and seed of the federation to compare with.
        participations: how many rounds of local training each device spent there: local-only spends as many.
        home: scratch folder of the workers.
    """
    layout, first = initial(task, settings.seed)
    workers = {i: Worker(i, task, own, home / i) for i, own in data.items()}
    fleet = SimulatedFleet(task, layout, workers, seed=settings.seed)
    global_model, history = await fedavg(fleet, layout, first, settings)
    network = Network(task)
    local: dict[str, Model] = {}
    tuned: dict[str, Model] = {}
    for number, (device_id, own) in enumerate(sorted(data.items())):
        rng = np.random.default_rng([settings.seed, number])
        steps = settings.sgd.steps * participations.get(device_id, 0)
        local[device_id] = trained(network, first, own, settings.sgd, steps, rng)
        tuned[device_id] = fine_tuned(network, global_model, own, settings.sgd, rng)
        await asyncio.sleep(0)  # lets Ctrl-C in
    return Baselines(global_model, local, tuned, history)


async def fedavg(
    fleet: SimulatedFleet, layout: Layout, first: Model, settings: MethodSettings
) -> tuple[Model, tuple[RoundSummary, ...]]:
    """The global model after R rounds, and the rounds' history."""
    method = FedAvg(settings)
    state = method.initial(layout, fleet.put(unflatten(first, layout)))
    while state.round < settings.rounds:
        fleet.round = state.round + 1
        state = await method.round(state, fleet)
        fleet.keep_only({ref.digest for ref in blobs_of(state)})
        await asyncio.sleep(0)
    return fleet.get(state.model, layout), state.history


def trained(network: Network, start: Model, data: DeviceData, sgd: Sgd, steps: int, rng: np.random.Generator) -> Model:
    """A model after so many steps on all training samples of a device."""
    network.load(start)
    Trainer(network, data.x_train, data.y_train, sgd, rng).run(steps)
    return network.dump()


def fine_tuned(network: Network, start: Model, data: DeviceData, sgd: Sgd, rng: np.random.Generator) -> Model:
    """The checkpoint with the smallest validation loss, the earliest on a tie (early stopping)."""
    if not len(data.y_val):
        return trained(network, start, data, sgd, WITHOUT_VALIDATION, rng)
    network.load(start)
    trainer = Trainer(network, data.x_train, data.y_train, sgd, rng)
    best, smallest = start, mean_loss(network, data.x_val, data.y_val)
    for before, after in pairwise(CHECKPOINTS):
        trainer.run(after - before)
        loss = mean_loss(network, data.x_val, data.y_val)
        if loss < smallest:
            best, smallest = network.dump(), loss
    return best


def accuracy(network: Network, model: Model, x: NDArray[np.float32], y: NDArray[np.int64]) -> float:
    """Share of right answers; x: model inputs (n, *input_shape), n >= 1."""
    return float((network.logits(model, x).argmax(axis=1) == y).mean())
