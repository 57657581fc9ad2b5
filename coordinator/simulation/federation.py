"""The devices of a simulation: partitioned samples, separate test samples, workers and first model."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache, partial
from pathlib import Path
from typing import Final, TypeVar

import numpy as np
from numpy.typing import NDArray

from coordinator.fleet.simulated import devices
from coordinator.fleet.simulated.fleet import Execute, SimulatedFleet
from coordinator.selection.select import compute_cohort_size
from coordinator.simulation.settings import Hardware, Scenario
from edge_agent.device.device import make_repeatable_source
from edge_agent.device.worker import Worker
from edge_agent.learning import batched
from fedge.data import preprocessing
from fedge.data.task import TaskSpec
from fedge.errors import ConfigError
from fedge.models.build import make_initial_model
from fedge.models.training import get_torch_device
from fedge.steps.masked.mask_shares import MAX_COHORT
from fedge.tasks import DeviceData, Pool, Share, make_device_data, partition_pool, set_apart
from fedge.tasks.generated import Generated, make_device_names
from fedge.tasks.partition import count_turns, load_samples
from fedge.tasks.partitioners import Milder
from fedge.tasks.shares import convert_targets
from fedge.tensors.layout import Layout, Model
from fedge.wire.messages import BlobRef

T = TypeVar("T")
Samples = tuple[NDArray[np.float32], NDArray[np.int64]]
DEVICES = 20
"""Number of devices unless the user or the data say otherwise (fedge.md 15.1)."""
KEPT: Final = 512
"""Workers kept in memory, those used last, if the devices' data are generated on demand."""
_LOT = 77  # keeps the draw of late joiners separate from other uses of the seed


@dataclass(frozen=True, slots=True)
class Federation:
    """The devices' data and the first model, equal for all methods of a comparison with the same seed.

    shares: data of each device, by id. global_test: model inputs and labels from all devices' distributions together,
    or None. server_data: samples for the server, or None. late_joiners: ids of the devices that join after training.
    milder: what minimum sizes changed in the partition. hardware: of each device, in place of the scenario's.
    """

    task: TaskSpec
    shares: Mapping[str, Share]
    global_test: Samples | None
    server_data: Samples | None
    layout: Layout
    first: Model
    late_joiners: frozenset[str] = frozenset()
    milder: Milder = field(default_factory=Milder)
    hardware: Mapping[str, devices.Hardware] | None = None

    @property
    def data(self) -> Mapping[str, DeviceData]:
        """The data that workers see, by device id, made on each access; can be sent to other processes."""
        return LazyMapping(self.shares, partial(_make_data, self.task, self.shares))

    def with_head_class(self, name: str, seed: int) -> Federation:
        """Return the federation of a method with another head in the network (`Method.HEAD_CLASS`)."""
        if name == self.task.head_class:
            return self
        task = self.task.with_head_class(name)
        layout, first = make_initial_model(task, seed)
        return dataclasses.replace(self, task=task, layout=layout, first=first)

    def draw_measured(self, n: int | None, seed: int) -> tuple[str, ...]:
        """Draw the devices whose accuracy is measured: all, or a random choice; ascending."""
        ids = list(self.shares)
        if n is None or n >= len(ids):
            return tuple(ids)
        return tuple(ids[k] for k in sorted(np.random.default_rng((seed, _LOT, n)).permutation(len(ids))[:n]))


class LazyMapping(Mapping[str, T]):
    """Values by device id, made on access. `kept`: how many values, those used last, are not made again."""

    def __init__(self, ids: Iterable[str], make: Callable[[str], T], kept: int = 0) -> None:
        self._ids = dict.fromkeys(ids)
        self._made = lru_cache(kept)(make) if kept else make

    def __getitem__(self, device_id: str) -> T:
        return self._made(device_id)

    def __iter__(self) -> Iterator[str]:
        return iter(self._ids)

    def __len__(self) -> int:
        return len(self._ids)


def partition_samples(scenario: Scenario, seed: int) -> Federation:
    """Read the samples, set the global test set apart, partition the rest, make the first model.

    Raises:
        ConfigError: there are no such data, they cannot be partitioned as requested, or masked sums cannot cover the
            devices.
    """
    rest, tested, server_data = _set_apart(scenario, seed)
    n_devices = scenario.devices or _count_users(scenario, rest)
    if scenario.masking:
        require_summable(
            compute_cohort_size(n_devices - scenario.late_joiners, scenario.participation), scenario.min_cohort
        )
    milder = Milder()
    names = make_device_names(n_devices)
    shares: Mapping[str, Share] = (
        Generated(rest, n_devices, scenario, seed=seed)
        if scenario.partition == "generated"
        else dict(zip(names, partition_pool(rest, n_devices, scenario, seed=seed, milder=milder), strict=True))
    )
    layout, first = make_initial_model(rest.spec, seed)
    if scenario.late_joiners >= n_devices:
        raise ConfigError(f"{scenario.late_joiners} late joiners of {n_devices} devices leave no device to train")
    late = np.random.default_rng((seed, _LOT)).permutation(n_devices)[: scenario.late_joiners]
    return Federation(
        task=rest.spec,
        shares=shares,
        global_test=_preprocess(tested),
        server_data=_preprocess(server_data),
        layout=layout,
        first=first,
        late_joiners=frozenset(names[i] for i in late),
        milder=milder,
    )


def _set_apart(scenario: Scenario, seed: int) -> tuple[Pool, Pool, Pool]:
    """Return the samples to partition, the global test set, and the server's samples, which are never test samples."""
    rest, tested = load_samples(scenario, seed, scenario.global_test, tests=True)
    if rest.is_test is None:
        return (rest, *set_apart(tested, scenario.server_data, seed=seed))
    share = scenario.global_test * scenario.server_data
    rest, own = set_apart(rest, share, seed=seed, turns=count_turns(scenario), of=~rest.is_test)
    return rest, tested, own


def require_summable(n_train: int, fewest: int) -> None:
    """Refuse masked sums if too few or too many devices train in a round.

    Raises:
        ConfigError: `n_train` is below `fewest` or above `MAX_COHORT`.
    """
    if not fewest <= n_train <= MAX_COHORT:
        raise ConfigError(
            f"a masked sum covers {fewest} to {MAX_COHORT} devices, and {n_train} train in a round: "
            "change --devices or --participation"
        )


def make_fleet(
    federation: Federation, scenario: Scenario, seed: int, home: Path, execute: Execute = batched.execute_jobs
) -> tuple[SimulatedFleet, BlobRef, Mapping[str, Worker]]:
    """Make the fleet with its workers, whose folders are under `home`; return the fleet, the first model, the workers.

    Devices that are not measured leave after the rounds of training, since the final steps only serve their bundles.
    `execute`: how a step's orders are carried out; hostile devices are inserted here.

    Raises:
        ConfigError: the processor to train on is missing.
    """
    processor, data = get_torch_device(scenario.train_on), federation.data

    def make_worker(i: str) -> Worker:
        return Worker(
            *(i, federation.task, data[i], home / i),
            min_cohort=scenario.min_cohort,
            processor=processor,
            student=scenario.student,
            source=make_repeatable_source,
        )

    few = scenario.partition != "generated"
    workers = {i: make_worker(i) for i in data} if few else LazyMapping(data, make_worker, KEPT)
    measured, end = set(federation.draw_measured(scenario.measured, seed)), scenario.rounds + 1
    fleet = SimulatedFleet(
        federation.task,
        federation.layout,
        workers,
        seed=seed,
        hardware=federation.hardware or make_hardware(scenario.hardware, workers, seed),
        deadline_s=scenario.deadline_s,
        arrives=dict.fromkeys(federation.late_joiners, end),
        leaves=dict.fromkeys((i for i in data if i not in measured), end),
        alike=not few and scenario.marks == "samples",
        execute=execute,
    )
    return fleet, fleet.put_model(federation.first, federation.layout), workers


def make_hardware(hardware: Hardware, ids: Iterable[str], seed: int) -> dict[str, devices.Hardware] | None:
    """Return each device's hardware; None for "none", which takes no time.

    "steady" is "mixed" with devices that are always present and always answer.
    """
    if hardware == "none":
        return None
    found = devices.draw_mixed(ids, seed=seed)
    if hardware == "mixed":
        return found
    return {i: dataclasses.replace(own, stays=1.0, drops=0.0) for i, own in found.items()}


def _make_data(task: TaskSpec, shares: Mapping[str, Share], device_id: str) -> DeviceData:
    return make_device_data(task, shares[device_id])


def _count_users(scenario: Scenario, rest: Pool) -> int:
    if scenario.partition != "natural" or rest.user is None:
        return DEVICES
    return int(rest.user.max()) + 1


def _preprocess(samples: Pool) -> Samples | None:
    if not len(samples.y):
        return None
    return preprocessing.preprocess(samples.spec, samples.x), convert_targets(samples.spec, samples.y)
