"""Where a machine runs the task's network (everything else stays on the CPU), and its sensors."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

from fedge.system.text import Heading


class Processor(StrEnum):
    """What runs the networks (`fedge.models.training.torch_device`)."""

    CPU = "cpu"
    CUDA = "cuda"


TrainOn = Annotated[
    Processor, Heading.RUNS, "Networks are trained on this processor; cuda is the first GPU that torch sees."
]
"""The setting of all commands that train."""


def temperature_c() -> float | None:
    """The hottest sensor, since it triggers throttling. None without sensors."""
    import psutil  # only where somebody asks

    read = getattr(psutil, "sensors_temperatures", None)
    sensors = read() if read is not None else {}
    return max((float(entry.current) for entries in sensors.values() for entry in entries), default=None)
