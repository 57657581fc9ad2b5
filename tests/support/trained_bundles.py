"""Bundles of one trained network: for tests where a bundle is really better or worse."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from export import Candidate, GateWeights, Mixture, write_bundle
from fedge.data.preprocessing import preprocess
from fedge.data.task import TaskSpec
from fedge.models.build import make_network
from fedge.models.network import dump_model, find_head_name, make_layout
from fedge.wire.messages import Role


def trained_bundle(
    folder: Path, task: TaskSpec, x: NDArray[np.float32], y: NDArray[np.int64], *, release: int, steps: int = 300
) -> Path:
    """Train the task's network on samples of the pool, and write it as a bundle with a single candidate."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(release)
        module = make_network(task)
        inputs, labels = torch.from_numpy(preprocess(task, x)), torch.from_numpy(y)
        optimizer = torch.optim.Adam(module.parameters(), lr=0.01)
        for _ in range(steps):
            batch = torch.randint(len(labels), (64,))
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(module(inputs[batch]), labels[batch]).backward()
            optimizer.step()
    layout = make_layout(module, find_head_name(module, task))
    mixture = Mixture(
        (Candidate(Role.GLOBAL, "global", dump_model(module, layout)),),
        np.log(np.full(task.n_classes, 1 / task.n_classes)),
        0.0,
        GateWeights.make_untrained(task.input_shape, 1),
    )
    write_bundle(
        folder, task=task, layout=layout, mixture=mixture, validation=preprocess(task, x[:50]),
        release=release, method="test", metrics={},
    )  # fmt: skip
    return folder
