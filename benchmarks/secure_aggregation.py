"""What masked sums cost: bytes and time of one sum, for each device and for the coordinator.

Simulated devices, all in this process, one after the other: each step is carried out by the same code as on a device,
and by the coordinator's own (`coordinator.fleet.masked`). Training is left out: a device's update is drawn. Bytes are
those of orders, reports and blobs, without headers of MQTT.

    up, down     bytes of one device (mean); plain: FedAvg in float32
    device       processor seconds of one device's five steps (mean)
    coordinator  processor seconds of the coordinator: rosters, orders, taking masks off
    dropped      a share of the cohort that drops out after sharing, whose pairs' masks the coordinator takes out

Run: python benchmarks/secure_aggregation.py [--devices 10 100 1000] [--hidden 1000] [--dropped 0 0.1] [--json FILE]
"""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
from script import finish, parser_of, show

from coordinator.fleet.fleet import Answer, make_order
from coordinator.fleet.masked import MaskedFleet
from coordinator.fleet.simulated.fleet import SimulatedFleet
from edge_agent.device.encoding import send_update
from edge_agent.device.worker import Worker
from edge_agent.steps.training import train as training
from fedge.data.task import TaskSpec
from fedge.models import build
from fedge.privacy.masked_sums import Sums, _is_signed
from fedge.steps.contract import Action, Result, make_report
from fedge.steps.sgd import Sgd
from fedge.steps.training.train import Start, Train, Trained
from fedge.system.files import skip_fsync
from fedge.tasks import DeviceData
from fedge.tensors.layout import Codec, Model, unflatten
from fedge.wire.messages import encode_message, iterate_blobs


def drawn(device: Any, action: Train) -> Result:
    """As `train`, with an update that is drawn."""
    params = device.make_rng().normal(0, 0.01, device.layout.n_params).astype(np.float32)
    update = Model(params, np.zeros(0, np.float32), np.zeros(0, np.int64))
    return Trained(update=send_update(device, update, device.layout, action.codec), n_samples=device.data.n_shared)


class Measured(SimulatedFleet):
    """Each worker alone, with its time and bytes by step; some drop out when they are to train."""

    def __init__(self, *args: Any, dropped: frozenset[str], **named: Any) -> None:
        super().__init__(*args, **named)
        self.dropped = dropped
        self.device_s: dict[str, float] = defaultdict(float)
        self.up: dict[str, int] = defaultdict(int)
        self.down: dict[str, int] = defaultdict(int)
        self.files: dict[str, set[str]] = defaultdict(set)

    async def run(self, label: str, actions: Mapping[str, Action]) -> dict[str, Answer]:
        answers = {}
        for i, action in actions.items():
            if action.STEP.startswith("train") and i in self.dropped:
                answers[i] = Answer(i, None)
                continue
            order = make_order("run", 0, self.round, label, i, self._fingerprint, action, left_s=60.0)
            new = {ref.digest: ref.size_bytes for ref in iterate_blobs(action) if ref.digest not in self.files[i]}
            self.files[i] |= new.keys()
            self.down[i] += len(encode_message(order)) + sum(new.values())
            _is_signed.cache_clear()  # which others have checked before
            began = time.process_time()
            finished = self.workers[i].execute(order, self.get_bytes, action=action)
            self.device_s[i] += time.process_time() - began
            report = make_report(order, finished.result, 0.0)
            self.up[i] += len(encode_message(report)) + sum(ref.size_bytes for ref in report.blobs)
            self._blobs |= finished.blobs
            answers[i] = Answer(i, finished.result)
        return answers

    def mean(self, of: Mapping[str, float]) -> float:
        there = [of[i] for i in self.workers if i not in self.dropped]
        return sum(there) / len(there)


async def measure(n: int, hidden: int, dropped: float, home: Path) -> dict[str, Any]:
    shape = {"input_shape": (64,), "model": "mlp", "model_options": {"hidden": hidden}}
    task = TaskSpec(name="sums", classes=tuple("0123456789"), **shape)
    layout, first = build.make_initial_model(task, 0)
    x = np.zeros((20, 64), np.float32)
    data = DeviceData(x, np.zeros(20, np.int64), np.zeros(20, bool), x[:0], np.zeros(0, np.int64))
    workers = {f"d{k:04d}": Worker(f"d{k:04d}", task, data, home / str(k)) for k in range(n)}
    gone = frozenset(list(workers)[: round(n * dropped)])
    row: dict[str, Any] = {"devices": n, "parameters": layout.n_params, "dropped": len(gone)}
    for kind in ("plain", "masked"):
        fleet = Measured(task, layout, workers, seed=0, dropped=gone)
        fleet.round = 1
        ref = fleet.put(unflatten(first, layout))
        order = Train(starts=(Start(model=ref),), sgd=Sgd(), codec=Codec.FLOAT32, measure=False)
        began = time.process_time()
        with patch.object(training, "run", drawn):
            if kind == "plain":
                found = await fleet.run("train", dict.fromkeys(workers, order))
            else:
                masked = MaskedFleet(fleet, layout, weights="samples", min_cohort=5, sums=Sums(), seed=(0, 1))
                found = await masked.run("train", dict.fromkeys(workers, order))
        total_s = time.process_time() - began
        assert sum(isinstance(answer.result, Trained) for answer in found.values()) == n - len(gone)
        row[kind] = {
            "up": fleet.mean(fleet.up),
            "down": fleet.mean(fleet.down),
            "device_s": fleet.mean(fleet.device_s),
            "coordinator_s": total_s - sum(fleet.device_s.values()),
        }
    return row


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--devices", type=int, nargs="+", default=[10, 100, 1000])
    parser.add_argument("--hidden", type=int, default=1000, help="units of an mlp: 75 parameters each")
    parser.add_argument("--dropped", type=float, nargs="+", default=[0.0, 0.1])
    options = parser.parse_args()
    rows = []
    for n in options.devices:
        for share in options.dropped:
            with tempfile.TemporaryDirectory() as home, skip_fsync():  # processor time knows nothing of the disk
                rows.append(asyncio.run(measure(n, options.hidden, share, Path(home))))
    show(rows)
    finish(options, rows)


if __name__ == "__main__":
    main()
