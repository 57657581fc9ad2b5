"""Install a finished bundle, given its files by name. Needs no torch."""

from __future__ import annotations

from typing import Annotated, ClassVar

from msgspec import Meta

from fedge.data.task import TaskSpec
from fedge.steps.contract import Action, require
from fedge.steps.mixture.install import Installed
from fedge.wire.messages import BlobRef, Count, Text


class InstallBundle(Action, frozen=True, kw_only=True):
    """A request to install a finished bundle; its `release` is higher than any on the device."""

    STEP: ClassVar = "install_bundle"
    RESULT: ClassVar = Installed
    TRAINS: ClassVar = False

    files: Annotated[dict[Text, BlobRef], Meta(min_length=3, max_length=64)]
    release: Count

    def check(self, result: Installed, task: TaskSpec) -> None:
        """Require the release that was sent."""
        require(result.release == self.release, "the release is not the one that was sent")
