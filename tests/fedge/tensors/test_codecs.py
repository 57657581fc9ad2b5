"""Codecs: what they lose is bounded, what they refuse is named, and nothing from outside costs more than the layout."""

import json
import re
import struct
from io import BytesIO

import numpy as np
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from fedge.errors import ProtocolError
from fedge.tensors.codecs import (
    apply_differences,
    check_blob,
    compute_norms,
    decode,
    derive_tensor,
    encode,
    encode_pieces,
    round_tensors,
)
from fedge.tensors.codecs import pack_tensors as bytes_of
from fedge.tensors.layout import Codec, Layout, Model, TensorInfo, Tensors, flatten, to_bytes, unflatten
from fedge.tensors.rounding import NotFiniteError

LAYOUT = Layout(
    tensors=(
        TensorInfo(name="w", shape=(2, 3)),
        TensorInfo(name="b", shape=()),
        TensorInfo(name="mean", shape=(2,), kind="buffer"),
        TensorInfo(name="count", shape=(), kind="counter"),
    )
)
EXACT = ("mean",)


def tensors() -> Tensors:
    return {
        "w": np.array([[0, 1, -2], [127, 63.4, -63.6]], dtype=np.float32),
        "b": np.array(-0.5, dtype=np.float32),
        "mean": np.array([1 / 3, 1e30], dtype=np.float32),
        "count": np.array(2**40, dtype=np.int64),
    }


def refusal(data: bytes, codec: Codec, layout: Layout = LAYOUT) -> str:
    """By `decode`; `check_blob` refuses the same."""
    with pytest.raises(ProtocolError) as caught:
        decode(data, codec, layout)
    with pytest.raises(ProtocolError, match=re.escape(str(caught.value))):
        check_blob(data, codec, layout)
    return caught.value.name


def packed(data: bytes) -> bytes:
    return zstandard.ZstdCompressor(level=1).compress(data)


def test_small_tensors_take_less_than_with_one_code_for_names_and_numbers() -> None:
    numbers = np.random.default_rng(0).standard_normal(2048, np.float32)
    stored = round_tensors({f"features.{k}.weight": numbers[k::8] for k in range(8)}, Codec.INT8)
    assert len(bytes_of(stored)) < len(packed(to_bytes(stored))) - 20


def test_norms_are_those_of_parameters_and_of_buffers_also_where_squares_overflow() -> None:
    update = Model(np.float32([3e30, 4e30]), np.float32([6.0, 8.0]), np.zeros(0, np.int64))
    assert compute_norms(update) == pytest.approx((5e30, 10.0))


@pytest.mark.parametrize("number", [np.nan, np.inf, -np.inf])
def test_a_norm_is_finite_only_where_all_numbers_are(number: float) -> None:
    params = np.ones(70_000, np.float32)
    params[66_000] = number
    spoiled = Model(params, np.zeros(0, np.float32), np.zeros(0, np.int64))
    assert not np.isfinite(compute_norms(spoiled)[0])


@pytest.mark.parametrize("codec", list(Codec))
@pytest.mark.parametrize("size", [1, 70_000])
def test_the_norms_that_a_check_tells_are_those_of_the_decoded_model(codec: Codec, size: int) -> None:
    layout = Layout(tensors=(TensorInfo(name="v", shape=(2, size)), *LAYOUT.tensors))
    model = flatten({"v": np.random.default_rng(size).normal(size=(2, size)).astype(np.float32), **tensors()}, layout)
    data = encode(unflatten(model, layout), codec, EXACT)
    decoded = decode(data, codec, layout)
    expected = [np.linalg.norm(vector.astype(np.float64)) for vector in (decoded.params, decoded.buffers)]
    assert check_blob(data, codec, layout) == pytest.approx(expected, rel=1e-5)
    assert compute_norms(decoded) == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("codec", [Codec.FLOAT32, Codec.FLOAT32_ZSTD])
def test_float32_is_exact(codec: Codec) -> None:
    model, expected = decode(encode(tensors(), codec), codec, LAYOUT), flatten(tensors(), LAYOUT)
    assert np.array_equal(model.params, expected.params)
    assert np.array_equal(model.buffers, expected.buffers)
    assert np.array_equal(model.counters, expected.counters)


def test_plain_float32_is_safetensors() -> None:
    assert encode(tensors(), Codec.FLOAT32) == to_bytes(tensors())
    assert b"".join(encode_pieces(tensors())) == to_bytes(tensors())


@given(scale=st.floats(width=32), number=st.integers(-128, 127))
def test_int8_is_finite_if_its_product_with_the_scale_is(scale: float, number: int) -> None:
    layout = Layout(tensors=(TensorInfo(name="w", shape=(2,)),))
    stored = {"w": np.array([0, number], np.int8), "w.scale": np.array(scale, np.float32)}
    data = packed(to_bytes(stored))
    with np.errstate(over="ignore", invalid="ignore"):
        finite_product = np.isfinite(np.float32([0, number]) * np.float32(scale)).all()
    if finite_product:
        check_blob(data, Codec.INT8, layout)
        assert np.isfinite(decode(data, Codec.INT8, layout).params).all()
    else:
        assert refusal(data, Codec.INT8, layout) == "not-finite"


def test_int8_by_hand() -> None:
    # w: scale = 127/127 = 1, so values are rounded to whole numbers; b: 0.5 is the largest of its tensor, hence exact
    model = decode(encode(tensors(), Codec.INT8, EXACT), Codec.INT8, LAYOUT)
    assert model.params.tolist() == [0, 1, -2, 127, 63, -64, -0.5]


def test_bfloat16_by_hand() -> None:
    # 8 significant bits: 63.4 = 0b111111.0110.. lies between 63.25 and 63.5; 63.6 between 63.5 and 63.75
    model = decode(encode(tensors(), Codec.BFLOAT16, EXACT), Codec.BFLOAT16, LAYOUT)
    assert model.params.tolist() == [0, 1, -2, 127, 63.5, -63.5, -0.5]


@pytest.mark.parametrize(
    ("value", "rounded"),
    [
        (1 + 2**-8, 1.0),  # halfway: to the even neighbour below
        (1 + 3 * 2**-8, 1 + 2**-6),  # halfway: to the even neighbour above
        (1 + 2**-8 + 2**-20, 1 + 2**-7),  # more than half
        (-(1 + 2**-8), -1.0),
        (np.finfo(np.float32).max, (2 - 2**-7) * 2.0**127),  # the largest bfloat16, not infinity
        (2.0**-149, 0.0),  # the smallest denormal is less than half of the smallest bfloat16, 2**-133
    ],
)
def test_bfloat16_rounds_to_nearest_even(value: float, rounded: float) -> None:
    layout = Layout(tensors=(TensorInfo(name="w", shape=(1,)),))
    data = encode({"w": np.array([value], dtype=np.float32)}, Codec.BFLOAT16)
    assert decode(data, Codec.BFLOAT16, layout).params.tolist() == [rounded]


@pytest.mark.parametrize("codec", [Codec.BFLOAT16, Codec.INT8])
def test_buffers_and_counters_stay_exact(codec: Codec) -> None:
    model = decode(encode(tensors(), codec, EXACT), codec, LAYOUT)
    assert np.array_equal(model.buffers, tensors()["mean"])
    assert model.counters.tolist() == [2**40]


finite = hnp.arrays(
    np.float32,
    hnp.array_shapes(min_dims=0, max_dims=3, max_side=5),
    elements=st.floats(width=32, allow_nan=False, allow_infinity=False),
)


@pytest.mark.parametrize("codec", list(Codec))
@given(tensor=finite)
@settings(max_examples=150, deadline=None)
def test_the_loss_is_bounded(codec: Codec, tensor: np.ndarray) -> None:
    layout = Layout(tensors=(TensorInfo(name="w", shape=tensor.shape),))
    found = decode(encode({"w": tensor}, codec), codec, layout).params.astype(np.float64)
    exact = tensor.ravel().astype(np.float64)
    step = np.abs(exact).max(initial=0) / 127
    bounds = {
        Codec.INT8: step / 2 * (1 + 1e-5) + 2.0**-143,  # half a step, and 127 x the rounding of a denormal scale
        Codec.BFLOAT16: np.abs(exact) * 2.0**-8 + 2.0**-134,
        Codec.TOP: np.abs(exact) + step / 2 * (1 + 1e-5) + 2.0**-143,
    }
    assert (np.abs(found - exact) <= bounds.get(codec, 0)).all()


@pytest.mark.parametrize("codec", list(Codec))
def test_equal_tensors_give_equal_bytes_and_stay_as_they_are(codec: Codec) -> None:
    given_tensors = tensors()
    assert encode(given_tensors, codec, EXACT) == encode(dict(reversed(tensors().items())), codec, EXACT)
    assert all(np.array_equal(given_tensors[name], tensor) for name, tensor in tensors().items())


def test_int8_again_changes_nothing() -> None:
    once = decode(encode(tensors(), Codec.INT8, EXACT), Codec.INT8, LAYOUT)
    again = encode({"w": once.params[:6].reshape(2, 3)}, Codec.INT8)
    layout = Layout(tensors=(TensorInfo(name="w", shape=(2, 3)),))
    assert np.array_equal(decode(again, Codec.INT8, layout).params, once.params[:6])


def test_the_largest_hundredth_by_hand() -> None:
    tensor = np.zeros((2, 101), np.float32)  # 202 numbers: 3 are sent
    tensor[0, [5, 100]] = -1.27, 0.5
    tensor[1, [0, 7]] = 0.5, 0.5  # of equal ones the first
    layout = Layout(tensors=(TensorInfo(name="w", shape=tensor.shape),))
    found = decode(encode({"w": tensor}, Codec.TOP), Codec.TOP, layout).params.reshape(tensor.shape)
    assert np.flatnonzero(found).tolist() == [5, 100, 101]
    np.testing.assert_allclose(found[0, [5, 100]], [-1.27, 0.5], atol=0.005)


def test_the_largest_hundredth_takes_about_two_bytes_a_number() -> None:
    update = np.random.default_rng(0).standard_normal(500_000).astype(np.float32)
    assert len(encode({"w": update}, Codec.TOP)) < 3 * 5_000


@pytest.mark.parametrize("gaps", [[0, 0], [5, 0], [101, 1], [102, 0], [3, 2**32 - 1], [2**32 - 1, 2**32 - 1]])
def test_places_beyond_a_tensor_or_twice_the_same_are_refused(gaps: list[int]) -> None:
    layout = Layout(tensors=(TensorInfo(name="w", shape=(102,)),))
    content = {"w": np.ones(2, np.int8), "w.scale": np.array(1, np.float32), "w.gaps": np.array(gaps, np.uint32)}
    assert refusal(blob(content, Codec.TOP), Codec.TOP, layout) == "layout"
    fine = content | {"w.gaps": np.array([100, 1], np.uint32)}
    assert np.flatnonzero(decode(blob(fine, Codec.TOP), Codec.TOP, layout).params).tolist() == [100, 101]


def test_an_update_is_about_a_quarter_before_compression_and_zeros_vanish() -> None:
    update = np.random.default_rng(0).standard_normal(100_000).astype(np.float32)
    assert len(encode({"w": update}, Codec.INT8)) < 1.01 * 100_000
    assert len(encode({"w": np.zeros(100_000, np.float32)}, Codec.INT8)) < 500


@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("codec", list(Codec))
def test_we_never_encode_what_is_not_finite(codec: Codec, value: float) -> None:
    with pytest.raises(ValueError, match="finite"):
        encode(tensors() | {"w": np.array([value], np.float32)}, codec)


def test_we_never_encode_other_types_or_ambiguous_names() -> None:
    with pytest.raises(ValueError, match="float64"):
        encode({"w": np.zeros(1)}, Codec.FLOAT32)
    with pytest.raises(ValueError, match=r"w\.scale"):
        encode({"w": np.zeros(1, np.float32), "w.scale": np.zeros(1, np.float32)}, Codec.INT8)


# ------------------------------------------------------------------------------------------------ hostile blobs


@pytest.mark.parametrize("codec", list(Codec))
def test_every_prefix_and_every_extension_is_refused(codec: Codec) -> None:
    data = encode(tensors(), codec, EXACT)
    for end in range(len(data)):
        assert refusal(data[:end], codec) == "malformed"
    assert refusal(data + b"\0", codec) == "malformed"


def stored(codec: Codec) -> Tensors:
    """What a peer's encoder puts into the file, to be tampered with."""
    rest = {"mean": tensors()["mean"], "count": tensors()["count"]}
    if codec is Codec.INT8:
        scales = {"w.scale": np.array(1, np.float32), "b.scale": np.array(1, np.float32)}
        return {"w": np.ones((2, 3), np.int8), "b": np.array(1, np.int8)} | scales | rest
    if codec is Codec.TOP:
        numbers = {name: np.ones(1, np.int8) for name in ("w", "b")}
        scales = {f"{name}.scale": np.array(1, np.float32) for name in numbers}
        return numbers | scales | {f"{name}.gaps": np.zeros(1, np.uint32) for name in numbers} | rest
    dtype = np.uint16 if codec is Codec.BFLOAT16 else np.float32
    return {"w": np.ones((2, 3), dtype), "b": np.array(1, dtype)} | rest


def blob(content: Tensors, codec: Codec) -> bytes:
    return to_bytes(content) if codec is Codec.FLOAT32 else packed(to_bytes(content))


@pytest.mark.parametrize("codec", list(Codec))
def test_the_untampered_file_is_accepted(codec: Codec) -> None:
    assert decode(blob(stored(codec), codec), codec, LAYOUT).counters.tolist() == [2**40]


@pytest.mark.parametrize("codec", list(Codec))
@pytest.mark.parametrize("name", ["w", "b", "mean", "count"])
def test_missing_unknown_misshapen_and_mistyped_tensors_are_refused(codec: Codec, name: str) -> None:
    content = stored(codec)
    missing = {key: tensor for key, tensor in content.items() if key != name}
    tensor = content[name]
    assert refusal(blob(missing, codec), codec) == "layout"
    assert refusal(blob(missing | {"other": tensor}, codec), codec) == "layout"
    assert refusal(blob(content | {"other": np.zeros(1, np.float32)}, codec), codec) == "layout"
    assert refusal(blob(content | {name: tensor.reshape(1, 1, -1)}, codec), codec) == "layout"
    assert refusal(blob(content | {name: np.zeros(tensor.shape, np.int16)}, codec), codec) == "layout"


@pytest.mark.parametrize("change", [{"w.scale": np.ones(1, np.float32)}, {"w.scale": np.array(1, np.int64)}])
def test_a_scale_must_be_a_float32_scalar(change: Tensors) -> None:
    assert refusal(blob(stored(Codec.INT8) | change, Codec.INT8), Codec.INT8) == "layout"
    without = {name: tensor for name, tensor in stored(Codec.INT8).items() if name != "w.scale"}
    assert refusal(blob(without, Codec.INT8), Codec.INT8) == "layout"


@pytest.mark.parametrize("claimed", list(Codec))
@pytest.mark.parametrize("codec", list(Codec))
def test_a_blob_of_another_codec_is_refused(codec: Codec, claimed: Codec) -> None:
    if codec is not claimed:
        assert refusal(encode(tensors(), codec, EXACT), claimed) in ("malformed", "layout")


NOT_FINITE = {
    "NaN parameter": (Codec.FLOAT32, {"b": np.array(np.nan, np.float32)}),
    "NaN buffer": (Codec.INT8, {"mean": np.array([np.nan, 0], np.float32)}),
    "infinite buffer": (Codec.BFLOAT16, {"mean": np.array([np.inf, 0], np.float32)}),
    "NaN scale": (Codec.INT8, {"w.scale": np.array(np.nan, np.float32)}),
    "infinite scale": (Codec.INT8, {"w.scale": np.array(-np.inf, np.float32)}),
    "infinite scale of zeros": (
        Codec.INT8,
        {"w": np.zeros((2, 3), np.int8), "w.scale": np.array(np.inf, np.float32)},
    ),
    "scale that overflows": (
        Codec.INT8,
        {"w": np.full((2, 3), 127, np.int8), "w.scale": np.array(3e38, np.float32)},
    ),
    "scale of the largest": (Codec.TOP, {"w.scale": np.array(np.inf, np.float32)}),
    "bfloat16 NaN": (Codec.BFLOAT16, {"b": np.array(0x7FC0, np.uint16)}),
    "bfloat16 infinity": (Codec.BFLOAT16, {"b": np.array(0xFF80, np.uint16)}),
}


@pytest.mark.parametrize(("codec", "change"), NOT_FINITE.values(), ids=NOT_FINITE)
def test_what_is_not_finite_is_refused(codec: Codec, change: Tensors) -> None:
    assert refusal(blob(stored(codec) | change, codec), codec) == "not-finite"


ZSTD = [codec for codec in Codec if codec is not Codec.FLOAT32]


@pytest.mark.parametrize("codec", ZSTD)
def test_bombs_are_refused_before_they_are_unpacked(codec: Codec) -> None:
    assert refusal(packed(bytes(50_000_000)), codec) == "oversized"
    # a frame header alone that claims 2**60 bytes: magic, descriptor (8-byte size, single segment), size
    assert refusal(struct.pack("<IBQ", 0xFD2FB528, 0b1110_0000, 2**60), codec) == "oversized"


@pytest.mark.parametrize("codec", ZSTD)
def test_frames_that_hide_their_size_or_lie_about_it_are_refused(codec: Codec) -> None:
    hidden = zstandard.ZstdCompressor(write_content_size=False).compress(bytes(50_000_000))
    assert refusal(hidden, codec) == "malformed"
    frame = bytearray(packed(blob(stored(codec), Codec.FLOAT32)))
    frame[5:7] = struct.pack("<H", 3)  # the size field of a frame of 256 to 65791 bytes
    assert refusal(bytes(frame), codec) == "malformed"


@pytest.mark.parametrize("codec", ZSTD)
def test_a_second_or_a_skippable_frame_is_refused(codec: Codec) -> None:
    good = blob(stored(codec), codec)
    skippable = struct.pack("<II", 0x184D2A50, 4) + b"junk"
    assert refusal(good + good, codec) == "malformed"
    assert refusal(good + skippable, codec) == "malformed"
    assert refusal(skippable + good, codec) == "malformed"
    assert refusal(skippable, codec) == "malformed"


@pytest.mark.parametrize("codec", list(Codec))
def test_more_bytes_than_the_layout_can_need_are_refused_unread(codec: Codec) -> None:
    assert refusal(bytes(20_000), codec) == "oversized"


def test_a_long_header_does_not_pass_as_tensors() -> None:
    header = json.dumps({"__metadata__": {"x": "y" * 3000}}).encode()
    assert refusal(struct.pack("<Q", len(header)) + header, Codec.FLOAT32) == "layout"


@pytest.mark.parametrize("codec", list(Codec))
@given(data=st.binary(max_size=300))
@settings(max_examples=150, deadline=None)
def test_random_bytes_raise_nothing_but_a_protocol_error(codec: Codec, data: bytes) -> None:
    for attempt in (data, packed(data)):
        with pytest.raises(ProtocolError):
            decode(attempt, codec, LAYOUT)


@pytest.mark.parametrize("codec", list(Codec))
@given(place=st.integers(0, 10_000), value=st.integers(0, 255))
@settings(max_examples=200, deadline=None)
def test_a_changed_byte_is_refused_or_gives_a_finite_model(codec: Codec, place: int, value: int) -> None:
    data = bytearray(encode(tensors(), codec, EXACT))
    data[place % len(data)] = value
    try:
        model = decode(bytes(data), codec, LAYOUT)
    except ProtocolError:
        return
    assert np.isfinite(model.params).all()
    assert np.isfinite(model.buffers).all()
    assert (model.params.shape, model.buffers.shape, model.counters.shape) == ((7,), (2,), (1,))


def test_long_vectors_which_several_threads_share_are_rounded_as_whole_ones() -> None:
    rng = np.random.default_rng(0)
    now, base, held = (rng.standard_normal((3, 100_001), np.float32) for _ in range(3))
    carried = round_tensors({"w": held}, Codec.INT8)
    wanted = {"w": np.multiply(carried["w"], carried["w.scale"]) + now - base}
    largest = np.float32(np.abs(wanted["w"]).max() / np.float32(127))
    after = np.empty_like(now)
    found, left_out = derive_tensor("w", now, base, carried, after)
    left = left_out()
    assert found["w.scale"] == largest
    np.testing.assert_array_equal(found["w"], np.rint(wanted["w"] / largest).astype(np.int8))
    np.testing.assert_array_equal(after, found["w"] * largest + base)
    again = round_tensors({"w": np.multiply(carried["w"], carried["w.scale"]) + now - after}, Codec.INT8)
    assert left["w.scale"] == again["w.scale"]
    np.testing.assert_array_equal(left["w"], again["w"])
    now[2, 7] = np.nan
    with pytest.raises(NotFiniteError):
        derive_tensor("w", now, base, carried, after)


def test_a_model_is_made_of_several_differences_in_order() -> None:
    rng = np.random.default_rng(0)
    first = {"w": rng.standard_normal((100_001, 2), np.float32), "n": np.array(1), "running": np.ones(3, np.float32)}
    steps = [
        round_tensors(
            {"w": rng.standard_normal((100_001, 2), np.float32), "n": np.array(k), "running": first["running"] * k},
            Codec.INT8,
            {"running"},
        )
        for k in (2, 3)
    ]
    w = (first["w"] + steps[0]["w"] * steps[0]["w.scale"]) + steps[1]["w"] * steps[1]["w.scale"]
    made = apply_differences(BytesIO(to_bytes(first)), [packed(to_bytes(step)) for step in steps])
    assert b"".join(map(bytes, made)) == to_bytes({"w": w, "n": np.array(3), "running": first["running"] * 3})


@pytest.mark.parametrize(
    "change",
    [
        {"w": np.zeros(3, np.int8)},
        {"w": np.zeros(3, np.int8), "w.scale": np.ones(2, np.float32)},
        {"w": np.zeros(3, np.int8), "w.scale": np.float64(1)},
        {"w": np.zeros(4, np.float32)},
        {"v": np.zeros(3, np.float32)},
    ],
)
def test_a_difference_of_another_model_is_refused(change: dict[str, np.ndarray]) -> None:
    with pytest.raises(ProtocolError, match="layout"):
        list(apply_differences(BytesIO(to_bytes({"w": np.ones(3, np.float32)})), [packed(to_bytes(change))]))
