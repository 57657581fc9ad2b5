"""PM-MoE's one upload: what training kept on the device. Off unless the device's owner enables it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, ClassVar

from msgspec import Meta

from fedge.data.task import TaskSpec
from fedge.steps.contract import Action, Result, Reveals, require
from fedge.steps.training.train import find_kept
from fedge.tensors.layout import Codec, Layout, Selector
from fedge.wire.messages import BlobRef, Id, NonNegative


class PrivateShared(Result, frozen=True, kw_only=True):
    """The private module, as tensors under their own names; codec float32."""

    REVEALS: ClassVar = {"module": Reveals.PRIVATE}
    module: BlobRef


class SharePrivate(Action, frozen=True, kw_only=True):
    """A request for the private module; `kept_by`, `personal` as in `Install`.

    `clip`, `noise`: the whole module is clipped to that norm and gets N(0, (noise * clip)^2); None: unchanged.
    """

    STEP: ClassVar = "share_private"
    RESULT: ClassVar = PrivateShared

    kept_by: Id
    personal: Selector = ()
    clip: Annotated[float, Meta(gt=0)] | None = None
    noise: NonNegative = 0.0

    def check(self, result: PrivateShared, task: TaskSpec) -> None:
        """Require plain float32."""
        require(result.module.codec is Codec.FLOAT32, f"codec {result.module.codec} instead of float32")

    def uploads(self, result: PrivateShared, layout: Layout) -> Mapping[BlobRef, Layout]:
        """Return the module."""
        return {result.module: find_kept(self.kept_by, self.personal, layout)}
