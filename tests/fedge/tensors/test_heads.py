"""A head gets further outputs after its own, and the network answers as before until it learns."""

import numpy as np
import pytest

from fedge.errors import ConfigError
from fedge.tensors.heads import grow_layout, grow_tensors
from fedge.tensors.layout import Layout, TensorInfo, Tensors, flatten

LAYOUT = Layout(
    tensors=(
        TensorInfo(name="body.weight", shape=(3, 2), layer="linear"),
        TensorInfo(name="head.weight", shape=(2, 3), layer="head"),
        TensorInfo(name="head.bias", shape=(2,), layer="head"),
        TensorInfo(name="n", shape=(), kind="counter"),
    )
)
TENSORS: Tensors = {
    "body.weight": np.arange(6, dtype=np.float32).reshape(3, 2),
    "head.weight": np.array([[1, 2, 3], [3, 2, -1]], np.float32),
    "head.bias": np.array([0.5, -0.5], np.float32),
    "n": np.array(7),
}


def test_new_outputs_are_means_with_the_smallest_bias_and_all_else_stays() -> None:
    grown = grow_tensors(TENSORS, grow_layout(LAYOUT, 4))
    assert grown["head.weight"].tolist() == [[1, 2, 3], [3, 2, -1], [2, 2, 1], [2, 2, 1]]
    assert grown["head.bias"].tolist() == [0.5, -0.5, -0.5, -0.5]
    assert grown["body.weight"] is TENSORS["body.weight"]
    assert len(flatten(grown, grow_layout(LAYOUT, 4)).params) == 6 + 4 * 3 + 4


def test_no_new_output_is_the_largest() -> None:
    grown = grow_tensors(TENSORS, grow_layout(LAYOUT, 3))
    logits = np.random.default_rng(0).standard_normal((100, 3)) @ grown["head.weight"].T + grown["head.bias"]
    assert (logits.argmax(axis=1) < 2).all()


def test_some_layers_grow_like_the_whole_network() -> None:
    assert [*grow_tensors({"head.bias": TENSORS["head.bias"]}, grow_layout(LAYOUT, 3))["head.bias"]] == [
        0.5,
        -0.5,
        -0.5,
    ]
    other: Tensors = {"gate": np.zeros(2, np.float32)}
    assert grow_tensors(other, grow_layout(LAYOUT, 3)) == other


def test_what_has_the_outputs_already_stays() -> None:
    once = grow_tensors(TENSORS, grow_layout(LAYOUT, 3))
    assert all(once[name] is array for name, array in grow_tensors(once, grow_layout(LAYOUT, 3)).items())


def test_a_network_without_a_head_gets_no_further_output() -> None:
    with pytest.raises(ConfigError, match="has no head"):
        grow_layout(LAYOUT.select(("!head",)), 3)
