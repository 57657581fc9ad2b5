"""Boxes: where in the picture is the digit, and which one is it? A problem of your own, with its own loss and score.

Each of four cameras sees digits somewhere on a canvas, turned by 0, 90, 180 or 270 degrees. The network gives the four
edges of the ink and ten scores of classes. fedge does not know what these numbers mean, so `Boxes` says what is learned
(`loss`), what people read (`score`, the mean overlap) and what a caller gets (`decode`):

    export PYTHONPATH=examples
    python -m boxes cameras
    fedge simulate --task arrays --data cameras/all.npz --problem boxes:Boxes --partition natural --optimizer adam

    fedge broker
    fedge coordinator --broker localhost:1883 --federation boxes --home server --task cameras/task.json --devices 4 \
        --optimizer adam --allow boxes:Boxes
    fedge agent --broker localhost:1883 --federation boxes --id cam0 --home cam0 --task cameras/task.json \
        --allow boxes:Boxes --data cameras/cam0.npz
    python -m boxes cameras/cam0.npz cam0/bundles/1

A task.json names the class, and a machine runs it only if its owner says so (`--allow`). The last command needs no
torch: it predicts with ONNX Runtime, decodes the first answers, and prints the score of the camera's own samples.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from torch import Tensor

SIDE = 16  # pixels of the canvas
Array = NDArray[Any]


class Box(NamedTuple):
    """A digit and its edges in pixels."""

    digit: int
    left: float
    top: float
    right: float
    bottom: float


class Boxes:
    """One digit in each picture. A target is its edges as shares of the canvas, and its class."""

    outputs = (14,)
    targets = (5,)

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Smooth L1 of the edges, and cross-entropy of the class."""
        from torch.nn import functional

        edges = functional.smooth_l1_loss(outputs[:, :4], targets[:, :4], reduction="none", beta=0.1).sum(dim=1)
        return 5 * edges + functional.cross_entropy(outputs[:, 4:], targets[:, 4].long(), reduction="none")

    def score(self, outputs: Array, targets: Array) -> float:
        """Mean overlap of the boxes (IoU)."""
        return float(compute_overlap(outputs[:, :4], targets[:, :4]).mean())

    def decode(self, outputs: Array) -> list[Box]:
        """The digit and its edges in pixels."""
        edges = outputs[:, :4].clip(0, 1) * SIDE
        return [Box(int(k), *map(float, row)) for k, row in zip(outputs[:, 4:].argmax(axis=1), edges, strict=True)]


def compute_overlap(a: Array, b: Array) -> Array:
    """Intersection over union of boxes (n, 4): left, top, right, bottom."""
    inner = np.minimum(a[:, 2:], b[:, 2:]) - np.maximum(a[:, :2], b[:, :2])
    both = inner.clip(0).prod(axis=1)
    areas = [(box[:, 2:] - box[:, :2]).clip(0).prod(axis=1) for box in (a, b)]
    return both / np.maximum(areas[0] + areas[1] - both, 1e-9)


def write_cameras(folder: Path, n: int = 4, *, seed: int = 0, per_camera: int = 400) -> None:
    """Write what each camera sees: all.npz for simulations, cam0.npz, ... and the task."""
    from fedge.tasks import load_pool, load_task, write_task

    rng, digits = np.random.default_rng(seed), load_pool("digits")
    x = np.zeros((n * per_camera, 1, SIDE, SIDE), np.float32)
    y = np.zeros((n * per_camera, 5), np.float32)
    user = np.arange(len(x)) % n
    for i, k in enumerate(rng.integers(0, len(digits.y), len(x))):
        top, left = rng.integers(0, SIDE - 7, 2)
        x[i, 0, top : top + 8, left : left + 8] = np.rot90(digits.x[k], user[i]) / 16
        ink = x[i, 0] > 0.25
        rows, columns = np.flatnonzero(ink.any(axis=1)), np.flatnonzero(ink.any(axis=0))
        edges = np.array([columns[0], rows[0], columns[-1] + 1, rows[-1] + 1])
        y[i] = (*edges / SIDE, digits.y[k])
    folder.mkdir(parents=True, exist_ok=True)
    np.savez(folder / "all.npz", x=x, y=y, user=user)
    for i in range(n):
        np.savez(folder / f"cam{i}.npz", x=x[user == i], y=y[user == i])
    write_task(load_task("arrays", folder / "all.npz", problem="boxes:Boxes"), folder / "task.json")


def predict(samples: Path, bundle: Path) -> float:
    """Ask a bundle about the samples of a camera; print the first answers, and return the score."""
    import deploy

    with np.load(samples) as table:
        x, y = table["x"], table["y"]
    answer = deploy.load(bundle).predict(x)
    for box in answer.decode(Boxes)[:3]:
        print(box)
    return Boxes().score(answer.outputs, y)


if __name__ == "__main__":
    if len(sys.argv) == 2:
        write_cameras(Path(sys.argv[1]))
    else:
        print(f"score {predict(Path(sys.argv[1]), Path(sys.argv[2])):.2f}")
