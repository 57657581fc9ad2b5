"""Write a bundle of one model, as every method whose devices run one network does at its end."""

from __future__ import annotations

from typing import Annotated, ClassVar

from msgspec import Meta, Struct

from fedge.steps.contract import Action, Result, Reveals, Steps
from fedge.steps.sgd import Sgd
from fedge.tensors.layout import Selector
from fedge.wire.messages import BlobRef, Count, Id, Text


class Installed(Result, frozen=True, kw_only=True):
    """The release of the written bundle. The bundle stays on the device, since sensitive samples shaped it."""

    REVEALS: ClassVar = {"release": Reveals.NOTHING}
    release: Annotated[int, Meta(ge=1, le=2**53)]  # higher than that of any earlier bundle on the device


class FineTune(Struct, frozen=True, kw_only=True):
    """Training on all of the device's training samples before the bundle is written; nothing is sent.

    `checkpoints` are candidate numbers of steps, of which the smallest validation loss decides, the smaller number on a
    tie. A single checkpoint is simply run.
    """

    sgd: Sgd  # its `steps` are not used
    checkpoints: Annotated[tuple[Count, ...], Meta(min_length=1, max_length=32)]
    otherwise: Count  # steps if there are no validation samples but several checkpoints


class Served(Action, frozen=True, kw_only=True):
    """The model of a final order, combined with what a training step kept on the device.

    `personal` selects the layers that `model` lacks. `kept_by` is the step whose training kept something, or None.
    `initial` holds all tensors, for a device that never trained; None is as in `Train`.
    """

    model: BlobRef
    personal: Selector = ()
    kept_by: Id | None = None
    initial: BlobRef | None = None

    def find_head_class(self, known: Steps) -> str:
        """Find what is in the place of the network's head for the step that has kept something."""
        kind = known.get(self.kept_by or "")
        return "" if kind is None else kind.HEAD_CLASS


class Install(Served, frozen=True, kw_only=True):
    """A request to write a bundle of the model, unchanged or fine-tuned."""

    STEP: ClassVar = "install"
    RESULT: ClassVar = Installed
    EXPORTS: ClassVar = True
    TIMED: ClassVar = False

    method: Text
    fine_tune: FineTune | None = None

    def passes(self, n_shared: int, n_train: int, n_val: int) -> float:
        """Count the passes of one evaluation on the validation samples, and of the fine-tuning."""
        tuning = self.fine_tune
        return n_val + (tuning.sgd.count_passes(max(tuning.checkpoints), n_train) if tuning else 0)
