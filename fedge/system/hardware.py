"""The processor on which a machine runs the task's network (all else runs on the CPU), and the machine's sensors."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

from fedge.system.text import Heading


class Processor(StrEnum):
    """The processor that runs the networks (`fedge.models.training.get_torch_device`)."""

    CPU = "cpu"
    CUDA = "cuda"


TrainOn = Annotated[
    Processor, Heading.RUNS, "Networks are trained on this processor; cuda is the first GPU that torch sees."
]
"""A setting of all commands that train."""


def measure_temperature_c() -> float | None:
    """Return the temperature of the hottest sensor in °C, since the hottest part throttles, or None without sensors."""
    import psutil  # imported only on use

    read = getattr(psutil, "sensors_temperatures", None)
    sensors = read() if read is not None else {}
    return max((float(entry.current) for entries in sensors.values() for entry in entries), default=None)
