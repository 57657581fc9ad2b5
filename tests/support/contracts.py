"""A task, a network and references for the contracts of steps."""

from __future__ import annotations

from fedge.data.task import TaskSpec
from fedge.steps.contract import Action, encode_body
from fedge.tensors.layout import Codec, Layout, TensorInfo
from fedge.wire.messages import BlobRef, Order

TASK = TaskSpec(name="t", classes=("a", "b"), input_shape=(2,), model="mlp")
REF = BlobRef(digest="0" * 64, size_bytes=1, codec=Codec.INT8)
LAYOUT = Layout(
    tensors=(
        TensorInfo(name="in.w", shape=(4, 2), layer="linear"),
        TensorInfo(name="out.w", shape=(2, 4), layer="head"),
        TensorInfo(name="out.b", shape=(2,), layer="head"),
        TensorInfo(name="mean", shape=(4,), kind="buffer", layer="norm"),
    )
)


def order_of(action: Action) -> Order:
    return Order(
        id="r.1.l.d", device_id="d", run="r", round=1, label="l", seed=0, task_fingerprint="f", left_s=60.0,
        step=action.STEP, version=action.order_version, body=encode_body(action),
    )  # fmt: skip
