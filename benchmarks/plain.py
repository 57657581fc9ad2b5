"""Networks, local training and two algorithms in plain PyTorch, written from the papers, to compare fedge with.

Nothing of fedge is used here, so that an error of ours would show. Samples are model inputs (n, ...) float32 and
labels (n,); weights are named tensors, as in a state_dict.

FedAvg: McMahan et al., AISTATS 2017, Algorithm 1, with steps in place of epochs. FedPer: Arivazhagan et al., 2019,
Algorithms 1 and 2, the personalization layer being the last one.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional

Samples = tuple[NDArray[np.float32], NDArray[np.int64]]
Weights = dict[str, Tensor]


@dataclass(frozen=True, slots=True)
class Plan:
    """What every client does in every round."""

    rounds: int
    steps: int
    batch_size: int
    learning_rate: float
    momentum: float
    seed: int


# --------------------------------------------------------------------------------------------------------- networks


def mlp(shape: tuple[int, ...], n_classes: int) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(int(np.prod(shape)), 32), nn.ReLU(), nn.Linear(32, n_classes))


def cnn(shape: tuple[int, ...], n_classes: int) -> nn.Module:
    return _two_convolutions(shape, n_classes, kernel=3, channels=(16, 32), hidden=64)


def cnn_fedavg(shape: tuple[int, ...], n_classes: int) -> nn.Module:
    return _two_convolutions(shape, n_classes, kernel=5, channels=(32, 64), hidden=512)


NETWORKS: dict[str, Callable[[tuple[int, ...], int], nn.Module]] = {"mlp": mlp, "cnn": cnn, "cnn_fedavg": cnn_fedavg}


def _two_convolutions(
    shape: tuple[int, ...], n_classes: int, kernel: int, channels: tuple[int, int], hidden: int
) -> nn.Module:
    colours, height, width = shape
    first, second = channels
    return nn.Sequential(
        nn.Conv2d(colours, first, kernel, padding=kernel // 2),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(first, second, kernel, padding=kernel // 2),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(second * (height // 4) * (width // 4), hidden),
        nn.ReLU(),
        nn.Linear(hidden, n_classes),
    )


def answer(folder: Path, seconds_of: Callable[[str, Sequence[Samples], Plan, bool], list[float]]) -> None:
    """What `frameworks.py` asks for: seconds of rounds by model, clients, plan, and whether clients are idle."""
    asked = json.loads((folder / "asked.json").read_text())
    torch.set_num_threads(asked["threads"])
    with np.load(folder / "clients.npz") as arrays:
        clients = list(zip(arrays["x"], arrays["y"], strict=True))
    plan = Plan(**asked["plan"])
    found = {name: seconds_of(asked["model"], clients, plan, name == "idle") for name in asked["kinds"]}
    (folder / "found.json").write_text(json.dumps(found))


# --------------------------------------------------------------------------------------------------- one client, score


def client_update(module: nn.Module, samples: Samples, plan: Plan, round_number: int, client: int) -> None:
    """SGD with momentum on shuffled batches of one size; what is left over of a pass is left out."""
    x, y = map(torch.from_numpy, samples)
    seed = int(np.random.SeedSequence((plan.seed, round_number, client)).generate_state(1)[0])
    drawn = batches(len(y), plan.batch_size, torch.Generator().manual_seed(seed))
    optimiser = torch.optim.SGD(module.parameters(), lr=plan.learning_rate, momentum=plan.momentum)
    module.train()
    for batch in islice(drawn, plan.steps):
        optimiser.zero_grad()
        functional.cross_entropy(module(x[batch]), y[batch]).backward()  # type: ignore[no-untyped-call]
        optimiser.step()


def batches(n: int, batch_size: int, generator: torch.Generator) -> Iterator[Tensor]:
    size = min(batch_size, n)
    while True:
        yield from torch.split(torch.randperm(n, generator=generator)[: n // size * size], size)


def weights_of(module: nn.Module) -> Weights:
    """A copy of the weights."""
    return {name: tensor.clone() for name, tensor in module.state_dict().items()}


def accuracy(module: nn.Module, weights: Weights, samples: Samples) -> float:
    """Share of the samples that are classified correctly."""
    x, y = map(torch.from_numpy, samples)
    module.load_state_dict(weights)
    module.eval()
    with torch.no_grad():
        return float((module(x).argmax(dim=1) == y).double().mean())


# ------------------------------------------------------------------------------------------------------- algorithms


def fedavg(module: nn.Module, first: Weights, clients: Sequence[Samples], plan: Plan) -> Weights:
    """w <- sum_k (n_k / n) w_k, every client in every round: the last w."""
    w = first
    for t in range(plan.rounds):
        trained = []
        for k, samples in enumerate(clients):
            module.load_state_dict(w)
            client_update(module, samples, plan, t, k)
            trained.append(weights_of(module))
        w = mean(trained, clients)
    return w


def fedper(module: nn.Module, first: Weights, clients: Sequence[Samples], plan: Plan) -> list[Weights]:
    """W_B <- sum_k (n_k / n) W_Bk, W_Pk stays at client k: of each client the last (W_B, W_Pk)."""
    head = list(first)[-2:]  # weight and bias of the last layer
    w_b = {name: tensor for name, tensor in first.items() if name not in head}
    w_p = [{name: first[name] for name in head} for _ in clients]
    for t in range(plan.rounds):
        trained = []
        for k, samples in enumerate(clients):
            module.load_state_dict(w_b | w_p[k])
            client_update(module, samples, plan, t, k)
            w_k = weights_of(module)
            w_p[k] = {name: w_k.pop(name) for name in head}
            trained.append(w_k)
        w_b = mean(trained, clients)
    return [w_b | own for own in w_p]


def mean(trained: Sequence[Weights], clients: Sequence[Samples]) -> Weights:
    """Weighted by the clients' samples."""
    n = sum(len(y) for _, y in clients)
    return {
        name: sum((len(y) / n * w[name] for w, (_, y) in zip(trained, clients, strict=True)), torch.zeros(()))
        for name in trained[0]
    }
