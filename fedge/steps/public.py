"""The names that the contract of a user's own step may use: `from fedge.steps import Train, Trained`.

Names outside this list may change with any version. The list for the device half is `edge_agent.steps.public`.
"""

from fedge.data.task import TaskSpec
from fedge.steps.contract import Action, Declined, Failed, Result, Reveals, require
from fedge.steps.sgd import Sgd
from fedge.steps.training.train import Start, Train, Trained
from fedge.tensors.layers import Layers, cut, join, make_layers, paste
from fedge.tensors.layout import BASE, HEAD, Codec, Layout, Model, Selector, TensorInfo, flatten, unflatten
from fedge.wire.messages import BlobRef, Count, NonNegative, Share, Why

__all__ = [  # noqa: RUF022 - as one meets them
    # a step of any kind
    "Action",
    "Result",
    "Reveals",
    "Declined",
    "Failed",
    "require",
    "TaskSpec",
    # a step that trains
    "Train",
    "Trained",
    "Start",
    "Sgd",
    # models, and parts of them
    "Model",
    "Layout",
    "TensorInfo",
    "Selector",
    "HEAD",
    "BASE",
    "Layers",
    "cut",
    "paste",
    "join",
    "make_layers",
    "flatten",
    "unflatten",
    # fields of messages
    "BlobRef",
    "Codec",
    "Why",
    "Count",
    "NonNegative",
    "Share",
]
