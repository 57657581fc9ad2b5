"""A graph under construction: nodes, and initializers whose numbers are in the parts of a bundle."""

from __future__ import annotations

import io
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy.typing import NDArray

from export.branch import IR_VERSION
from fedge.bundle.manifest import format_slot
from fedge.data.task import INPUT
from fedge.tensors.layout import Place, read_places

if TYPE_CHECKING:
    import onnx

LARGE: Final = 1024
"""Least bytes of a constant that all branches share."""


class Graph:
    """A graph under construction: nodes and initializers."""

    def __init__(self) -> None:
        self._nodes: list[onnx.NodeProto] = []
        self._initializers: list[onnx.TensorProto] = []
        self._names = 0

    def add_branch(self, model: onnx.ModelProto, prefix: str, index: int, part: bytes) -> None:
        """Add a copy of the network with names that begin with `prefix`; its weights are in part number `index`.

        Large constants that are equal in all candidates, such as frozen weights, are stored in the graph once.
        """
        import onnx

        places = find_tensor_places(part)
        renamed = onnx.compose.add_prefix(model, prefix, rename_inputs=False).graph if prefix else model.graph
        large = [i.name for i in model.graph.initializer if len(i.raw_data) >= LARGE]
        shared, there = {prefix + name: name for name in large}, {i.name for i in self._initializers}
        for node in renamed.node:
            node.input[:] = [shared.get(name, name) for name in node.input]
            self._nodes.append(node)
        for held in renamed.initializer:
            if held.data_location == onnx.TensorProto.EXTERNAL:
                _point(held, index, places[held.name.removeprefix(prefix)])
            held.name = shared.get(held.name, held.name)
            if held.name not in there:
                self._initializers.append(held)

    def add_part(self, index: int, part: bytes, prefix: str = "") -> None:
        """Declare the tensors of part number `index`, each named `prefix` plus its own name."""
        import onnx

        for name, place in find_tensor_places(part).items():
            held = onnx.TensorProto(name=prefix + name, dims=place.shape, data_location=onnx.TensorProto.EXTERNAL)
            held.data_type = onnx.TensorProto.INT64 if place.dtype == np.int64 else onnx.TensorProto.FLOAT
            _point(held, index, place)
            self._initializers.append(held)

    def add_array(self, name: str, array: NDArray[np.generic]) -> str:
        """Store an array in the graph, and return its name."""
        import onnx

        self._initializers.append(onnx.numpy_helper.from_array(np.ascontiguousarray(array), name))
        return name

    def op(self, kind: str, *inputs: str, out: str = "", **attributes: Any) -> str:
        """Add a node with one output, and return its name."""
        (name,) = self.ops(kind, 1, *inputs, out=out, **attributes)
        return name

    def ops(self, kind: str, n_outputs: int, *inputs: str, out: str = "", **attributes: Any) -> tuple[str, ...]:
        """Add a node with several outputs, and return their names; `out` is the name of the first."""
        import onnx

        names = [out or self._make_name(), *(self._make_name() for _ in range(n_outputs - 1))]
        self._nodes.append(onnx.helper.make_node(kind, list(inputs), names, name=f"{kind}:{names[0]}", **attributes))
        return tuple(names)

    def const(self, value: object) -> str:
        """Return the name of a small constant in the graph; equal constants are shared."""
        array = np.array(value)
        name = f"const:{array.dtype}:{array.tolist()}"
        return name if any(i.name == name for i in self._initializers) else self.add_array(name, array)

    def encode(self, input_shape: tuple[int, ...], outputs: Mapping[str, tuple[int, ...]], opset: Any) -> bytes:
        """Serialise the model, with input (n, *input_shape) and outputs (n, ...) by name; equal graphs: equal bytes."""
        import onnx

        float32 = onnx.TensorProto.FLOAT
        proto = onnx.helper.make_graph(
            self._nodes,
            "fedge",
            [onnx.helper.make_tensor_value_info(INPUT, float32, ["n", *input_shape])],
            [onnx.helper.make_tensor_value_info(name, float32, ["n", *shape]) for name, shape in outputs.items()],
            self._initializers,
        )
        whole = onnx.helper.make_model(proto, opset_imports=list(opset), ir_version=IR_VERSION, producer_name="fedge")
        data: bytes = whole.SerializeToString(deterministic=True)
        return data

    def _make_name(self) -> str:
        self._names += 1
        return f"f{self._names}"


def find_tensor_places(part: bytes) -> dict[str, Place]:
    """Return the places of a safetensors file's tensors, sorted by name."""
    return dict(sorted(read_places(io.BytesIO(part)).items()))


def _point(tensor: onnx.TensorProto, index: int, place: Place) -> None:
    """Make an initializer refer to its bytes in part number `index`."""
    assert tuple(tensor.dims) == place.shape, tensor.name
    for key, value in (("location", format_slot(index)), ("offset", place.start), ("length", place.stop - place.start)):
        tensor.external_data.add(key=key, value=str(value))
