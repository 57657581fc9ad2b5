"""SCAFFOLD: local steps corrected by control variates, of which a device keeps its own and sends the change."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, ClassVar

from msgspec import Meta

from fedge.data.task import TaskSpec
from fedge.steps.contract import Reveals, require
from fedge.steps.training.train import Train, Trained
from fedge.tensors.layers import make_reversible_layout, select_params
from fedge.tensors.layout import Codec, Layout, Selector
from fedge.wire.messages import BlobRef


class TrainedScaffold(Trained, frozen=True, kw_only=True):
    """The result: `update` is dy, `control` is dc, in float32."""

    REVEALS: ClassVar = {**Trained.REVEALS, "control": Reveals.UPDATE}
    control: BlobRef


class TrainScaffold(Train, frozen=True, kw_only=True):
    """SCAFFOLD's training; `control` is the server's variate c, 0 if it is None.

    `counted`: the round of the device's last report whose dc is in c; 0 if there is none, and the device's variate
    begins at 0.
    """

    STEP: ClassVar = "train_scaffold"
    RESULT: ClassVar = TrainedScaffold
    control: BlobRef | None = None
    counted: Annotated[int, Meta(ge=0)] = 0

    def check(self, result: Trained, task: TaskSpec) -> None:
        """Require what `Train` does, and a control variate in float32."""
        super().check(result, task)
        assert isinstance(result, TrainedScaffold)
        require(result.control.codec is Codec.FLOAT32, f"a control variate in {result.control.codec}")

    def uploads(self, result: Trained, layout: Layout) -> Mapping[BlobRef, Layout]:
        """Return both uploads with their layouts."""
        assert isinstance(result, TrainedScaffold)
        return {**super().uploads(result, layout), result.control: select_params(layout)}

    @staticmethod
    def select_kept(personal: Selector, layout: Layout) -> Layout:
        """Return the layout of c_i, with the c_i before."""
        del personal
        return make_reversible_layout(layout)
