"""Where a machine runs the task's network; everything else, including gates and clusters, stays on the CPU."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

from fedge.system.help import Heading


class Processor(StrEnum):
    """What runs the networks (`fedge.models.training.torch_device`)."""

    CPU = "cpu"
    CUDA = "cuda"


TrainOn = Annotated[
    Processor,
    Heading.RUNS,
    "Networks are trained on this processor; cuda is the first GPU that torch sees.",
]
"""The setting of all commands that train."""
