"""Several labels: the binary cross-entropy of each label, summed."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional

from fedge.data.problems.multi_label import MultiLabel


def compute_losses(problem: MultiLabel, outputs: Tensor, x: Tensor, y: Tensor) -> Tensor:  # noqa: ARG001
    """Return -sum_c ln sigma((2 y_c - 1) o_c), (n,)."""
    each = functional.binary_cross_entropy_with_logits(outputs, y.to(outputs.dtype), reduction="none")
    return each.sum(dim=-1)
