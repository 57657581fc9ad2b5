"""Single-label classification: cross-entropy."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional

from fedge.data.problems.classification import Classification


def compute_losses(problem: Classification, outputs: Tensor, x: Tensor, y: Tensor) -> Tensor:  # noqa: ARG001
    """Return -log-softmax(o)[y], (n,)."""
    return functional.cross_entropy(outputs, y, reduction="none")
