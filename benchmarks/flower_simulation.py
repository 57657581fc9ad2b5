"""FedAvg by Flower's own simulation engine: clients, strategy and aggregation are Flower's, local training PyTorch's.

Flower is no dependency of the project. `frameworks.py` makes an environment for it and runs this file there. For
`independent.py`, which needs both in one:

    python -m venv /tmp/flower
    /tmp/flower/bin/pip install "flwr[simulation]==1.41.0" torch==2.13.0 scikit-learn -e ".[agent]"
    /tmp/flower/bin/python benchmarks/independent.py

`import flower_simulation` raises ImportError where it is not installed. Nothing is reported to Flower or to Ray.
"""

from __future__ import annotations

import os

os.environ |= {"FLWR_TELEMETRY_ENABLED": "0", "RAY_USAGE_STATS_ENABLED": "0"}
os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")  # no GPU is asked for; saves a warning

import logging
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import ray  # noqa: F401, TID251 - of flwr[simulation]: without it there is no engine
import torch
from flower_deployed import Timed
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.simulation import run_simulation
from plain import NETWORKS, Plan, Samples, Weights, answer, client_update, weights_of
from torch import nn

client = ClientApp()


@dataclass(frozen=True, slots=True)
class Outcome:
    """weights: the last global model; seconds: of each round but the first two, which start processes."""

    weights: Weights
    seconds: list[float]


def fedavg(model: str, first: Weights, clients: Sequence[Samples], plan: Plan, *, idle: bool = False) -> Outcome:
    """Every client in every round. `idle`: clients send back what they were sent, at once.

    Args:
        model: one of `plain.NETWORKS`.
        first: its weights.
        clients: samples of each.
        plan: what they do.
        idle: see above.
    """
    logging.getLogger("flwr").setLevel(logging.ERROR)
    strategy = Timed(len(clients))
    found: list[Weights] = []
    server = ServerApp()
    with tempfile.TemporaryDirectory() as folder:
        arrays: dict[str, Any] = {}
        for k, (x, y) in enumerate(clients):
            arrays |= {f"x{k}": x, f"y{k}": y}
        np.savez(Path(folder) / "clients.npz", **arrays)
        config = ConfigRecord({"model": model, "folder": folder, "idle": idle, **asdict(plan)})

        @server.main()  # type: ignore[untyped-decorator, unused-ignore]
        def _(grid: Grid, _: Context) -> None:
            result = strategy.start(grid, ArrayRecord(first), num_rounds=plan.rounds, train_config=config)
            found.append(dict(result.arrays.to_torch_state_dict()))

        cores = len(os.sched_getaffinity(0))
        run_simulation(
            server,
            client,
            num_supernodes=len(clients),
            backend_config={
                "client_resources": {"num_cpus": 1, "num_gpus": 0.0},  # as many at once as there are cores
                "init_args": {"num_cpus": cores, "log_to_driver": False},
            },
        )
    return Outcome(found[0], np.diff(strategy.ends[1:]).tolist())


# -------------------------------------------------------------------------------------------- in Flower's processes


@client.train()  # type: ignore[untyped-decorator, unused-ignore]
def _train(message: Message, context: Context) -> Message:
    """One client's part of a round."""
    config, k = message.content["config"], int(context.node_config["partition-id"])
    samples = _clients(config["folder"])[k]
    arrays = message.content["arrays"]
    if not config["idle"]:
        module = _network(config["model"], samples[0].shape[1:], 10)
        module.load_state_dict(arrays.to_torch_state_dict())
        plan = Plan(**{name: config[name] for name in Plan.__slots__})
        client_update(module, samples, plan, config["server-round"], k)
        arrays = ArrayRecord(module.state_dict())
    metrics = MetricRecord({"num-examples": len(samples[1])})
    return Message(RecordDict({"arrays": arrays, "metrics": metrics}), reply_to=message)


@lru_cache(maxsize=1)
def _clients(folder: str) -> list[Samples]:
    """All clients' samples, read once by each process."""
    torch.set_num_threads(1)
    with np.load(Path(folder) / "clients.npz") as arrays:
        return [(arrays[f"x{k}"], arrays[f"y{k}"]) for k in range(len(arrays.files) // 2)]


@lru_cache(maxsize=1)
def _network(model: str, shape: tuple[int, ...], n_classes: int) -> nn.Module:
    return NETWORKS[model](shape, n_classes)


# ------------------------------------------------------------------------------------------------ for frameworks.py


def seconds(model: str, clients: Sequence[Samples], plan: Plan, idle: bool) -> list[float]:
    """Of each round but the first two."""
    first = weights_of(NETWORKS[model](clients[0][0].shape[1:], 10))
    return fedavg(model, first, clients, plan, idle=idle).seconds


if __name__ == "__main__":
    import flower_simulation  # Ray's processes need it under its name

    answer(Path(sys.argv[1]), flower_simulation.seconds)
