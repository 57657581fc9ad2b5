"""Segmentation: the mean cross-entropy over the counted pixels of a sample."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional

from fedge.data.problems.segmentation import IGNORED, Segmentation


def compute_losses(problem: Segmentation, outputs: Tensor, x: Tensor, y: Tensor) -> Tensor:  # noqa: ARG001
    """Return the mean over counted pixels of -log-softmax(o)[y], (n,)."""
    each = functional.cross_entropy(outputs, y, reduction="none", ignore_index=IGNORED)
    return each.sum(dim=(-2, -1)) / (y != IGNORED).sum(dim=(-2, -1)).clamp(min=1)
