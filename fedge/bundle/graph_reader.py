"""Reads a serialised ONNX graph without ONNX, to check that it terminates and how large its 8-bit weights are.

Source: onnx.proto3 (field numbers) and the wire format of Protocol Buffers. A field is a varint (number << 3 | type)
and its value. Type 0 is a varint, 1 is eight bytes, 2 is a length and as many bytes, 5 is four bytes.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import numpy as np

GRAPH, FUNCTIONS = 7, 25  # fields of ModelProto
NODE, INITIALIZER = 1, 5  # fields of GraphProto
DATA_TYPE, INT32_DATA, RAW_DATA = 2, 5, 9  # fields of TensorProto
INT8: Final = 3  # value of TensorProto.DataType
OP_TYPE, ATTRIBUTE = 4, 5  # fields of NodeProto
SUBGRAPH, SUBGRAPHS = 6, 11  # fields of AttributeProto
MAX_VARINT_BYTES: Final = 10


def explain_unbounded(model: memoryview) -> str:
    """Return why a graph may never end, or "" if it certainly ends.

    Loops need a subgraph (Loop, Scan; also If), and a function may hide a subgraph. Our own graphs have neither, so
    each of their nodes runs once.

    Raises:
        ValueError: the model is not a serialised message.
    """
    for number, value in _iterate_fields(model):
        if number == FUNCTIONS:
            return "it has functions of its own"
        if number == GRAPH:
            for of_graph, node in _iterate_fields(value):
                if of_graph == NODE and _has_subgraph(node):
                    return f"its node {_read_op_type(node)} has a graph of its own"
    return ""


def find_largest_int8(model: memoryview) -> int:
    """Return the largest magnitude of the int8 numbers in a graph (0 to 128), or 0 if it has none.

    Raises:
        ValueError: the model is not a serialised message.
    """
    largest = 0
    for number, graph in _iterate_fields(model):
        for of_graph, tensor in _iterate_fields(graph) if number == GRAPH else ():
            if of_graph == INITIALIZER:
                largest = max(largest, _find_largest_int8(tensor))
    return largest


def _find_largest_int8(tensor: memoryview) -> int:
    fields = list(_iterate_fields(tensor))
    if not any(number == DATA_TYPE and _decode_varint(value, 0)[0] == INT8 for number, value in fields):
        return 0
    values = [np.frombuffer(value, np.int8).astype(np.int64) for number, value in fields if number == RAW_DATA]
    values += [
        np.array(_decode_varints(value), np.uint64).view(np.int64) for number, value in fields if number == INT32_DATA
    ]
    return max((int(np.abs(some).max(initial=0)) for some in values), default=0)


def _decode_varints(numbers: memoryview) -> list[int]:
    """Return the numbers of a packed field."""
    values, at = [], 0
    while at < len(numbers):
        value, at = _decode_varint(numbers, at)
        values.append(value & 0xFFFF_FFFF_FFFF_FFFF)
    return values


def _has_subgraph(node: memoryview) -> bool:
    return any(
        inner in {SUBGRAPH, SUBGRAPHS}
        for number, attribute in _iterate_fields(node)
        if number == ATTRIBUTE
        for inner, _ in _iterate_fields(attribute)
    )


def _read_op_type(node: memoryview) -> str:
    return next(
        (bytes(value).decode(errors="replace")[:50] for number, value in _iterate_fields(node) if number == OP_TYPE), ""
    )


def _iterate_fields(message: memoryview) -> Iterator[tuple[int, memoryview]]:
    """Yield the number and the bytes of each field; the bytes of a varint field are the encoded varint."""
    at = 0
    while at < len(message):
        key, at = _decode_varint(message, at)
        match key & 7:
            case 0:
                start, end = at, _decode_varint(message, at)[1]
            case 1:
                start, end = at, at + 8
            case 2:
                length, start = _decode_varint(message, at)
                end = start + length
            case 5:
                start, end = at, at + 4
            case kind:
                raise ValueError(f"a field has the unknown wire type {kind}")
        if end > len(message):
            raise ValueError("it is cut off")
        yield key >> 3, message[start:end]
        at = end


def _decode_varint(message: memoryview, at: int) -> tuple[int, int]:
    """Return the varint at a position, and the position after it."""
    value = 0
    for i, byte in enumerate(message[at : at + MAX_VARINT_BYTES]):
        value |= (byte & 0x7F) << (7 * i)
        if byte < 0x80:
            return value, at + i + 1
    raise ValueError("a number is cut off")
