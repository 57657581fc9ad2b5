"""The results of a demo: the figures of its JSON file, and data that only the report draws."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec
import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from fedge.files import write_atomically

BACKGROUND: Final = "background.json"
METHODS = {
    "local_only": "Local only",
    "fedavg": "FedAvg",
    "fedavg_finetuned": "FedAvg, fine-tuned",
    "best_expert": "Best single expert",
    "personalised": "Personalised",
}
"""The five accuracies, from the simplest to ours; all on the device's own test samples."""


class DeviceOutcome(Struct, frozen=True, kw_only=True):
    """One device. `experts`: the clusters it belongs to. `accuracy`: shares in [0, 1] by the names of `METHODS`."""

    id: str
    n_train: int
    n_test: int
    experts: tuple[int, ...]
    accuracy: dict[str, float]
    bundle: str
    max_abs_diff_torch_onnx: float


class Outcome(Struct, frozen=True, kw_only=True):
    """The demo's JSON file. `accuracy`: means over the devices. `bytes_*`: as the coordinator saw them."""

    task: str
    partition: str
    agents: int
    rounds: int
    seed: int
    broker: str
    wall_s: float
    bytes_up: int
    bytes_down: int
    clusters: dict[str, tuple[str, ...]]
    selection: dict[str, int]
    split: bool
    accuracy: dict[str, float]
    devices: tuple[DeviceOutcome, ...]


@dataclass(frozen=True, slots=True)
class Background:
    """Data that only the report shows.

    `accuracy_by_round`: by names of `METHODS` the (round, accuracy on validation samples) of the shared models.
    `places`: of the devices `ids` in a plane, similar updates side by side, (n, 2); None if the method compares no
    updates. `groups`: the true group by device.
    """

    method: str
    accuracy_by_round: dict[str, Sequence[tuple[int, float]]]
    ids: tuple[str, ...]
    places: NDArray[np.float64] | None
    groups: dict[str, int]

    def write(self, folder: Path) -> None:
        """Save it, so that the report can be made again."""
        write_atomically(folder / BACKGROUND, msgspec.json.encode(self, enc_hook=lambda array: array.tolist()))

    @classmethod
    def read(cls, folder: Path) -> Background:
        """Read what `write` saved."""
        content = (folder / BACKGROUND).read_bytes()
        return msgspec.json.decode(content, type=cls, dec_hook=lambda _, rows: np.array(rows))


def mean_accuracy(devices: Sequence[DeviceOutcome]) -> dict[str, float]:
    """Mean over devices, each counting the same."""
    return {name: float(np.mean([device.accuracy[name] for device in devices])) for name in METHODS}


def megabytes(size_bytes: int) -> str:
    """Bytes for people, in units of 10^6."""
    return f"{size_bytes / 1e6:.1f} MB"
