"""Bundles of trained networks: for tests where a bundle is really better or worse."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from export import Candidate, GateWeights, Mixture, write_bundle
from fedge.data.preprocessing import preprocess
from fedge.data.task import TaskSpec
from fedge.models.build import make_network
from fedge.models.network import dump_model, find_head_name, make_layout
from fedge.wire.messages import Role

N_VALIDATION = 50
OWN_SHARE = 0.8
"""Weight of the own candidate where there are two."""


def trained_bundle(
    folder: Path, task: TaskSpec, x: NDArray[np.float32], y: NDArray[np.int64], *, release: int, steps: int = 300
) -> Path:
    """Train the task's network on samples of the pool, and write it as a bundle with a single candidate."""
    module = _train(task, x, y, release, steps)
    layout = make_layout(module, find_head_name(module, task))
    candidate = Candidate(Role.GLOBAL, "global", dump_model(module, layout), make_flat_prior(task))
    return _write(folder, task, (x, y), (candidate,), release, beta=0.0)


def mixed_bundle(
    folder: Path,
    task: TaskSpec,
    own: tuple[NDArray[np.float32], NDArray[np.int64]],
    everybodys: tuple[NDArray[np.float32], NDArray[np.int64]],
    *,
    release: int,
) -> Path:
    """Train a private network on a device's own samples and a global one on everybody's; energies count."""
    validation = torch.from_numpy(preprocess(task, own[0][:N_VALIDATION]))
    candidates = []
    for role, weight, (x, y) in ((Role.PRIVATE, OWN_SHARE, own), (Role.GLOBAL, 1 - OWN_SHARE, everybodys)):
        module = _train(task, x, y, release, 600)
        with torch.no_grad():
            energies = torch.logsumexp(module.eval()(validation), dim=1)
        model = dump_model(module, make_layout(module, find_head_name(module, task)))
        mean, std = float(energies.mean()), float(energies.std())
        prior = make_flat_prior(task)
        candidates.append(Candidate(role, str(role), model, prior, energy_mean=mean, energy_std=std, weight=weight))
    return _write(folder, task, own, tuple(candidates), release, beta=1.0)


def make_flat_prior(task: TaskSpec) -> NDArray[np.float64]:
    return np.log(np.full(task.n_classes, 1 / task.n_classes))


def _train(task: TaskSpec, x: NDArray[np.float32], y: NDArray[np.int64], seed: int, steps: int) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        module = make_network(task)
        inputs, labels = torch.from_numpy(preprocess(task, x)), torch.from_numpy(y)
        optimizer = torch.optim.Adam(module.parameters(), lr=0.01)
        for _ in range(steps):
            batch = torch.randint(len(labels), (64,))
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(module(inputs[batch]), labels[batch]).backward()
            optimizer.step()
    return module


def _write(
    folder: Path,
    task: TaskSpec,
    samples: tuple[NDArray[np.float32], NDArray[np.int64]],
    candidates: tuple[Candidate, ...],
    release: int,
    *,
    beta: float,
) -> Path:
    module, (x, y) = make_network(task), (each[:N_VALIDATION] for each in samples)
    mixture = Mixture(
        candidates,
        beta,
        GateWeights.make_untrained(task.input_shape, len(candidates)),
    )
    write_bundle(
        folder, task=task, layout=make_layout(module, find_head_name(module, task)), mixture=mixture,
        validation=preprocess(task, x), targets=y, release=release, method="test", metrics={},
    )  # fmt: skip
    return folder
