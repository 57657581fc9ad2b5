"""The devices of a simulation: samples dealt out, test samples kept apart, workers and first model."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from coordinator.fleet import devices
from coordinator.fleet.simulated import SimulatedFleet
from coordinator.simulation.samples import samples_of, shares_of
from coordinator.simulation.settings import Hardware, Partition, Scenario
from edge_agent import batched
from edge_agent.worker import Finished, Worker
from fedge import preprocess
from fedge.errors import ConfigError
from fedge.messages import BlobRef
from fedge.models import initial
from fedge.models.training import torch_device
from fedge.task import TaskSpec
from fedge.tasks import Pool, Share, set_apart, share_data
from fedge.tasks.partitioners import Milder
from fedge.tensors import Layout, Model, unflatten

Samples = tuple[NDArray[np.float32], NDArray[np.int64]]
DEVICES = 20
"""Unless the user or the data say otherwise (fedge.md 15.1)."""
_LOT = 77  # keeps the draw of the newcomers apart from the other uses of the seed


@dataclass(frozen=True, slots=True)
class Federation:
    """Equal for all methods of a comparison that have the same seed.

    shares: what each device has, by id. global_test: model inputs and labels, of all devices' distributions together,
    or None. server_data: those that the server may learn from, or None. newcomers: ids of the devices that come late.
    milder: what minimum sizes took.
    """

    task: TaskSpec
    shares: dict[str, Share]
    global_test: Samples | None
    server_data: Samples | None
    layout: Layout
    first: Model
    newcomers: frozenset[str] = frozenset()
    milder: Milder = field(default_factory=Milder)


def deal(scenario: Scenario, seed: int) -> Federation:
    """Read the samples, set the global test set apart, deal the rest out, make the first model.

    Raises:
        ConfigError: there are no such data, or they cannot be dealt out as asked for.
    """
    rest, apart = samples_of(scenario, seed, scenario.global_test)
    tested, server_data = set_apart(apart, scenario.server_data, seed=seed)
    n_devices = scenario.devices or _natural(scenario, rest)
    milder = Milder()
    shares = shares_of(scenario, rest, n_devices, seed, milder)
    width = len(str(n_devices - 1))
    layout, first = initial(rest.spec, seed)
    if scenario.newcomers >= n_devices:
        raise ConfigError(f"of {n_devices} devices {scenario.newcomers} cannot come when training is over")
    late = np.random.default_rng((seed, _LOT)).permutation(n_devices)[: scenario.newcomers]
    return Federation(
        task=rest.spec,
        shares={f"device-{i:0{width}}": share for i, share in enumerate(shares)},
        global_test=_inputs(tested),
        server_data=_inputs(server_data),
        layout=layout,
        first=first,
        newcomers=frozenset(f"device-{i:0{width}}" for i in late),
        milder=milder,
    )


def gather(
    federation: Federation,
    scenario: Scenario,
    seed: int,
    home: Path,
    execute: Callable[[Sequence[batched.Job]], list[Finished]] = batched.execute,
) -> tuple[SimulatedFleet, BlobRef, dict[str, Worker]]:
    """The fleet, the first model in it, and its workers, whose folders are made under `home`.

    `execute`: how the orders of a step are carried out; hostile devices come in here.

    Raises:
        ConfigError: what they are to train on is not there.
    """
    processor = torch_device(scenario.train_on)
    workers = {
        i: Worker(i, federation.task, share_data(federation.task, share), home / i, processor=processor)
        for i, share in federation.shares.items()
    }
    fleet = SimulatedFleet(
        federation.task,
        federation.layout,
        workers,
        seed=seed,
        hardware=machines(scenario.hardware, workers, seed),
        deadline_s=scenario.deadline_s,
        arrives=dict.fromkeys(federation.newcomers, scenario.rounds + 1),
        execute=execute,
    )
    return fleet, fleet.put(unflatten(federation.first, federation.layout)), workers


def machines(hardware: Hardware, ids: Iterable[str], seed: int) -> dict[str, devices.Hardware] | None:
    """What each device is; None: they take no time. "steady": those of "mixed", always there, always answering."""
    if hardware is Hardware.NONE:
        return None
    found = devices.mixed(ids, seed=seed)
    if hardware is Hardware.MIXED:
        return found
    return {i: dataclasses.replace(own, stays=1.0, drops=0.0) for i, own in found.items()}


def _natural(scenario: Scenario, rest: Pool) -> int:
    if scenario.partition is not Partition.NATURAL or rest.user is None:
        return DEVICES
    return int(rest.user.max()) + 1


def _inputs(samples: Pool) -> Samples | None:
    return (preprocess.apply(samples.spec, samples.x), samples.y) if len(samples.y) else None
