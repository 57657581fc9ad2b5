"""Layers are cut out of a model and put back into it, whatever their order and kind."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from fedge.errors import ProtocolError
from fedge.tensors.layers import Layers, cut, make_layers, paste
from fedge.tensors.layout import Layout, Model, TensorInfo, flatten, overlay_tensors, unflatten

WHOLE = Layout(
    tensors=(
        TensorInfo(name="w", shape=(2, 3)),
        TensorInfo(name="b", shape=()),
        TensorInfo(name="mean", shape=(3,), kind="buffer", layer="norm"),
        TensorInfo(name="head.w", shape=(2,), layer="head"),
        TensorInfo(name="count", shape=(), kind="counter", layer="norm"),
    )
)
MODEL = Model(np.arange(9, dtype=np.float32), np.array([20, 21, 22], np.float32), np.array([7]))
NAMES = [info.name for info in WHOLE.tensors]


def part(*names: str) -> Layout:
    """Tensors of the whole, in this order."""
    infos = {info.name: info for info in WHOLE.tensors}
    return Layout(tensors=tuple(infos[name] for name in names))


def equal(one: Model, other: Model) -> bool:
    pairs = ((one.params, other.params), (one.buffers, other.buffers), (one.counters, other.counters))
    return all(a.dtype == b.dtype and np.array_equal(a, b) for a, b in pairs)


@pytest.mark.parametrize("names", [p for n in (1, 2, 3, 5) for p in itertools.permutations(NAMES, n)][::3])
def test_cut_and_pasted_are_what_names_give(names: tuple[str, ...]) -> None:
    tensors = unflatten(MODEL, WHOLE)
    own = cut(MODEL, WHOLE, part(*names))
    assert equal(own, flatten({name: tensors[name] for name in names}, part(*names)))
    other = Model(own.params + np.float32(100), own.buffers + np.float32(100), own.counters + 100)
    layers = Layers(part(*names), other)
    assert equal(paste(MODEL, layers, WHOLE), overlay_tensors(MODEL, layers.get_tensors(), WHOLE))
    assert equal(MODEL, Model(np.arange(9, dtype=np.float32), np.array([20, 21, 22], np.float32), np.array([7])))


def test_a_cut_does_not_change_with_the_model() -> None:
    model = Model(MODEL.params.copy(), MODEL.buffers.copy(), MODEL.counters.copy())
    own = cut(model, WHOLE, part("w", "mean", "count"))
    for vector in (model.params, model.buffers, model.counters):
        vector[:] = 0
    assert equal(own, cut(MODEL, WHOLE, part("w", "mean", "count")))


def test_all_layers_are_the_model_itself() -> None:
    assert cut(MODEL, WHOLE, WHOLE) is MODEL
    assert paste(Model(MODEL.params * 0, MODEL.buffers, MODEL.counters), Layers(WHOLE, MODEL), WHOLE) is MODEL


@pytest.mark.parametrize(
    "info", [TensorInfo(name="x", shape=(1,)), TensorInfo(name="b", shape=(1,)), TensorInfo(name="mean", shape=(3,))]
)
def test_layers_of_another_network_are_refused(info: TensorInfo) -> None:
    layers = Layers(Layout(tensors=(info,)), Model(np.zeros(info.size, np.float32), MODEL.buffers[:0], MODEL.counters))
    with pytest.raises(ProtocolError, match=info.name) as caught:
        paste(MODEL, layers, WHOLE)
    assert caught.value.name == "layout"
    with pytest.raises(ProtocolError, match=info.name):
        cut(MODEL, WHOLE, layers.layout)


def test_layers_have_names_at_the_door() -> None:
    tensors = {"offset": np.ones(2, np.float32), "mean": MODEL.buffers, "b": np.float32([3]).reshape(())}
    layers = make_layers(tensors, WHOLE)
    assert [(info.name, info.kind) for info in layers.layout.tensors] == [
        ("b", "param"),
        ("mean", "buffer"),
        ("offset", "param"),
    ]
    assert layers.keys() == tensors.keys()
    assert all(np.array_equal(layers[name], tensor) for name, tensor in tensors.items())
