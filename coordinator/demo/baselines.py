"""Baselines with the same budget: FedAvg, FedAvg with fine-tuning, every device alone.

They are the methods `fedavg+ft` and `local` on workers in this process: the same training code. Every choice is made on
validation samples. Personal parts may use all training samples of their device; uploads use only non-sensitive ones.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from coordinator.fleet.simulated import SimulatedFleet
from coordinator.methods import MethodSettings, RoundSummary, make
from coordinator.methods.local import learn_alone
from coordinator.simulation.rounds import run
from edge_agent.worker import Worker
from fedge import bundle
from fedge.messages import Role
from fedge.models import initial
from fedge.models.training import Network
from fedge.task import TaskSpec
from fedge.tasks import DeviceData
from fedge.tensors import HEAD, Layout, Model, Tensors, flatten, from_bytes, unflatten


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
        participations: rounds of local training that each device spent; the local-only baseline spends as many.
        home: scratch folder of the workers.
    """
    layout, first = initial(task, settings.seed)

    def fleet(name: str) -> SimulatedFleet:
        workers = {i: Worker(i, task, own, home / name / i) for i, own in data.items()}
        return SimulatedFleet(task, layout, workers, seed=settings.seed)

    shared, alone = fleet("fedavg"), fleet("local")
    method = make("fedavg+ft", settings)
    state = await run(method, method.init(layout, shared.put(unflatten(first, layout))), shared)
    steps = {i: settings.sgd.steps_for(own.n_shared) * participations.get(i, 0) for i, own in data.items()}
    local = await learn_alone(alone, alone.put(unflatten(first, layout)), settings.sgd, steps)
    return Baselines(
        fedavg=shared.get(state.model, layout),
        local_only={i: best_expert(home / "local" / i / "bundles" / "1", layout) for i in local},
        fedavg_finetuned={i: best_expert(home / "fedavg" / i / "bundles" / "1", layout) for i in state.installed},
        history=state.history,
    )


def best_expert(folder: Path, layout: Layout) -> Model:
    """The expert that the device chose by validation; without experts, the global model, or the only one.

    With a pool of private modules (PM-MoE), the device's own module on the shared part.
    """
    manifest, _ = bundle.look(folder)

    def tensors(part: bundle.Part) -> Tensors:
        return from_bytes((folder / part.file_name).read_bytes())

    if isinstance(manifest.pool, bundle.PoolInfo):
        own = tensors(manifest.candidates[manifest.pool.own].part)
        if manifest.pool.trunk is None:
            return flatten(own, layout)
        trunk = tensors(manifest.pool.trunk)
        head = (tensor.name for tensor in layout.select(HEAD).tensors)
        added = {name: np.add(trunk[name], own[short]) for name, short in zip(head, ("weight", "bias"), strict=True)}
        return flatten(trunk | added, layout)
    candidates = {candidate.role: candidate for candidate in manifest.candidates}
    chosen = next(candidates[role] for role in (Role.EXPERT, Role.GLOBAL, *Role) if role in candidates)
    return flatten(tensors(chosen.part), layout)


def accuracy(network: Network, model: Model, x: NDArray[np.float32], y: NDArray[np.int64]) -> float:
    """Share of right answers; x: model inputs (n, *input_shape), n >= 1."""
    return float((network.logits(model, x).argmax(axis=1) == y).mean())
