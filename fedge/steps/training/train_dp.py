"""Train the shared model, or the part of it that is uploaded, with differential privacy for each sample of D_L."""

from __future__ import annotations

from typing import ClassVar, Final

from fedge.data.task import TaskSpec
from fedge.errors import ConfigError
from fedge.steps.contract import Reveals, require
from fedge.steps.noise import Privacy
from fedge.steps.training.train import Train, Trained
from fedge.tensors.layout import Layout

PER_SAMPLE: Final = 3
"""Cost of per-sample gradients relative to that of their mean; measured 2.7 (`cnn`) to 7 (`cnn_fedavg`)."""


class TrainedDp(Trained, frozen=True, kw_only=True):
    """The noisy `update` and choice of a start; other figures of training are absent, since they would have no noise.

    `n_samples` is public, since neighbouring data sets have the same size and differ in whether one sample counts.
    """

    REVEALS: ClassVar = dict.fromkeys(Trained.__struct_fields__, Reveals.NOTHING) | {
        "update": Reveals.ACCOUNTED,
        "cluster": Reveals.ACCOUNTED,
        "n_samples": Reveals.COUNT,
    }


class TrainDp(Train, frozen=True, kw_only=True):
    """A request for `Train` by DP-SGD, with a noisy choice of the start, no measurements, and no duration reported."""

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
