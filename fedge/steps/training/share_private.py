"""PM-MoE's one upload, the module that training kept on the device. It is off unless the device's owner enables it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, ClassVar

from msgspec import Meta

from fedge.data.task import TaskSpec
from fedge.steps.contract import Action, Result, Reveals, require
from fedge.steps.training.train import find_kept
from fedge.steps.training.train_dp import TrainDp
from fedge.tensors.layout import Codec, Layout, Selector
from fedge.wire.messages import BlobRef, Id, NonNegative


class PrivateShared(Result, frozen=True, kw_only=True):
    """The private module, as tensors under their own names, in codec float32."""

    REVEALS: ClassVar = {"module": Reveals.PRIVATE}
    module: BlobRef


class SharePrivate(Action, frozen=True, kw_only=True):
    """A request for the private module; `kept_by` and `personal` are as in `Install`.

    The whole module is clipped to the norm `clip` and gets noise N(0, (noise * clip)^2); it is unchanged if `clip` is
    None.
    """

    STEP: ClassVar = "share_private"
    RESULT: ClassVar = PrivateShared
    TIMED: ClassVar = False

    kept_by: Id
    personal: Selector = ()
    clip: Annotated[float, Meta(gt=0)] | None = None
    noise: NonNegative = 0.0

    def find_unaccounted(self) -> dict[str, Reveals]:
        """Return nothing for a module that learned by DP-SGD, whose noise covers it like the layers that travel."""
        return {} if self.kept_by == TrainDp.STEP else super().find_unaccounted()

    def check(self, result: PrivateShared, task: TaskSpec) -> None:
        """Require plain float32."""
        require(result.module.codec is Codec.FLOAT32, f"codec {result.module.codec} instead of float32")

    def uploads(self, result: PrivateShared, layout: Layout) -> Mapping[BlobRef, Layout]:
        """Return the module with the layout of its tensors."""
        return {result.module: find_kept(self.kept_by, self.personal, layout)}
