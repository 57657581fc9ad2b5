"""A task of your own: vibration of a machine -> healthy, worn or broken.

A task is one class with two methods, and a network is one function. Put this file where both the coordinator and the
agents can import it, and name it:

    export PYTHONPATH=examples
    fedge coordinator --task custom_task:Vibration --home server ...
    fedge agent       --task custom_task:Vibration --data machine7.npz --home machine7 ...

The coordinator calls `spec` and the network alone; the data stay where they are.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from fedge.data.task import Preprocessing, TaskSpec
from fedge.tasks import DeviceData

WINDOW = 64  # readings per sample
STATES = ("healthy", "worn", "broken")


class Vibration:
    """Windows of an accelerometer, cut from one recording per machine state."""

    def spec(self, data: Path | None) -> TaskSpec:  # noqa: ARG002 - nothing of it depends on the data
        """What is learned: the same on all machines, or their fingerprints differ and orders fail."""
        return TaskSpec(
            name="vibration",
            classes=STATES,
            input_shape=(1, WINDOW),
            model="custom_task:network",
            model_options={"channels": 8},
            preprocessing=Preprocessing(scale=9.81),  # m/s2 -> g; also applied at inference
        )

    def device_data(self, source: Path, *, seed: int) -> DeviceData:
        """This device's samples, as model inputs.

        `source` is an .npz with one long recording per state ("healthy", "worn", "broken"). Hold out some windows for
        validation, and mark as sensitive what must never shape an uploaded model: here, everything of a broken machine.
        """
        with np.load(source) as recordings:
            x, y = _windows({state: recordings[state] for state in STATES if state in recordings})
        order = np.random.default_rng(seed).permutation(len(y))
        n_val = max(2, len(y) // 5)
        train, val = order[n_val:], order[:n_val]
        return DeviceData(
            x_train=x[train],
            y_train=y[train],
            sensitive=y[train] == STATES.index("broken"),
            x_val=x[val],
            y_val=y[val],
        )


def network(task: TaskSpec) -> torch.nn.Module:
    """A small 1-D convolutional network. Its ReLU units are what the profile (SPRE) looks at."""
    channels = int(task.model_options["channels"])
    return torch.nn.Sequential(
        torch.nn.Conv1d(1, channels, kernel_size=5, stride=2, padding=2),
        torch.nn.ReLU(),
        torch.nn.Conv1d(channels, 2 * channels, kernel_size=5, stride=2, padding=2),
        torch.nn.ReLU(),
        torch.nn.Flatten(),
        torch.nn.Linear(2 * channels * WINDOW // 4, task.n_classes),
    )


def _windows(recordings: dict[str, NDArray[np.generic]]) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    """Cut recordings into (n, 1, WINDOW) float32 in g, and their states (n,)."""
    pieces = {state: r[: len(r) // WINDOW * WINDOW].reshape(-1, 1, WINDOW) for state, r in recordings.items()}
    x = np.concatenate(list(pieces.values())).astype(np.float32) / np.float32(9.81)
    y = np.concatenate([np.full(len(p), STATES.index(state)) for state, p in pieces.items()])
    return x, y.astype(np.int64)
