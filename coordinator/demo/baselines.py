"""What simpler ways to learn reach with the same budget: the same worker, in this process, without a network.

Every choice is made on validation samples. Personal parts may use all training samples of their device; what would be
uploaded uses only those that are not marked sensitive.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import msgspec
import numpy as np
import torch
from edge_agent.worker import Worker
from numpy.typing import NDArray
from torch.nn import functional

from coordinator.fleet.simulated import SimulatedFleet
from coordinator.methods import MethodSettings, RoundSummary, accepted, blobs_of
from coordinator.methods.fedavg import FedAvg
from fedge.messages import Codec, Start, Train
from fedge.models import build, initial, load
from fedge.task import TaskSpec
from fedge.tasks import DeviceData
from fedge.tensors import Layout, Model, unflatten

FINE_TUNING_STEPS: Final = (10, 20, 40, 80)
"""Checkpoints of the fine-tuned baseline, fedge.md section 15.1; 0 steps, FedAvg's own model, competes as well."""
WITHOUT_VALIDATION: Final = 40
"""Steps where a device has nothing to choose by, fedge.md section 6."""


@dataclass(frozen=True, slots=True)
class Baselines:
    """Models of the baselines, by device id where every device has its own; `history` is FedAvg's."""

    layout: Layout
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
    shared = {i: Worker(i, task, own, home / "shared" / i) for i, own in data.items()}
    fleet = SimulatedFleet(task, layout, shared, seed=settings.seed)
    global_model, history = await fedavg(fleet, layout, first, settings)

    unmarked = {i: replace(own, sensitive=np.zeros_like(own.sensitive)) for i, own in data.items()}
    alone = {i: Worker(i, task, own, home / "alone" / i) for i, own in unmarked.items()}
    private = SimulatedFleet(task, layout, alone, seed=settings.seed)
    budget = {i: settings.sgd.steps * participations.get(i, 0) for i in data}
    local = await trained(private, layout, first, "local", budget, settings)
    checkpoints = [dict.fromkeys(data, global_model)]
    for steps in FINE_TUNING_STEPS:
        tuned = await trained(private, layout, global_model, f"tune-{steps}", dict.fromkeys(data, steps), settings)
        checkpoints.append(tuned)
    judge = Judge(task, layout)
    finetuned = {i: judge.best([models[i] for models in checkpoints], own) for i, own in data.items()}
    return Baselines(layout, global_model, local, finetuned, history)


async def fedavg(
    fleet: SimulatedFleet, layout: Layout, first: Model, settings: MethodSettings
) -> tuple[Model, tuple[RoundSummary, ...]]:
    """The global model after R rounds, and the rounds' history."""
    method = FedAvg(settings)
    state = method.initial(layout, fleet.put(unflatten(first, layout)))
    while state.round < settings.rounds:
        fleet.round = state.round + 1
        state = await method.round(state, fleet)
        fleet.keep_only(set(blobs_of(state)))
        await asyncio.sleep(0)  # lets Ctrl-C in
    return fleet.get(state.model, layout), state.history


async def trained(
    fleet: SimulatedFleet, layout: Layout, start: Model, step: str, n_steps: Mapping[str, int], settings: MethodSettings
) -> dict[str, Model]:
    """Each device's own copy of `start` after so many steps of SGD on what its worker may use."""
    ref = fleet.put(unflatten(start, layout))
    models = dict.fromkeys(n_steps, start)
    for device_id, steps in n_steps.items():
        sgd = msgspec.structs.replace(settings.sgd, steps=steps)
        order = Train(starts=(Start(model=ref),), sgd=sgd, codec=Codec.FLOAT32)
        for update in accepted(await fleet.run(step, {device_id: order})).values():
            change = fleet.get(update.update, layout)
            models[device_id] = replace(change, params=start.params + change.params)
        await asyncio.sleep(0)
    return models


class Judge:
    """Measures models of one task on labelled samples, with torch."""

    def __init__(self, task: TaskSpec, layout: Layout) -> None:
        self._module = build(task).eval()
        self._layout = layout

    def accuracy(self, model: Model, x: NDArray[np.float32], y: NDArray[np.int64]) -> float:
        """Share of right answers; x: model inputs (n, *input_shape), n >= 1."""
        return float((self._logits(model, x).argmax(dim=1).numpy() == y).mean())

    def loss(self, model: Model, x: NDArray[np.float32], y: NDArray[np.int64]) -> float:
        """Mean cross-entropy in nats."""
        return float(functional.cross_entropy(self._logits(model, x), torch.from_numpy(y)))

    def best(self, checkpoints: Sequence[Model], data: DeviceData) -> Model:
        """The checkpoint with the smallest validation loss, the earliest on a tie (early stopping)."""
        if not len(data.y_val):
            return checkpoints[1 + FINE_TUNING_STEPS.index(WITHOUT_VALIDATION)]
        return min(checkpoints, key=lambda model: self.loss(model, data.x_val, data.y_val))

    def _logits(self, model: Model, x: NDArray[np.float32]) -> torch.Tensor:
        load(self._module, model, self._layout)
        with torch.no_grad():
            logits: torch.Tensor = self._module(torch.from_numpy(x))
        return logits
