"""All that a device half may use, for those who write a step of their own: `from edge_agent.steps import Learned`.

The names of `fedge.steps.public` come with it. Names in neither list may change with any version. This module needs
torch. A device half imports it within its functions, since contracts are also read on machines without torch.
"""

from edge_agent.device.device import Device, FailedError
from edge_agent.device.encoding import send_update
from edge_agent.learning.frame import (
    Begun,
    Learned,
    Recipe,
    begin,
    finish,
    fit,
    train_alone,
    train_together,
)
from fedge.models.network import compute_features_and_logits, get_head
from fedge.models.optimizer import Momentum, Optimizer
from fedge.models.problems.cross_entropy import Loss, cross_entropy
from fedge.models.training import Network, Trainer, compute_mean_loss, draw_batches, to_tensor

__all__ = [  # noqa: RUF022 - as one meets them
    # the device
    "Device",
    "FailedError",
    "send_update",
    # the frame of training
    "train_alone",
    "Learned",
    "Recipe",
    "fit",
    "train_together",
    "begin",
    "Begun",
    "finish",
    # how weights move
    "Network",
    "Trainer",
    "Loss",
    "cross_entropy",
    "compute_mean_loss",
    "draw_batches",
    "to_tensor",
    "Optimizer",
    "Momentum",
    "get_head",
    "compute_features_and_logits",
]
