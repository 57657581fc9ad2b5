"""What the store knows of classes that have joined, and how models grow with them."""

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np
import pytest

from coordinator.store.classes import CLASSES, grow_model, read_classes, settle_task
from coordinator.store.store import Store
from fedge.data.classes import AddedClasses, add_classes
from fedge.data.task import TaskSpec
from fedge.tensors.heads import grow_layout
from fedge.tensors.layout import Layout, TensorInfo, from_bytes, to_bytes
from fedge.wire.messages import BlobRef

TASK = TaskSpec(name="pets", classes=("cat", "dog"), input_shape=(3,), model="mlp")
GROWN = add_classes(TASK, ("bird",))
LAYOUT = Layout(
    tensors=(
        TensorInfo(name="head.weight", shape=(2, 3), layer="head"),
        TensorInfo(name="head.bias", shape=(2,), layer="head"),
    )
)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with contextlib.closing(Store(tmp_path / "server")) as opened:
        yield opened


def test_a_task_from_before_a_class_joined_is_settled_to_the_present_one(store: Store) -> None:
    assert settle_task(store, TASK) == TASK, "it has not begun"
    store.put_value("identity", json.dumps(["f", "fedavg", TASK.compute_fingerprint(), 0, 1, {}]))
    assert read_classes(store) == AddedClasses(fingerprint=TASK.compute_fingerprint())
    assert settle_task(store, GROWN) == GROWN, "nothing has joined, so it is another task"
    joined = AddedClasses(names=("bird",), fingerprint=GROWN.compute_fingerprint())
    store.put_value(CLASSES, msgspec.json.encode(joined).decode())
    other = msgspec.structs.replace(TASK, model="cnn")
    assert [settle_task(store, task) for task in (TASK, GROWN, other)] == [GROWN, GROWN, other]


def test_a_model_grows_to_equal_bytes_whenever_it_does(store: Store) -> None:
    tensors = {"head.weight": np.ones((2, 3), np.float32), "head.bias": np.array([1, 0], np.float32)}
    data = to_bytes(tensors)
    ref = BlobRef(digest=store.blobs.put(data), size_bytes=len(data))
    grown = grow_model(store, ref, grow_layout(LAYOUT, 3))
    assert grow_model(store, ref, grow_layout(LAYOUT, 3)) == grow_model(store, grown, grow_layout(LAYOUT, 3)) == grown
    found = from_bytes(store.blobs.get(grown.digest))
    assert found["head.weight"].tolist() == [[1, 1, 1]] * 3
    assert found["head.bias"].tolist() == [1, 0, 0]
