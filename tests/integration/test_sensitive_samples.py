"""Two fleets that differ in sensitive samples alone say the same, byte for byte, whatever the method."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from coordinator.fleet.simulated import SimulatedFleet, run
from coordinator.methods import MethodSettings, Server, make
from edge_agent.batched import Job, one_by_one
from edge_agent.device import Owner
from edge_agent.worker import Finished, Worker
from fedge import models
from fedge.messages import encode
from fedge.sgd import Sgd
from fedge.step import report_of
from fedge.tasks import DeviceData, Pool, partition, pool, share_data
from fedge.tensors import unflatten

ROUNDS = 5
METHODS = [
    "local",
    "fedavg",
    "fedavg+ft",
    "fedavgm",
    "fedprox",
    "ditto",
    "ditto+ft",
    "fedper",
    "fedrep",
    "lg-fedavg",
    "fedrod",
    "dbe",
    "pm-moe",
    "pm-moe:base=fedrod",
    "pm-moe:base=dbe",
    "cfic",
    "fedepc",
    "fedcoe",
    "scmoe-pfl",
    "fedge",
]


class Wire:
    """What the devices of a simulated fleet would send: every report with its blobs, in order."""

    def __init__(self) -> None:
        self.said: list[bytes] = []

    def __call__(self, jobs: Sequence[Job]) -> list[Finished]:
        finished = one_by_one(jobs)
        for job, done in zip(jobs, finished, strict=True):
            self.said.append(encode(report_of(job.order, done.result, 0.0)))
            self.said.extend(done.blobs[digest] for digest in sorted(done.blobs))
        return finished


def other_sensitive(data: DeviceData, rng: np.random.Generator) -> DeviceData:
    """The device with other sensitive samples, and another number of them."""
    x, y = data.shared
    x_val, y_val = data.shared_validation
    n, m = int(rng.integers(1, 25)), int(rng.integers(0, 6))
    more, more_val = (rng.random((k, *x.shape[1:]), np.float32) for k in (n, m))
    labels, labels_val = (rng.integers(0, 10, k) for k in (n, m))
    order, order_val = (np.sort(rng.permutation(a + b)[:a]) for a, b in ((len(y), n), (len(y_val), m)))
    return DeviceData(*_mixed(x, y, more, labels, order), *_mixed(x_val, y_val, more_val, labels_val, order_val))


def _mixed(x, y, more, labels, places):
    """Samples at some places, the sensitive ones at the others; and the marks."""
    marks = np.ones(len(y) + len(labels), np.bool_)
    marks[places] = False
    both_x, both_y = np.empty((len(marks), *x.shape[1:]), np.float32), np.empty(len(marks), np.int64)
    both_x[places], both_x[marks], both_y[places], both_y[marks] = x, more, y, labels
    return both_x, both_y, marks


@pytest.fixture(scope="module")
def samples() -> Pool:
    return pool("digits", seed=0, limit=600)


def said(method: str, devices: dict[str, DeviceData], samples: Pool, seed: int, home: Path) -> list[bytes]:
    layout, first = models.initial(samples.spec, seed)
    workers = {
        i: Worker(i, samples.spec, data, home / i, owner=Owner(shares_private=True)) for i, data in devices.items()
    }
    wire = Wire()
    fleet = SimulatedFleet(samples.spec, layout, workers, seed=seed, execute=wire)
    name, _, option = method.partition(":")
    options = dict([option.split("=")]) if option else {}
    settings = MethodSettings(rounds=ROUNDS, seed=seed, sgd=Sgd(steps=4), options=options)
    x = (samples.x[:80] / 16).astype(np.float32).reshape(80, *samples.spec.input_shape)
    made = make(name, settings, Server(samples.spec, (x, samples.y[:80])))
    import asyncio

    asyncio.run(run(made, made.init(layout, fleet.put(unflatten(first, layout))), fleet))
    return wire.said


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("method", METHODS)
def test_sensitive_samples_shape_nothing_that_leaves(method: str, seed: int, samples: Pool, tmp_path: Path) -> None:
    shares = partition(samples, 4, how="groups", alpha=1.0, sensitive=0.4, seed=seed, n_groups=2)
    devices = {f"d{i}": share_data(samples.spec, share) for i, share in enumerate(shares)}
    rng = np.random.default_rng(100 + seed)
    others = {i: other_sensitive(data, rng) for i, data in devices.items()}
    first = said(method, devices, samples, seed, tmp_path / "first")
    second = said(method, others, samples, seed, tmp_path / "second")
    assert len(first) == len(second)
    assert [k for k, (a, b) in enumerate(zip(first, second, strict=True)) if a != b] == []
