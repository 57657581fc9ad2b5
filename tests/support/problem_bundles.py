"""A tiny device of each kind of problem: samples, and bundles that have learned them well or hardly at all."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from export import Candidate, GateWeights, Mixture, write_bundle
from fedge.data.problems.calibration import Calibration
from fedge.data.problems.multi_label import MultiLabel
from fedge.data.problems.own import Own
from fedge.data.problems.problem import Problem
from fedge.data.problems.reconstruction import Reconstruction
from fedge.data.problems.regression import Regression
from fedge.data.problems.segmentation import Segmentation
from fedge.data.task import TaskSpec
from fedge.data.validation import Validation
from fedge.models.build import make_network
from fedge.models.network import dump_model, find_head_name, make_layout
from fedge.models.problems.losses import compute_mean_loss
from fedge.system.loading import allow_code
from fedge.wire.messages import Role
from tests.support.own_problem import NEAREST

KINDS: Final = ("classification", "multi-label", "regression", "segmentation", "reconstruction", "own")
N_VALIDATION: Final = 60


def factory(task: TaskSpec) -> nn.Module:
    """A linear network of any input and output."""
    shape = task.problem.get_output_shape(task.input_shape)
    return nn.Sequential(nn.Flatten(), nn.Linear(math.prod(task.input_shape), math.prod(shape)), nn.Unflatten(1, shape))


@dataclass(frozen=True)
class Kind:
    """A task of a kind, its samples x (n, ...), and their targets in their own units."""

    task: TaskSpec
    x: NDArray[np.float32]
    y: NDArray[Any]

    @property
    def problem(self) -> Problem:
        return self.task.problem

    def convert(self) -> NDArray[Any]:
        return self.problem.convert_targets(self.y, len(self.y), self.task.input_shape, "y")

    def save_validation(self, home: Path) -> None:
        """The first samples are those by which the device knows its bundles."""
        Validation(self.x[:N_VALIDATION], self.convert()[:N_VALIDATION]).save(home)

    def write_bundle(self, folder: Path, *, release: int, steps: int) -> Path:
        """A mixture of two candidates that have learned for so many steps."""
        y = self.convert()
        validation, own = torch.from_numpy(self.x[:N_VALIDATION]), y[:N_VALIDATION]
        candidates, module = [], make_network(self.task)
        for k, role in enumerate((Role.PRIVATE, Role.GLOBAL)):
            module = self._train(y, seed=10 * release + k, steps=steps)
            with torch.no_grad():
                outputs = module(validation).numpy()
            reduced = self.problem.reduce_outputs(outputs, validation.numpy())
            offset = self.problem.fit_offset(own, lambda found=reduced: found)  # type: ignore[misc]
            how = self._calibrate(reduced, own, offset)
            energies = self.problem.compute_energies(reduced, self.problem.calibrate(reduced, how, offset))
            layout = make_layout(module, find_head_name(module, self.task))
            mean, std = float(energies.mean()), float(energies.std())
            model = dump_model(module, layout)
            candidates.append(Candidate(role, str(role), model, offset, how, mean, std or 1.0, 0.5))
        gate = GateWeights.make_untrained(self.task.input_shape, 2)
        write_bundle(
            folder, task=self.task, layout=layout, mixture=Mixture(tuple(candidates), 0.0, gate),
            validation=validation.numpy(), targets=own, release=release, method="test", metrics={},
        )  # fmt: skip
        return folder

    def _train(self, y: NDArray[Any], *, seed: int, steps: int) -> nn.Module:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            module = make_network(self.task)
            optimizer = torch.optim.Adam(module.parameters(), lr=0.05)
            x, targets = torch.from_numpy(self.x), torch.from_numpy(y)
            for _ in range(steps):
                optimizer.zero_grad()
                compute_mean_loss(self.problem, module(x), x, targets).backward()  # type: ignore[no-untyped-call]
                optimizer.step()
        return module.eval()

    def _calibrate(self, outputs: NDArray[Any], y: NDArray[Any], offset: NDArray[Any]) -> Calibration:
        sums = np.array(self.problem.compute_statistics(outputs, y, offset, own=False))
        return self.problem.finish_choice(self.problem.list_choices(own=False)[0], 0, sums / len(y))


def make_kind(name: str, n: int = 200) -> Kind:
    """Samples whose targets follow from them."""
    rng = np.random.default_rng(7)
    x = rng.normal(size=(n, 4)).astype(np.float32)
    picture = np.where(rng.random((n, 1, 4, 4)) < 0.5, 1, 0).astype(np.float32)
    made: dict[str, tuple[Any, NDArray[np.float32], NDArray[Any]]] = {
        "classification": (msgspec.UNSET, x, x[:, :3].argmax(axis=1)),
        "multi-label": (MultiLabel(labels=("hot", "wet", "loud")), x, (x[:, :3] > 0).astype(np.int64)),
        "regression": (
            Regression(targets=("delay", "load"), mean=(30.0, 5.0), std=(10.0, 2.0), units=("min", "kg")),
            x,
            (x[:, :2] * (10, 2) + (30, 5)).astype(np.float32),
        ),
        "segmentation": (Segmentation(classes=("none", "cat")), picture, picture[:, 0].astype(np.int64)),
        "reconstruction": (Reconstruction(), x * np.float32(0.5), np.zeros(n, np.int64)),
        "own": (Own(code=NEAREST, outputs=(1, 2), targets=(2,)), x, x[:, 2:].copy()),
    }
    allow_code([NEAREST])
    asked, x, y = made[name]
    classes = ("a", "b", "c") if asked is msgspec.UNSET else ()
    network = "tests.support.problem_bundles:factory"
    return Kind(TaskSpec(name=name, classes=classes, input_shape=x.shape[1:], model=network, asked=asked), x, y)
