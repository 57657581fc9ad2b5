"""Graphs that may never end are told from those that surely do."""

import contextlib

import pytest

from fedge.onnx_wire import unbounded
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
    assert unbounded(memoryview((GOLDEN / "skeleton.onnx").read_bytes())) == ""
    assert unbounded(model(field(7, PLAIN, PLAIN))) == ""


@pytest.mark.parametrize("inner", [6, 11])
def test_a_graph_within_the_graph_may_loop(inner):
    assert (
        unbounded(model(field(7, PLAIN, node("Loop", field(inner, PLAIN))))) == "its node Loop has a graph of its own"
    )


def test_a_function_may_hide_one():
    assert unbounded(model(field(7, PLAIN), field(25, PLAIN))) == "it has functions of its own"


def test_what_is_cut_off_or_no_message_is_refused():
    graph = bytes(model(field(7, PLAIN)))
    for n in range(1, len(graph)):
        with pytest.raises(ValueError, match="cut off") if n != 2 else contextlib.nullcontext():
            unbounded(memoryview(graph[:n]))
    with pytest.raises(ValueError, match="wire type"):
        unbounded(memoryview(b"\x0f"))
    with pytest.raises(ValueError, match="cut off"):
        unbounded(memoryview(b"\xff" * 20))
