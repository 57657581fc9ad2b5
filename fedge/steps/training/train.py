"""Train the shared model, or the part of it that is uploaded, on the non-sensitive samples (D_L)."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Annotated, ClassVar, Final, Literal, Self

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType, field

from fedge.data.task import TaskSpec
from fedge.errors import ConfigError, ProtocolError
from fedge.steps.contract import Action, Result, Reveals, Steps, load_installed_steps, require
from fedge.steps.sgd import TRAINING_PASSES, Sgd
from fedge.system.moved import alias_members
from fedge.tensors.layout import Codec, Layout, Selector
from fedge.wire.messages import BlobRef, Count, NonNegative, Score

MAX_STARTS: Final = 64
"""Most models that an order offers to start from."""

Choice = Literal["loss", "accuracy", "training_loss"]
"""Rule by which a device chooses among models on its validation samples, the first on a tie. "loss" takes the smallest
loss with prior (fedge.md section 5), "accuracy" the highest accuracy, then the smallest loss (scmoe_pfl.md section
8), and "training_loss" the smallest mean loss on D_L itself (baselines.md section 19); fedge 0.2 does not know it."""


class Start(Struct, frozen=True, kw_only=True):
    """A model to start from: the global model (cluster -1) or the expert of a cluster."""

    model: BlobRef
    cluster: Annotated[int, Meta(ge=-1, le=2**31)] = -1


Starts = Annotated[tuple[Start, ...], Meta(max_length=MAX_STARTS)]


class Trained(Result, frozen=True, kw_only=True):
    """The result of training. `update` holds trained minus start for trainable tensors, and buffers unchanged.

    Losses and norm are None unless the order asks for them (`measure`).
    """

    REVEALS: ClassVar = {
        "update": Reveals.UPDATE,
        "n_samples": Reveals.COUNT,
        "cluster": Reveals.CHOICE,
        "loss_before": Reveals.LOSS,
        "loss_after": Reveals.LOSS,
        "gradient_norm": Reveals.LOSS,
        "val_score": Reveals.LOSS,
    }
    update: BlobRef
    n_samples: Count  # |D_L|
    cluster: Annotated[int, Meta(ge=-1)] = -1  # cluster of the chosen start
    loss_before: float | None = None  # mean training loss on D_L at the start model, without proximal term
    loss_after: float | None = None
    gradient_norm: NonNegative | None = None  # L2 norm of the gradient of the mean loss at the start model
    val_score: Score | None = field(name="val_accuracy", default=None)  # of the start model on validation samples


def require_score(score: float | None, task: TaskSpec) -> None:
    """Require a score to be one that the task's problem can give."""
    least, largest = task.problem.SCORES
    require(score is None or least <= score <= largest, f"a score of {score} is not within {least} to {largest}")


@alias_members(kept="select_kept")
class Train(Action, frozen=True, kw_only=True):
    """A request to train on D_L from the best of `starts` (by `choose`; a single start is not evaluated).

    `personal` selects the layers that stay on the device (FedPer: the head; LG-FedAvg: all but the head; FedBN: the
    normalisation). Starts and update have only the other layers. The personal layers are those kept in the previous
    round, at first those of `initial`; without personal layers, `initial` is only kept for a later order. `head_steps`
    is the number of steps in which the head learns alone, before the base learns alone (FedRep); if 0, both learn
    together. `class_means` is the weight of the features' distance to the device's own class means (fedge.md section
    4.1), if nothing is personal.
    """

    STEP: ClassVar = "train"
    RESULT: ClassVar[type[Trained]] = Trained
    starts: Annotated[Starts, Meta(min_length=1)]
    sgd: Sgd
    codec: Codec = Codec.INT8
    choose: Choice = "loss"
    personal: Selector = ()
    initial: BlobRef | None = None  # all tensors; if None, the network's own code initialises personal layers
    head_steps: Count = 0
    class_means: Annotated[float, Meta(gt=0)] | UnsetType = UNSET
    measure: bool = True  # whether to measure losses and the gradient's norm, which is as much work as an epoch

    @property
    def recipe_version(self) -> int:
        """The version of the recipe that a device must know, with the rule by which it chooses."""
        return max(super().recipe_version, int(self.choose == "training_loss"))

    def passes(self, n_shared: int, n_train: int, n_val: int) -> float:
        """Count the passes of evaluating the starts, of training, and of the evaluations before and after it."""
        n_look = n_shared if self.choose == "training_loss" else n_val or n_shared
        looks = (TRAINING_PASSES + 1) * n_shared + n_val + (len(self.starts) - 1) * n_look
        return looks + self.sgd.count_passes(self.sgd.count_steps(n_shared) + self.head_steps, n_shared)

    def check(self, result: Trained, task: TaskSpec) -> None:
        """Require an update from at least one sample, the order's codec, one of its starts, and requested losses."""
        if result.n_samples == 0:
            raise ProtocolError("no-samples", "the update was learned from no samples")
        require(result.update.codec is self.codec, f"codec {result.update.codec} instead of {self.codec}")
        require(
            result.cluster in {start.cluster for start in self.starts},
            "the update is from a start that was not offered",
        )
        measured = (result.loss_before, result.loss_after, result.gradient_norm)
        require(not self.measure or None not in measured, "no losses, which were asked for")
        require(measured == (None,) * 3 or None not in measured, "only some of losses and gradient norm")
        require_score(result.val_score, task)

    def uploads(self, result: Trained, layout: Layout) -> Mapping[BlobRef, Layout]:
        """Return the update, with the layout of all layers that are not personal."""
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
        """Whether the layers kept on the device learn from D_L alone; if not, nothing about them is reported."""
        return True

    @staticmethod
    def select_kept(personal: Selector, layout: Layout) -> Layout | None:
        """Return the layout of the tensors that stay on the device after the step, or None."""
        return layout.select(personal) if personal else None


def find_kept(step: str, personal: Selector, layout: Layout, known: Steps | None = None) -> Layout:
    """Return the layout of the tensors that a training step keeps on a device; `known` are the steps to search.

    Raises:
        ConfigError: there is no such step, or the step keeps nothing.
    """
    kind = (load_installed_steps() if known is None else known).get(step)
    kept = kind.select_kept(personal, layout) if kind is not None and issubclass(kind, Train) else None
    if kept is None:
        raise ConfigError(f"step {step} keeps nothing on the device")
    return kept
