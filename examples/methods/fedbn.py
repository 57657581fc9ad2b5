"""FedBN: FedAvg whose normalisation layers stay on each device.

Source: Li et al., "FedBN: Federated Learning on Non-IID Features via Local Batch Normalization", ICLR 2021, Alg. 1.
Weights, biases and running statistics of all normalisation layers are personal: they learn on the device, never travel,
and are part of the device's bundle. Everything else is averaged.

It helps where devices see the same things differently. So there is a network with batch normalisation here, and digits
as twelve cameras see them that differ in contrast, half of them inverted:

    export PYTHONPATH=examples
    python -m methods.fedbn cameras
    fedge compare --task arrays --data cameras/all.npz --model methods.fedbn:network --partition natural \
        --methods fedavg,methods.fedbn:FedBN

    fedge broker
    fedge coordinator --broker localhost:1883 --federation cameras --home server --task cameras/task.json --devices 12 \
        --method methods.fedbn:FedBN --allow methods.fedbn:network
    fedge agent --broker localhost:1883 --federation cameras --id cam0 --home cam0 --task cameras/task.json \
        --allow methods.fedbn:network --data cameras/cam0.npz
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from coordinator.methods.baselines.personal_layers import PersonalLayers, PersonalState

if TYPE_CHECKING:
    from torch import nn

    from fedge.data.task import TaskSpec


class FedBN(PersonalLayers[PersonalState]):
    """Algorithm 1: all layers are averaged but for those that normalise."""

    name = "fedbn"
    personal = ("norm",)
    sends_initial = False


def network(task: TaskSpec) -> nn.Module:
    """Two convolutions with batch normalisation, for images of 4 x 4 pixels or more."""
    from torch import nn

    n_channels, height, width = task.input_shape
    return nn.Sequential(
        nn.Conv2d(n_channels, 16, 3, padding=1, bias=False),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1, bias=False),
        nn.BatchNorm2d(32),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(32 * (height // 4) * (width // 4), task.n_classes),
    )


def write_cameras(folder: Path, n: int = 12, *, seed: int = 0, limit: int | None = None) -> None:
    """Digits (8 x 8 pixels in [0, 1]) as n cameras see them: all.npz for simulations, cam0.npz, ... and task.json.

    Camera i has contrast 1, 1/2 or 1/4 around grey, and shows a negative where i is odd.
    """
    from fedge.tasks import load_pool, load_task, write_task

    digits = load_pool("digits", seed=seed, limit=limit)
    user = np.random.default_rng(seed).permutation(len(digits.y)) % n
    contrast = 0.5 ** (user // 2 % 3) * np.where(user % 2, -1.0, 1.0)
    x = 0.5 + contrast[:, None, None] * (digits.x / 16.0 - 0.5)
    x = x[:, None].astype(np.float32)
    folder.mkdir(parents=True, exist_ok=True)
    np.savez(folder / "all.npz", x=x, y=digits.y, user=user)
    for i in range(n):
        np.savez(folder / f"cam{i}.npz", x=x[user == i], y=digits.y[user == i])
    task = load_task("arrays", folder / "all.npz")
    write_task(msgspec.structs.replace(task, model="methods.fedbn:network"), folder / "task.json")


if __name__ == "__main__":
    write_cameras(Path(sys.argv[1]))
