"""A step that reports whether the coordinator has accepted its last report."""

from __future__ import annotations

from typing import Any, ClassVar

from edge_agent.steps import Device
from fedge.steps import Action, Declined, Result, Reveals, TaskSpec, require


class Asked(Result, frozen=True, kw_only=True):
    """`counted`: what the device knows of its last report."""

    REVEALS: ClassVar = {"counted": Reveals.NOTHING}
    counted: bool | None


class Asking(Action, frozen=True, kw_only=True):
    """`unwanted`: the coordinator does not accept the report; `declines`: there is none."""

    STEP: ClassVar = "asking"
    RESULT: ClassVar = Asked
    DEVICE: ClassVar = __name__
    TRAINS: ClassVar = False

    unwanted: bool = False
    declines: bool = False

    def check(self, result: Any, task: TaskSpec) -> None:
        """Refuse what is unwanted."""
        require(not self.unwanted, "nobody wants it")


def run(device: Device, action: Asking) -> Result:
    """What the device knows."""
    counted = device.was_counted()
    return Declined() if action.declines else Asked(counted=counted)
