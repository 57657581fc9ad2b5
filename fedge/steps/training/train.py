"""Train the shared model, or its travelling part, on the non-sensitive samples (D_L)."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Annotated, ClassVar, Final, Literal, Self

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType

from fedge.data.task import TaskSpec
from fedge.errors import ConfigError, ProtocolError
from fedge.steps.contract import Action, Result, Reveals, Steps, load_installed_steps, require
from fedge.steps.sgd import TRAINING_PASSES, Sgd
from fedge.system.moved import alias_members
from fedge.tensors.layout import Codec, Layout, Selector
from fedge.wire.messages import BlobRef, Count, NonNegative, Share

MAX_STARTS: Final = 64
"""Models that an order offers to start from."""

Choice = Literal["loss", "accuracy"]
"""How a device picks among models, on its validation samples: the smallest loss with prior (fedge.md section 5), or
the highest accuracy, then the smallest loss (scmoe_pfl.md section 8); the first on a tie."""


class Start(Struct, frozen=True, kw_only=True):
    """A model to start from: the global model (cluster -1) or the expert of a cluster."""

    model: BlobRef
    cluster: Annotated[int, Meta(ge=-1, le=2**31)] = -1


Starts = Annotated[tuple[Start, ...], Meta(max_length=MAX_STARTS)]


class Trained(Result, frozen=True, kw_only=True):
    """The result of training: `update` has trained - start of trainable tensors, and buffers as they are.

    Losses and norm are None unless the order asks for them (`measure`).
    """

    REVEALS: ClassVar = {
        "update": Reveals.UPDATE,
        "n_samples": Reveals.COUNT,
        "cluster": Reveals.CHOICE,
        "loss_before": Reveals.LOSS,
        "loss_after": Reveals.LOSS,
        "gradient_norm": Reveals.LOSS,
        "val_accuracy": Reveals.LOSS,
    }
    update: BlobRef
    n_samples: Count  # |D_L|
    cluster: Annotated[int, Meta(ge=-1)] = -1  # of the start that was chosen
    loss_before: float | None = None  # mean training loss on D_L at the start model, without proximal term
    loss_after: float | None = None
    gradient_norm: NonNegative | None = None  # L2 norm of the gradient of the mean loss at the start model
    val_accuracy: Share | None = None  # of the start model on the validation samples


@alias_members(kept="select_kept")
class Train(Action, frozen=True, kw_only=True):
    """A request to train on D_L from the best of `starts` (by `choose`; one start is not evaluated).

    `personal`: the layers that stay on the device (FedPer: the head; LG-FedAvg: all but the head; FedBN: the
    normalisation). The others travel: those of the starts and of the update. The personal layers are those kept in the
    previous round, at first those of `initial`; without any, `initial` is only kept for a later order. `head_steps`:
    the head first learns alone for this long, then the base alone (FedRep); 0: together. `class_means`: weight of the
    features' distance to the device's own class means (fedge.md section 4.1), where nothing is personal.
    """

    STEP: ClassVar = "train"
    RESULT: ClassVar = Trained
    starts: Annotated[Starts, Meta(min_length=1)]
    sgd: Sgd
    codec: Codec = Codec.INT8
    choose: Choice = "loss"
    personal: Selector = ()
    initial: BlobRef | None = None  # all tensors; None: the network's own code initialises personal layers
    head_steps: Count = 0
    class_means: Annotated[float, Meta(gt=0)] | UnsetType = UNSET
    measure: bool = True  # whether to measure losses and the gradient's norm: as much work as an epoch

    def passes(self, n_shared: int, n_train: int, n_val: int) -> float:
        """Count evaluations of the starts, training, evaluations before and after."""
        looks = (TRAINING_PASSES + 1) * n_shared + n_val + (len(self.starts) - 1) * (n_val or n_shared)
        return looks + self.sgd.count_passes(self.sgd.count_steps(n_shared) + self.head_steps, n_shared)

    def check(self, result: Trained, task: TaskSpec) -> None:
        """Require an update of at least one sample, the order's codec, one of its starts, and requested losses."""
        if result.n_samples == 0:
            raise ProtocolError("no-samples", "an update that was learned from nothing")
        require(result.update.codec is self.codec, f"codec {result.update.codec} instead of {self.codec}")
        require(result.cluster in {start.cluster for start in self.starts}, "a start that was not offered")
        measured = (result.loss_before, result.loss_after, result.gradient_norm)
        require(not self.measure or None not in measured, "no losses, which were asked for")

    def uploads(self, result: Trained, layout: Layout) -> Mapping[BlobRef, Layout]:
        """Return the update, with the tensors that travel."""
        return {result.update: layout.without(self.personal)}

    def reveals(self) -> Mapping[str, Reveals]:
        """Return what each field reveals, without the choice if there is only one start."""
        only = {"cluster": Reveals.NOTHING} if len(self.starts) == 1 else {}
        return {**super().reveals(), **only}

    def without(self, withheld: Collection[str]) -> Self | None:
        """Return the action without losses, or with only the first start."""
        spared = msgspec.structs.replace(
            self,
            starts=self.starts[:1] if Reveals.CHOICE in withheld else self.starts,
            measure=self.measure and Reveals.LOSS not in withheld,
        )
        return spared if super().without(withheld) else None

    @property
    def shareable(self) -> bool:
        """Whether what stays on the device learns from D_L alone; if not, nothing about it is reported."""
        return True

    @staticmethod
    def select_kept(personal: Selector, layout: Layout) -> Layout | None:
        """Return the tensors that stay on the device after the step, or None."""
        return layout.select(personal) if personal else None


def find_kept(step: str, personal: Selector, layout: Layout, known: Steps | None = None) -> Layout:
    """Return the tensors that a training step keeps on a device; `known`: the steps to search.

    Raises:
        ConfigError: no such step, or it keeps nothing.
    """
    kind = (load_installed_steps() if known is None else known).get(step)
    kept = kind.select_kept(personal, layout) if kind is not None and issubclass(kind, Train) else None
    if kept is None:
        raise ConfigError(f"step {step} keeps nothing on the device")
    return kept
