"""Numbers: squared error, Huber's loss, or the Gaussian density with a variance of the network's own."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional

from fedge.data.problems.regression import LARGEST, Regression


def compute_losses(problem: Regression, outputs: Tensor, x: Tensor, y: Tensor) -> Tensor:  # noqa: ARG001
    """Return 1/2 sum_d (y_d - o_d)^2, Huber's loss in its place, or with `variance` -l, (n,)."""
    if problem.variance:
        mean, h = outputs[..., : problem.width], outputs[..., problem.width :].clamp(-LARGEST, LARGEST)
        return 0.5 * ((y - mean) ** 2 * torch.exp(-h) + h + math.log(2 * math.pi)).sum(dim=-1)
    if problem.loss == "huber":
        return functional.huber_loss(outputs, y, reduction="none").sum(dim=-1)
    return 0.5 * ((y - outputs) ** 2).sum(dim=-1)
