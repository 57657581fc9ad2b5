"""A problem of the user's own: the loss is a method of the user's class."""

from __future__ import annotations

from torch import Tensor

from fedge.data.problems.own import Own, call_code
from fedge.errors import ConfigError


def compute_losses(problem: Own, outputs: Tensor, x: Tensor, y: Tensor) -> Tensor:  # noqa: ARG001
    """Return what `loss(outputs, targets)` of the user's class returns, (n,).

    Raises:
        ConfigError: the user's code fails, or returns something else.
    """
    losses = call_code(problem.code, "loss", outputs, y)
    if not isinstance(losses, Tensor) or losses.shape != (len(y),):
        found = tuple(losses.shape) if isinstance(losses, Tensor) else type(losses).__name__
        raise ConfigError(
            f"{problem.code}.loss must return a loss for each of {len(y)} samples, not {found}: take no mean or sum"
        )
    return losses
