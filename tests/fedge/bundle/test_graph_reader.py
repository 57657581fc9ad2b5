"""Graphs that may never end are told from those that surely do."""

import contextlib

import pytest

from fedge.bundle.graph_reader import explain_unbounded, find_largest_int8
from tests.deploy.bundles import GOLDEN

pytestmark = pytest.mark.torch_free


def field(number, *values):
    data = b"".join(value if isinstance(value, bytes) else value.encode() for value in values)
    assert len(data) < 128
    return key(number) + bytes([len(data)]) + data


def key(number, kind=2):
    first = number << 3 | kind
    return bytes([first]) if first < 128 else bytes([first & 127 | 128, first >> 7])


def model(*fields):
    return memoryview(key(1, 0) + b"\x08" + b"".join(fields))


def node(op_type, *attributes):
    return field(1, field(4, op_type), *(field(5, attribute) for attribute in attributes))


PLAIN = node("Add", field(1, "axis"))


def test_our_own_graph_ends():
    assert explain_unbounded(memoryview((GOLDEN / "skeleton.onnx").read_bytes())) == ""
    assert explain_unbounded(model(field(7, PLAIN, PLAIN))) == ""


def test_largest_int8_of_each_form_of_a_tensor():
    """`raw_data`, and `int32_data` packed or not; numbers of other types are left out."""
    int8, float32 = key(2, 0) + b"\x03", key(2, 0) + b"\x01"
    minus_100 = b"\x9c" + b"\xff" * 8 + b"\x01"
    raw = field(5, int8, field(9, b"\x05\xc0\x00"))  # 5, -64, 0
    assert find_largest_int8(model(field(7, PLAIN, raw))) == 64
    assert find_largest_int8(model(field(7, raw, field(5, int8, field(5, b"\x05", minus_100))))) == 100
    assert find_largest_int8(model(field(7, raw, field(5, int8, key(5, 0) + b"\x07", key(5, 0) + minus_100)))) == 100
    assert find_largest_int8(model(field(7, field(5, float32, field(9, b"\x80"))))) == 0
    assert find_largest_int8(model(field(7, field(5, int8, field(9, b"\x80"))))) == 128
    assert find_largest_int8(memoryview((GOLDEN / "skeleton.onnx").read_bytes())) == 0


@pytest.mark.parametrize("inner", [6, 11])
def test_a_graph_within_the_graph_may_loop(inner):
    assert (
        explain_unbounded(model(field(7, PLAIN, node("Loop", field(inner, PLAIN)))))
        == "its node Loop has a graph of its own"
    )


def test_a_function_may_hide_one():
    assert explain_unbounded(model(field(7, PLAIN), field(25, PLAIN))) == "it has functions of its own"


def test_what_is_cut_off_or_no_message_is_refused():
    graph = bytes(model(field(7, PLAIN)))
    for n in range(1, len(graph)):
        with pytest.raises(ValueError, match="cut off") if n != 2 else contextlib.nullcontext():
            explain_unbounded(memoryview(graph[:n]))
    with pytest.raises(ValueError, match="wire type"):
        explain_unbounded(memoryview(b"\x0f"))
    with pytest.raises(ValueError, match="cut off"):
        explain_unbounded(memoryview(b"\xff" * 20))
