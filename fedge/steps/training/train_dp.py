"""Train the shared model, or the part of it that is uploaded, with differential privacy for each sample of D_L."""

from __future__ import annotations

from typing import Annotated, ClassVar, Final

from msgspec import Meta, Struct

from fedge.data.task import TaskSpec
from fedge.errors import ConfigError
from fedge.steps.contract import Reveals, require
from fedge.steps.training.train import Train, Trained
from fedge.tensors.layout import Layout

PER_SAMPLE: Final = 3
"""Cost of per-sample gradients relative to that of their mean; measured 2.7 (`cnn`) to 7 (`cnn_fedavg`)."""

Epsilon = Annotated[float, Meta(gt=0, le=10_000)]
Delta = Annotated[float, Meta(gt=0, lt=1)]
ClipNorm = Annotated[float, Meta(gt=0, le=1e6)]
NoiseMultiplier = Annotated[float, Meta(gt=0, le=1e6)]


def explain_weak_delta(delta: float, n_samples: int) -> str:
    """Return why delta promises nothing to each of `n_samples` samples, or "".

    With delta = 1 / n, publishing one of n samples unchanged would count as private.
    """
    if delta * n_samples < 1:
        return ""
    return f"delta {delta:g} promises nothing to {n_samples} samples: it must be well below 1 / {n_samples}, as 1e-5 is"


class Privacy(Struct, frozen=True, kw_only=True):
    """A run's promise to each sample: (epsilon, delta) for all of its orders together, or a fixed noise level.

    Give either `epsilon`, from which each device derives the noise by its number of samples, or `noise_multiplier`, the
    noise's standard deviation divided by the clip norm, which gives each device its own epsilon. `participations` is
    the most orders of the run for one device.
    """

    clip_norm: ClipNorm
    delta: Delta
    participations: Annotated[int, Meta(ge=1, le=2**53)]
    epsilon: Epsilon | None = None
    noise_multiplier: NoiseMultiplier | None = None


class TrainedDp(Trained, frozen=True, kw_only=True):
    """The noisy `update`; other figures of training are absent, since their privacy cost is not accounted for.

    `n_samples` is public, since neighbouring data sets have the same size and differ in whether one sample counts.
    """

    REVEALS: ClassVar = dict.fromkeys(Trained.__struct_fields__, Reveals.NOTHING) | {
        "update": Reveals.ACCOUNTED,
        "n_samples": Reveals.COUNT,
    }


class TrainDp(Train, frozen=True, kw_only=True):
    """A request for `Train` by DP-SGD, with one start, no measurements, and no duration reported."""

    STEP: ClassVar = "train_dp"
    RESULT: ClassVar = TrainedDp
    TIMED: ClassVar = False
    privacy: Privacy
    measure: bool = False

    def passes(self, n_shared: int, n_train: int, n_val: int) -> float:
        """Count the training alone."""
        return PER_SAMPLE * self.sgd.count_passes(self.sgd.count_steps(n_shared) + self.head_steps, n_shared)

    def check(self, result: Trained, task: TaskSpec) -> None:
        """Require what `Train` does, and nothing but the update."""
        super().check(result, task)
        figures = (result.loss_before, result.loss_after, result.gradient_norm, result.val_score)
        require(figures == (None,) * len(figures), "the report has a figure that no noise protects")


def require_no_statistics(layout: Layout) -> None:
    """Refuse a network that DP-SGD cannot train.

    Raises:
        ConfigError: the network keeps running statistics, as batch normalisation does; the text names one.
    """
    statistics = [info.name for info in layout.tensors if info.kind != "param"]
    if statistics:
        raise ConfigError(
            f"the network has tensors beside its weights ({statistics[0]}), as batch normalisation keeps: it mixes the "
            "samples of a batch, so no gradient is one sample's alone, and its statistics have no noise; use group or "
            "layer normalisation (torch.nn.GroupNorm, LayerNorm) with differential privacy"
        )
