import hashlib
import json
import struct

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from safetensors.numpy import save

from fedge.errors import ConfigError, ProtocolError
from fedge.system.files import compute_digest
from fedge.tensors.layout import (
    BASE,
    HEAD,
    Layout,
    Model,
    Selector,
    TensorInfo,
    Tensors,
    flatten,
    from_bytes,
    overlay_tensors,
    to_bytes,
    unflatten,
)

LAYOUT = Layout(
    tensors=(
        TensorInfo(name="w", shape=(2, 3)),
        TensorInfo(name="mean", shape=(3,), kind="buffer"),
        TensorInfo(name="b", shape=(3,)),
        TensorInfo(name="count", shape=(), kind="counter"),
    )
)


def tensors() -> Tensors:
    return {
        "w": np.arange(6, dtype=np.float32).reshape(2, 3),
        "b": np.array([6, 7, 8], dtype=np.float32),
        "mean": np.array([0.5, 1.5, 2.5], dtype=np.float32),
        "count": np.array(9, dtype=np.int64),
    }


def test_sizes_by_hand() -> None:
    assert LAYOUT.n_params == 2 * 3 + 3
    assert [t.size for t in LAYOUT.tensors] == [6, 3, 3, 1]
    assert [t.name for t in LAYOUT.select_kind("param")] == ["w", "b"]


def test_flatten_joins_each_kind_in_the_layouts_order() -> None:
    model = flatten(tensors(), LAYOUT)
    assert model.params.tolist() == list(range(9))
    assert model.params.dtype == np.float32
    assert model.buffers.tolist() == [0.5, 1.5, 2.5]
    assert model.counters.tolist() == [9]
    assert model.counters.dtype == np.int64


def test_unflatten_is_the_inverse_and_gives_views() -> None:
    model = flatten(tensors(), LAYOUT)
    back = unflatten(model, LAYOUT)
    assert back.keys() == tensors().keys()
    for name, tensor in tensors().items():
        assert back[name].shape == tensor.shape
        assert np.array_equal(back[name], tensor)
    model.params[0] = 100
    assert back["w"][0, 0] == 100


def test_flatten_leaves_its_inputs_alone() -> None:
    given_tensors = tensors()
    flatten(given_tensors, LAYOUT).params[:] = -1
    assert all(np.array_equal(given_tensors[name], tensor) for name, tensor in tensors().items())


def test_a_layout_of_parameters_alone() -> None:
    layout = Layout(tensors=(TensorInfo(name="w", shape=(2,)),))
    model = flatten({"w": np.ones(2, np.float32)}, layout)
    assert (model.buffers.shape, model.counters.shape) == ((0,), (0,))
    assert (model.buffers.dtype, model.counters.dtype) == (np.float32, np.int64)


BAD = {
    "missing": {"w": None},
    "unknown": {"extra": np.zeros(1, np.float32)},
    "shape": {"w": np.zeros((3, 2), np.float32)},
    "rank": {"w": np.zeros(6, np.float32)},
    "float64": {"b": np.zeros(3, np.float64)},
    "integer parameter": {"b": np.zeros(3, np.int64)},
    "float counter": {"count": np.array(9, np.float32)},
}


@pytest.mark.parametrize("change", BAD.values(), ids=BAD)
def test_tensors_that_do_not_fit_are_refused(change: dict[str, np.ndarray | None]) -> None:
    changed = {name: tensor for name, tensor in (tensors() | change).items() if tensor is not None}
    with pytest.raises(ProtocolError) as caught:
        flatten(changed, LAYOUT)
    assert caught.value.name == "layout"


@pytest.mark.parametrize("name", ["w", "b", "mean"])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_numbers_that_are_not_finite_are_refused(name: str, value: float) -> None:
    changed = tensors()
    changed[name].flat[-1] = value
    with pytest.raises(ProtocolError) as caught:
        flatten(changed, LAYOUT)
    assert caught.value.name == "not-finite"


def test_equal_tensors_give_equal_bytes_in_any_order_of_insertion() -> None:
    reverse = dict(reversed(tensors().items()))
    assert to_bytes(reverse) == to_bytes(tensors())


@pytest.mark.parametrize("shape", [(), (0,), (5,), (2, 3), (4, 0)])
def test_bytes_are_those_that_safetensors_writes(shape: tuple[int, ...]) -> None:
    whole = [f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)]
    types = ("bool", "float16", "float32", "float64", *whole)
    arrays = {f'{kind}/"\u00e9{k}': np.full(shape, k, kind) for kind in types for k in (1, 0)}
    assert to_bytes(arrays) == save(arrays)
    assert to_bytes({}) == save({})
    odd = {"every other": np.arange(12, dtype=np.float32)[::2], "turned": np.ones((2, 3), np.float32).T}
    assert to_bytes(odd) == save({name: np.ascontiguousarray(array) for name, array in odd.items()})
    with pytest.raises(ValueError, match="complex"):
        to_bytes({"z": np.zeros(2, complex)})


def test_bytes_are_safetensors_with_the_shapes_kept() -> None:
    data = to_bytes({"fortran": np.asfortranarray(tensors()["w"]), "scalar": np.array(9, dtype=np.int64)})
    (length,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + length])
    assert header["fortran"]["shape"] == [2, 3]
    assert header["scalar"] == {"dtype": "I64", "shape": [], "data_offsets": header["scalar"]["data_offsets"]}
    assert np.array_equal(from_bytes(data)["fortran"], tensors()["w"])


@given(
    st.dictionaries(st.text(min_size=1, max_size=8), hnp.arrays(np.float32, hnp.array_shapes(min_dims=0, max_side=4)))
)
@settings(max_examples=100, deadline=None)
def test_round_trip_through_bytes(arrays: dict[str, np.ndarray]) -> None:
    back = from_bytes(to_bytes(arrays)) if "__metadata__" not in arrays else arrays
    assert back.keys() == arrays.keys()
    for name, array in arrays.items():
        assert back[name].shape == array.shape
        assert back[name].tobytes() == array.tobytes()


def test_every_prefix_is_refused() -> None:
    data = to_bytes(tensors())
    for end in range(len(data)):
        with pytest.raises(ProtocolError) as caught:
            from_bytes(data[:end])
        assert caught.value.name == "malformed"


@given(st.binary(max_size=200))
@settings(max_examples=300, deadline=None)
def test_random_bytes_raise_nothing_but_a_protocol_error(data: bytes) -> None:
    with pytest.raises(ProtocolError):
        from_bytes(data)


def safetensors_of(header: object, payload: bytes = b"") -> bytes:
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + payload


MALFORMED = {
    "header longer than the file": struct.pack("<Q", 2**62) + b"{}",
    "header no JSON": struct.pack("<Q", 2) + b"{x",
    "offsets beyond the end": safetensors_of({"w": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}}, b"\0" * 4),
    "shape beyond the data": safetensors_of({"w": {"dtype": "F32", "shape": [4], "data_offsets": [0, 4]}}, b"\0" * 4),
    "shape overflows": safetensors_of({"w": {"dtype": "F32", "shape": [2**62, 8], "data_offsets": [0, 4]}}, b"\0" * 4),
    "unknown type": safetensors_of({"w": {"dtype": "O64", "shape": [1], "data_offsets": [0, 8]}}, b"\0" * 8),
    "a type numpy lacks": safetensors_of({"w": {"dtype": "F8_E4M3", "shape": [1], "data_offsets": [0, 1]}}, b"\0"),
    "two of the same bytes": safetensors_of(
        {name: {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]} for name in "vw"}, b"\0" * 4
    ),
    "bytes of nobody": safetensors_of({"w": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}, b"\0" * 5),
    "offsets below zero": safetensors_of({"w": {"dtype": "U8", "shape": [1], "data_offsets": [-1, 0]}}, b"\0"),
    "a shape below zero": safetensors_of({"w": {"dtype": "U8", "shape": [-1], "data_offsets": [0, 0]}}),
    "deep": struct.pack("<Q", 200_005) + b'{"w":' + b"[" * 100_000 + b"]" * 100_000,
    "a hole": safetensors_of({"w": {"dtype": "F32", "shape": [1], "data_offsets": [4, 8]}}, b"\0" * 8),
}  # fmt: skip


@pytest.mark.parametrize("data", MALFORMED.values(), ids=MALFORMED)
def test_malformed_files_are_refused(data: bytes) -> None:
    with pytest.raises(ProtocolError) as caught:
        from_bytes(data)
    assert caught.value.name == "malformed"


def test_other_writers_may_add_metadata_and_need_not_align() -> None:
    found = from_bytes(
        safetensors_of(
            {
                "__metadata__": {"format": "np"},
                "flag": {"dtype": "BOOL", "shape": [1], "data_offsets": [0, 1]},
                "w": {"dtype": "F32", "shape": [2], "data_offsets": [1, 9]},
                "nothing": {"dtype": "F32", "shape": [0, 3], "data_offsets": [9, 9]},
            },
            b"\1" + np.float32([1.5, -2]).tobytes(),
        )
    )
    assert found["flag"].tolist() == [True]
    assert found["w"].tolist() == [1.5, -2]
    assert found["w"].flags.aligned
    assert found["nothing"].shape == (0, 3)


def test_digest_is_sha256_of_any_buffer() -> None:
    assert compute_digest(b"fedge") == hashlib.sha256(b"fedge").hexdigest() == compute_digest(memoryview(b"fed"), b"ge")


def test_models_are_frozen() -> None:
    model = Model(np.zeros(1, np.float32), np.zeros(0, np.float32), np.zeros(0, np.int64))
    with pytest.raises(AttributeError):
        model.params = model.buffers  # type: ignore[misc]


# ------------------------------------------------------------------------------------------------ parts of a model

NETWORK = Layout(
    tensors=(
        TensorInfo(name="in.w", shape=(4, 2), layer="linear"),
        TensorInfo(name="n.w", shape=(4,), layer="norm"),
        TensorInfo(name="out.w", shape=(3, 4), layer="head"),
        TensorInfo(name="out.b", shape=(3,), layer="head"),
        TensorInfo(name="n.mean", shape=(4,), kind="buffer", layer="norm"),
        TensorInfo(name="n.count", shape=(), kind="counter", layer="norm"),
    )
)


def names(layout: Layout) -> list[str]:
    return [t.name for t in layout.tensors]


@pytest.mark.parametrize(
    ("selector", "expected"),
    [
        (("head",), ["out.w", "out.b"]),
        (("!head",), ["in.w", "n.w", "n.mean", "n.count"]),
        (("norm",), ["n.w", "n.mean", "n.count"]),
        (("norm", "head"), ["n.w", "out.w", "out.b", "n.mean", "n.count"]),
        (("!norm", "!head"), ["in.w"]),
        (("in.*",), ["in.w"]),
        (("*.w",), ["in.w", "n.w", "out.w"]),
        (("*.w", "!norm"), ["in.w", "out.w"]),
        (("norm", "!n.mean"), ["n.w", "n.count"]),
        (("n.?",), ["n.w"]),
        (("*",), ["in.w", "n.w", "out.w", "out.b", "n.mean", "n.count"]),
    ],
)
def test_what_a_selector_means_in_the_layouts_order(selector: Selector, expected: list[str]) -> None:
    assert names(NETWORK.select(selector)) == expected
    if len(expected) < len(NETWORK.tensors):
        assert names(NETWORK.without(selector)) == [name for name in names(NETWORK) if name not in expected]


def test_an_empty_selector_leaves_everything() -> None:
    assert NETWORK.without(()) is NETWORK


@pytest.mark.parametrize("selector", [("conv",), ("!conv",), ("head", "conv"), ("nothing.*",), ("*", "!nothing.*")])
def test_a_pattern_that_means_nothing_of_the_network_is_refused(selector: Selector) -> None:
    for take in (NETWORK.select, NETWORK.without):
        with pytest.raises(
            ConfigError, match=r"no layer '(conv|nothing\.\*)': a selector takes head, norm, conv, linear"
        ):
            take(selector)


def test_a_selector_that_leaves_nothing_is_refused() -> None:
    with pytest.raises(ConfigError, match="selects no tensor"):
        NETWORK.select(("head", "!*"))
    with pytest.raises(ConfigError, match="none is left to share"):
        NETWORK.without(("*",))


@pytest.mark.parametrize("selector", [HEAD, BASE])
def test_without_a_head_there_is_nothing_of_it_to_keep(selector: Selector) -> None:
    for take in (LAYOUT.select, LAYOUT.without):
        with pytest.raises(ConfigError, match="last layer must be linear"):
            take(selector)


def test_overlaid_replaces_what_is_given_and_nothing_else() -> None:
    model = flatten(tensors(), LAYOUT)
    found = unflatten(overlay_tensors(model, {"b": np.ones(3, np.float32), "count": np.array(4)}, LAYOUT), LAYOUT)
    assert found["b"].tolist() == [1, 1, 1]
    assert found["count"] == 4
    assert (found["w"] == tensors()["w"]).all()
    assert (found["mean"] == tensors()["mean"]).all()
    assert (flatten(tensors(), LAYOUT).params == model.params).all()  # it is left alone


@pytest.mark.parametrize("other", [{"c": np.ones(3, np.float32)}, {"b": np.ones(2, np.float32)}, {"b": np.ones(3)}])
def test_overlaid_refuses_what_does_not_fit(other: Tensors) -> None:
    with pytest.raises(ProtocolError, match="layout"):
        overlay_tensors(flatten(tensors(), LAYOUT), other, LAYOUT)
