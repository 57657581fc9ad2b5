"""Two fleets to which the same samples come, but for sensitive ones, say the same, byte for byte.

The sensitive ones differ in number, content and the moments at which they come, into the store and into the source. So
do those that a store gives up for newer ones.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from coordinator.fleet.simulated.fleet import SimulatedFleet
from coordinator.methods.catalogue import make_method
from coordinator.methods.method import Server
from coordinator.methods.settings import MethodSettings
from coordinator.simulation.rounds import run_rounds
from edge_agent.device.device import make_repeatable_source
from edge_agent.device.own_samples import OwnSamples
from edge_agent.device.worker import FinishedOrder, Worker
from edge_agent.learning.batched import Job
from edge_agent.samples import Answered, SampleStore
from edge_agent.samples.sources import count_shared
from fedge.models import build
from fedge.steps.sgd import Sgd
from fedge.tasks import Pool, load_pool
from fedge.tasks.sampling import draw_stratified
from fedge.tensors.layout import unflatten
from tests.integration.test_sensitive_samples import Wire

N_DEVICES = 3
METHODS = ["fedavg", "ditto", "scmoe-pfl", "fedepc", "fedcoe", "pm-moe", "fedge"]


class GrowingDevice:
    """A device whose samples come between its orders; `secret` decides what comes that is sensitive, and when."""

    def __init__(self, name: str, samples: Pool, home: Path, seed: int, secret: int) -> None:
        rng = np.random.default_rng((seed, int(name[1:])))
        self._pool, self._order = samples, rng.permutation(len(samples.y))[:300]
        self._plain = iter(self._order)
        self._own_rng = np.random.default_rng((secret, int(name[1:]))) if secret else None
        self._rows: list[tuple[NDArray[np.float32], int, bool]] = []
        self._source = home / "source.npz"
        home.mkdir(parents=True)
        (home / "samples.toml").write_text("[samples]\nper_class = 4\n")
        self._append([next(self._plain) for _ in range(60)])
        self.store = SampleStore(home, samples.spec)
        self.own = OwnSamples(samples.spec, home, self._source, seed=seed, trains=True)
        self.worker = Worker(name, samples.spec, self.own.read(), home, source=make_repeatable_source)
        self._n_calls = 0

    def _append(self, numbers: Sequence[int]) -> None:
        """Write the source with further samples, and perhaps sensitive ones among them."""
        self._rows += [(self._pool.x[i], int(self._pool.y[i]), False) for i in numbers]
        for _ in range(0 if self._own_rng is None else int(self._own_rng.integers(8))):
            self._rows.insert(int(self._own_rng.integers(len(self._rows))), (*self._draw_secret(), True))
        x, y, marks = zip(*self._rows, strict=True)
        np.savez(self._source, x=np.stack(x), y=np.array(y), sensitive=np.array(marks))

    def _draw_secret(self) -> tuple[NDArray[np.float32], int]:
        """Draw a sensitive sample: noise, or one that comes without the mark as well, sooner or later."""
        assert self._own_rng is not None
        if self._own_rng.integers(2):
            i = self._own_rng.choice(self._order[:150])
            return self._pool.x[i], int(self._pool.y[i])
        return self._own_rng.integers(0, 17, (8, 8)).astype(np.float32), int(self._own_rng.integers(10))

    def grow(self) -> None:
        """Let samples come before an order."""
        self._n_calls += 1
        for _ in range(0 if self._own_rng is None else int(self._own_rng.integers(4))):
            x, y = self._draw_secret()
            self.store.add(x, y, origin="http", sensitive=True, answered=Answered(0, 1))
        if self._n_calls % 2:
            for i in [next(self._plain) for _ in range(6)]:
                y = int(self._pool.y[i])
                self.store.add(self._pool.x[i], y, origin="http", answered=Answered(y // 2, 1), at=0.0)
        if self._n_calls % 3 == 0 or (self._own_rng is not None and self._own_rng.integers(2)):
            self._append([next(self._plain) for _ in range(3)] if self._n_calls % 3 == 0 else [])
        if self.own.has_changed():
            self.worker.data = self.own.read()

    def describe(self) -> tuple[int, ...]:
        """What its status and its health tell of samples."""
        recent = self.store.count_recent_answers(50)
        return count_shared(self.store), self.store.data_version, self.store.n_arrived, *recent


class GrowingWire(Wire):
    """What devices send while samples come."""

    def __init__(self, devices: dict[str, GrowingDevice]) -> None:
        super().__init__()
        self._devices = devices
        self.told: list[tuple[int, ...]] = []

    def __call__(self, jobs: Sequence[Job]) -> list[FinishedOrder]:
        for job in jobs:
            device = self._devices[job.worker.id]
            device.grow()
            self.told.append(device.describe())
        return super().__call__(jobs)


def run(method: str, samples: Pool, seed: int, home: Path, secret: int) -> tuple[GrowingWire, int]:
    """What a fleet sends in a run, and how many sensitive samples its devices have in the end."""
    layout, first = build.make_initial_model(samples.spec, seed)
    names = [f"d{i}" for i in range(N_DEVICES)]
    devices = {name: GrowingDevice(name, samples, home / name, seed, secret) for name in names}
    wire = GrowingWire(devices)
    workers = {name: device.worker for name, device in devices.items()}
    fleet = SimulatedFleet(samples.spec, layout, workers, seed=seed, execute=wire)
    settings = MethodSettings(rounds=4, seed=seed, sgd=Sgd(steps=3))
    server = draw_stratified(samples.y, 60, np.random.default_rng(0))
    x = (samples.x[server] / 16).astype(np.float32).reshape(-1, *samples.spec.input_shape)
    made = make_method(method, settings, Server(samples.spec, (x, samples.y[server])))
    asyncio.run(run_rounds(made, made.init(layout, fleet.put(unflatten(first, layout))), fleet))
    n_marked = sum(int(d.worker.data.sensitive.sum()) for d in devices.values())
    for device in devices.values():
        device.own.close()
        device.store.close()
    return wire, n_marked


@pytest.fixture(scope="module")
def samples() -> Pool:
    return load_pool("digits", seed=0)


@pytest.mark.parametrize("method", METHODS)
def test_sensitive_samples_that_come_shape_nothing_that_leaves(method: str, samples: Pool, tmp_path: Path) -> None:
    without, none = run(method, samples, 1, tmp_path / "without", 0)
    for secret in (1, 2):
        other, n_marked = run(method, samples, 1, tmp_path / str(secret), secret)
        assert n_marked > none == 0
        assert other.told == without.told
        assert len(other.said) == len(without.said)
        assert [k for k, (a, b) in enumerate(zip(without.said, other.said, strict=True)) if a != b] == []
    versions = [version for _, version, *_ in without.told]
    assert versions[-1] > versions[0], "samples came all the time"
