"""FedAvg by Apple's pfl-research (`pfl`), in its environment: `frameworks.py` writes the folder and reads the answer.

Local training, statistics and aggregation are pfl's, in one process, as its own benchmarks run on one machine without
a GPU. A client that is idle makes no pass over its samples.

    ENVIRONMENT/bin/python pfl_simulation.py FOLDER
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from pfl.aggregate.simulate import SimulatedBackend
from pfl.algorithm.base import NNAlgorithmParams
from pfl.algorithm.federated_averaging import FederatedAveraging
from pfl.callback.base import TrainingProcessCallback
from pfl.data.dataset import Dataset
from pfl.data.federated_dataset import FederatedDataset
from pfl.hyperparam.base import NNEvalHyperParams, NNTrainHyperParams
from pfl.metrics import Metrics
from pfl.model.pytorch import PyTorchModel
from plain import NETWORKS, Plan, Samples, answer
from torch import Tensor, nn
from torch.nn import functional


class Network(nn.Module):
    """A network with the two functions that pfl asks for."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def loss(self, x: Tensor, y: Tensor, *, eval: bool = False) -> Tensor:  # noqa: A002 - pfl's name
        self.train(not eval)
        return functional.cross_entropy(self.inner(x), y)

    def metrics(self, *_: object, **__: object) -> dict[str, float]:
        return {}


class Clock(TrainingProcessCallback):  # type: ignore[misc, unused-ignore]
    """When each round ended."""

    def __init__(self) -> None:
        self.ends: list[float] = []

    def after_central_iteration(self, *_: object, **__: object) -> tuple[bool, Metrics]:
        self.ends.append(time.perf_counter())
        return False, Metrics()


def fedavg(model: str, clients: Sequence[Samples], plan: Plan, idle: bool) -> list[float]:
    """Seconds of each round but the first one."""

    def data_of(k: int) -> Dataset:
        x, y = clients[k]
        return Dataset(raw_data=[torch.from_numpy(x), torch.from_numpy(y)])

    def in_turn() -> Any:
        while True:
            yield from range(len(clients))

    network = Network(NETWORKS[model](clients[0][0].shape[1:], 10))
    learner = PyTorchModel(
        model=network,
        local_optimizer_create=partial(torch.optim.SGD, momentum=plan.momentum),
        central_optimizer=torch.optim.SGD(network.parameters(), lr=1.0),
    )
    data = FederatedDataset(data_of, partial(next, in_turn()))
    clock = Clock()
    FederatedAveraging().run(
        algorithm_params=NNAlgorithmParams(
            central_num_iterations=plan.rounds,
            evaluation_frequency=10**6,
            train_cohort_size=len(clients),
            val_cohort_size=0,
        ),
        backend=SimulatedBackend(training_data=data, val_data=data),
        model=learner,
        model_train_params=NNTrainHyperParams(
            local_num_epochs=0 if idle else 1, local_learning_rate=plan.learning_rate, local_batch_size=plan.batch_size
        ),
        model_eval_params=NNEvalHyperParams(local_batch_size=None),
        callbacks=[clock],
    )
    return np.diff(clock.ends).tolist()


if __name__ == "__main__":
    answer(Path(sys.argv[1]), fedavg)
