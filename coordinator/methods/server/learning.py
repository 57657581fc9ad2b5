"""The computations of FedCoE's server on its labelled data: experts, gate, scores of clients, assembled bundles.

Source: arXiv 2605.21264; specification docs/methods/fedcoe.md. The maths on the results is in
`coordinator.aggregation.correlation`. Only this part of the coordinator holds torch; a method that needs it imports it.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterable, Sequence
from typing import Final, Literal

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torch.nn import functional

from coordinator.aggregation.correlation import Array
from coordinator.methods.server.assembling import make_files
from export import Mixture
from fedge.bundle.formula import softmax
from fedge.bundle.trunk import POOLED
from fedge.data.task import TaskSpec
from fedge.errors import ConfigError
from fedge.models.training import CPU, Network, Trainer, draw_batches, seed_torch, to_tensor
from fedge.steps.sgd import Sgd
from fedge.tensors.layout import Layout, Model, Tensors

log = logging.getLogger("fedge.method")

Trunk = Literal["auto", "vector"]

HIDDEN: Final = 64  # d, section 4
CHANNELS: Final = (8, 16)  # of the gate's two convolutions, section 4
GATE_SGD: Final = Sgd(batch_size=32, learning_rate=0.05, momentum=0.9)
"""Settings of the gate's training. With learning rate 0.1 (section 5) the convolutional gate died on digits, on three
seeds of three."""
GATE_DECAY: Final = 5e-4  # its weight decay, section 5
CHUNK: Final = 512
"""Most samples in a forward pass of the gate, to limit the memory."""


class Gate(nn.Module):
    """The gate G(x), section 4: a trunk of its own, 64 features, softmax over K experts (Eq. 3).

    `trunk`: "auto" is two convolutions for images of at least 4 x 4, otherwise a linear layer; "vector" is always the
    linear layer.
    """

    def __init__(self, input_shape: tuple[int, ...], n_experts: int, trunk: Trunk = "auto") -> None:
        super().__init__()
        self.convolves = trunk == "auto" and len(input_shape) == 3 and min(input_shape[1:]) >= 4
        n_features = int(np.prod(input_shape))
        if self.convolves:
            self.conv1 = nn.Conv2d(input_shape[0], CHANNELS[0], 3, padding=1)
            self.conv2 = nn.Conv2d(CHANNELS[0], CHANNELS[1], 3, padding=1)
            n_features = CHANNELS[1] * POOLED**2
        self.hidden = nn.Linear(n_features, HIDDEN)
        self.out = nn.Linear(HIDDEN, n_experts, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Compute scores (n, K); the gate's output is their softmax."""
        if self.convolves:
            for layer in (self.conv1, self.conv2):
                x = functional.max_pool2d(functional.relu(layer(x)), 2)
            x = functional.adaptive_avg_pool2d(x, POOLED)
        scores: torch.Tensor = self.out(functional.relu(self.hidden(x.flatten(1))))
        return scores


class ServerData:
    """The labelled samples D_s of the server, and the computations on them.

    Args:
        task: the task to learn.
        x: (n, *input_shape) model inputs.
        y: (n,) labels.
        processor: the processor that trains and evaluates the task's network.

    Raises:
        ConfigError: there are no samples, or they do not fit the task.
    """

    def __init__(
        self, task: TaskSpec, x: NDArray[np.float32], y: NDArray[np.int64], processor: torch.device = CPU
    ) -> None:
        if not len(y):
            raise ConfigError("the server data is empty: fedcoe cannot start without labelled samples on the server")
        if x.shape != (len(y), *task.input_shape) or y.min() < 0 or y.max() >= task.n_classes:
            raise ConfigError(f"the server data {x.shape} with labels up to {y.max()} does not fit task {task.name}")
        if missing := sorted(set(range(task.n_classes)) - set(y.tolist())):
            log.warning("event=server_data_classes the server data has no sample of classes %s", missing)
        self.task = task
        self.x = np.ascontiguousarray(x, np.float32)
        self.y = y
        self._network = Network(task, processor)

    def pretrain(
        self, start: Model, groups: Sequence[int], n_experts: int, *, epochs: int, sgd: Sgd, seed: int
    ) -> list[Model]:
        """Train experts that each learn their own group of classes, all from the same start (section 3).

        Args:
            start: the common initialisation.
            groups: expert of each class, (C,).
            n_experts: K; an expert without samples stays at the start.
            epochs: passes over the expert's samples.
            sgd: settings for learning rate, momentum, weight decay and batch size.
            seed: the seed of the batches.
        """
        experts = []
        for j in range(n_experts):
            own = np.isin(self.y, [c for c, group in enumerate(groups) if group == j])
            if not own.any():
                log.warning(
                    "event=expert_without_samples expert %s has no samples of the server: it starts untrained", j
                )
                experts.append(start)
                continue
            n = int(own.sum())
            steps = epochs * -(-n // min(sgd.batch_size, n))
            plain = msgspec.structs.replace(sgd, steps=steps, epochs=0, proximal_mu=0.0)
            with seed_torch(seed, self._network.processor):
                self._network.load(start)
                rng = np.random.default_rng((seed, j))
                Trainer(self._network, self.x[own], self.y[own], plain, rng).run(steps)
            experts.append(self._network.dump())
        return experts

    def compute_scores(self, models: Iterable[Model]) -> Array:
        """Compute the true class's probability, (n, number of models) (Eq. 5); 0 if an output is not finite."""
        rows = np.arange(len(self.y))
        columns = [self.compute_probabilities(model)[rows, self.y] for model in models]
        return np.nan_to_num(np.stack(columns, axis=1), nan=0.0)

    def compute_probabilities(self, model: Model, x: NDArray[np.float32] | None = None) -> Array:
        """Compute class probabilities (n, C) of a model, by default for D_s; NaN where it is not finite."""
        logits = self._network.compute_logits(model, self.x if x is None else x)
        with np.errstate(invalid="ignore", over="ignore"):
            return softmax(logits)

    # ------------------------------------------------------------------------------------------------- the gate

    def train_gate(self, s: Array, start: Tensors | None, *, trunk: Trunk, epochs: int, seed: int) -> Tensors:
        """Fit the gate to the suitability s (n, K) by the mean of KL(s || G) over D_s (Eq. 2).

        Args:
            s: rows on the simplex, which training does not change.
            start: the gate to start from; a new gate if None.
            trunk: as in `Gate`.
            epochs: passes over D_s.
            seed: the seed of the weights and the batches.
        """
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            gate = Gate(self.task.input_shape, s.shape[1], trunk)
        if start is not None:
            gate.load_state_dict({name: torch.tensor(value) for name, value in start.items()})
        optimiser = torch.optim.SGD(
            gate.parameters(), lr=GATE_SGD.learning_rate, momentum=GATE_SGD.momentum, weight_decay=GATE_DECAY
        )
        n = len(self.y)
        steps = epochs * -(-n // min(GATE_SGD.batch_size, n))
        x, target = to_tensor(self.x), to_tensor(s.astype(np.float32))
        for batch in itertools.islice(draw_batches(n, GATE_SGD.batch_size, np.random.default_rng(seed)), steps):
            rows = torch.from_numpy(batch)
            loss = functional.kl_div(functional.log_softmax(gate(x[rows]), dim=1), target[rows], reduction="batchmean")
            optimiser.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimiser.step()
        return {name: value.detach().numpy().copy() for name, value in gate.state_dict().items()}

    def compute_routing(self, gate: Tensors, x: NDArray[np.float32] | None = None) -> Array:
        """Compute p(x) = G(x), (n, K), for inputs, by default for D_s (Eq. 6)."""
        inputs = to_tensor(self.x if x is None else x)
        trunk: Trunk = "auto" if "conv1.weight" in gate else "vector"
        module = Gate(self.task.input_shape, len(gate["out.weight"]), trunk)
        module.load_state_dict({name: torch.tensor(value) for name, value in gate.items()})
        with torch.inference_mode():
            parts = [torch.softmax(module(chunk).double(), dim=1) for chunk in torch.split(inputs, CHUNK)]
        return torch.cat(parts).numpy()

    # ------------------------------------------------------------------------------------------------ cold start

    def make_bundle(self, mixture: Mixture, *, layout: Layout, release: int, method: str) -> dict[str, bytes]:
        """Make a bundle by file name (sections 6 and 7); torch and ONNX Runtime agree on D_s.

        Args:
            mixture: an assembled model alone, experts whose outputs are mixed, or the global model.
            layout: the layout of the models.
            release: the release of the bundle.
            method: named in the manifest.
        """
        return make_files(mixture, self.x, task=self.task, layout=layout, release=release, method=method)
