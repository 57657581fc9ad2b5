"""The skeleton: gate, one branch per candidate and the fusion in one ONNX graph without weights (fedge.md section 9).

Everything that differs between devices is in the parts. Each candidate's tensors are in a part of their own; the gate,
the calibration, the weights and the guard are in the gate's part. The graph depends only on the architecture, the
number of candidates and, if not all experts may take part, which candidates are experts.
"""

from __future__ import annotations

import io
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy.typing import NDArray

from export.branch import IR_VERSION, export_branch
from export.mixture import Mixture
from fedge.bundle.formula import LOWEST, MIN_ENERGY_STD, compute_log_weights
from fedge.bundle.manifest import OUTPUTS, Bundle, format_slot
from fedge.data.task import INPUT, LOGITS, TaskSpec, choose_gate_pool
from fedge.tensors.layout import Place, read_places

if TYPE_CHECKING:
    import onnx

SMALL_WINDOW: Final = 16
"""Most pixels in a window (images of 32 x 32) for which multiplying every pixel by the gate's first layer is faster
than taking means first. With more pixels, that layer's weights take too long to read for one sample."""
LARGE: Final = 1024
"""Least bytes of a constant that all branches share."""


def make_gate_tensors(mixture: Mixture, dtype: type[np.floating] = np.float32) -> dict[str, NDArray[np.generic]]:
    """Return the tensors of the gate's part, which are all but the candidates' weights, with floats as `dtype`.

    The last row of `scale` and `prior`, the last entry of `order`, and `guard.share` belong to the guard. They
    calibrate its candidate's logits a second time, and give its share of the output, ½ or 0.
    """
    candidates, gate, guard = mixture.candidates, mixture.gate, mixture.guard
    log_weight = compute_log_weights(np.array([c.weight for c in candidates]))
    temperature = [c.temperature for c in candidates] + [guard.temperature if guard else 1.0]
    kappa = [c.kappa for c in candidates] + [guard.kappa if guard else 0.0]
    std = [max(c.energy_std, MIN_ENERGY_STD) for c in candidates]
    floats = {
        "gate.hidden.weight": gate.hidden_weight,
        "gate.hidden.bias": gate.hidden_bias,
        "gate.out.weight": gate.out_weight,
        "gate.out.bias": np.asarray(gate.out_bias, np.float64) + log_weight,
        "energy.mean": [c.energy_mean for c in candidates],
        "energy.inverse_std": 1 / np.array(std),
        "energy.low": -mixture.energy_clip,
        "energy.high": mixture.energy_clip,
        "energy.beta": mixture.beta,
        "scale": 1 / np.array(temperature)[:, None],
        "prior": np.array(kappa)[:, None] * np.asarray(mixture.log_prior, np.float64),
        "guard.share": [0.5 if guard else 0.0],
    }
    tensors: dict[str, NDArray[np.generic]] = {name: np.array(value, dtype) for name, value in floats.items()}
    tensors["order"] = np.array([*range(len(candidates)), guard.candidate if guard else 0], np.int64)
    return tensors


def encode_skeleton(task: TaskSpec, mixture: Mixture, candidate_part: bytes, gate_part: bytes) -> bytes:
    """Serialise the graph: input x (n, *input_shape) -> probabilities (n, C), weights (n, M), energies (n, M).

    Args:
        task: the task, whose network is every branch.
        mixture: gives M and which candidates are experts; none of its numbers enters the graph.
        candidate_part: a candidate's safetensors file, for the positions of its tensors.
        gate_part: the gate's safetensors file, for the same.
    """
    model, m = export_branch(task), len(mixture.candidates)
    graph = Graph()
    for k in range(m):
        graph.add_branch(model, f"c{k}/", k, candidate_part)
    graph.add_part(m, gate_part)
    add_gate(graph, task)
    add_fusion(graph, task.n_classes, mixture)
    return graph.encode_mixture(task, m, model.opset_import)


def encode_branch(task: TaskSpec, candidate_part: bytes) -> bytes:
    """Serialise one candidate's network alone: input x (n, *input_shape) -> logits (n, C), weights in slot 0."""
    model = export_branch(task)
    graph = Graph()
    graph.add_branch(model, "", 0, candidate_part)
    return graph.encode(task.input_shape, {LOGITS: task.n_classes}, model.opset_import)


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

    def encode_mixture(self, task: TaskSpec, n_candidates: int, opset: Any) -> bytes:
        """Serialise a mixture's model; equal graphs give equal bytes."""
        sizes = (task.n_classes, n_candidates, n_candidates)
        return self.encode(task.input_shape, dict(zip(OUTPUTS, sizes, strict=True)), opset)

    def encode(self, input_shape: tuple[int, ...], outputs: Mapping[str, int], opset: Any) -> bytes:
        """Serialise the model, with input (n, *input_shape) and outputs (n, k) by name and k."""
        import onnx

        float32 = onnx.TensorProto.FLOAT
        proto = onnx.helper.make_graph(
            self._nodes,
            "fedge",
            [onnx.helper.make_tensor_value_info(INPUT, float32, ["n", *input_shape])],
            [onnx.helper.make_tensor_value_info(name, float32, ["n", k]) for name, k in outputs.items()],
            self._initializers,
        )
        whole = onnx.helper.make_model(proto, opset_imports=list(opset), ir_version=IR_VERSION, producer_name="fedge")
        data: bytes = whole.SerializeToString(deterministic=True)
        return data

    def _make_name(self) -> str:
        self._names += 1
        return f"f{self._names}"


def add_gate(graph: Graph, task: TaskSpec) -> None:
    """Add the residual gate, whose last bias includes log ω; its output is gate (n, M)."""
    kernel = choose_gate_pool(task.input_shape)
    seen, weight = INPUT, "gate.hidden.weight"
    if 1 < math.prod(kernel) <= SMALL_WINDOW:
        weight = _expand_weights(graph, weight, task.input_shape, kernel)
    elif kernel != (1, 1):
        seen = graph.op("AveragePool", INPUT, kernel_shape=kernel, strides=kernel)
    hidden = graph.op("Gemm", graph.op("Flatten", seen), weight, "gate.hidden.bias", transB=1)
    graph.op("Gemm", graph.op("Relu", hidden), "gate.out.weight", "gate.out.bias", transB=1, out="gate")


def _expand_weights(graph: Graph, weight: str, shape: tuple[int, ...], kernel: tuple[int, int]) -> str:
    """Expand weights (H, F) for window means to weights (H, pixels), which ONNX Runtime computes once, at load time."""
    (channels, height, width), (rows, columns) = shape, kernel
    down, across = height // rows, width // columns
    split = graph.op("Reshape", weight, graph.const([-1, channels, down, 1, across, 1]))
    each = graph.op("Expand", split, graph.const([1, 1, 1, rows, 1, columns]))
    seen = graph.op("Reshape", each, graph.const([-1, channels, down * rows, across * columns]))
    if (down * rows, across * columns) != (height, width):  # the last pixels are in no window
        margins = [0, 0, 0, 0, 0, 0, height - down * rows, width - across * columns]
        seen = graph.op("Pad", seen, graph.const(margins))
    flat = graph.op("Reshape", seen, graph.const([-1, math.prod(shape)]))
    return graph.op("Mul", flat, graph.const(np.float32(1 / (rows * columns))))


def add_fusion(graph: Graph, n_classes: int, mixture: Mixture) -> None:
    """Add the fusion, which computes the outputs from c{k}/logits and gate."""
    m = len(mixture.candidates)
    flat = graph.op("Concat", *(f"c{k}/{LOGITS}" for k in range(m)), axis=1)
    logits = graph.op("Reshape", flat, graph.const([-1, m, n_classes]))
    classes, infinity = graph.const([2]), graph.const(np.float32(np.inf))

    # s = log ω + r + β clip(ẽ); ẽ = (logsumexp l − μ) / σ
    lse = graph.op("ReduceLogSumExp", logits, classes, keepdims=0)
    energy = graph.op("Mul", graph.op("Sub", lse, "energy.mean"), "energy.inverse_std")
    clipped = graph.op("Clip", energy, "energy.low", "energy.high")
    score = graph.op("Add", graph.op("Mul", clipped, "energy.beta"), "gate")

    # usable: every logit and the score are finite; one non-finite term makes the sum non-finite
    total = graph.op("Add", graph.op("ReduceL1", logits, classes, keepdims=0), score)
    usable = graph.op("Less", graph.op("Abs", total), infinity)
    score = graph.op("Where", usable, score, graph.const(LOWEST))
    graph.op("Where", usable, energy, graph.const(np.float32(np.nan)), out="energies")
    if len(mixture.experts) > mixture.top:
        score = _select_top(graph, m, score, mixture.experts, mixture.top)
    alpha = graph.op("Softmax", score, axis=1)
    graph.op("Where", usable, alpha, graph.const(np.float32(0)), out="weights")

    # exp q, a row for each candidate and one for the guard; a row of zeros is 1/C, which remains if nothing is usable
    rows = graph.op("Gather", logits, "order", axis=1)
    kept = graph.op("Gather", usable, "order", axis=1)
    z = graph.op("Add", graph.op("Mul", rows, "scale"), "prior")
    last = graph.const([2])
    z = graph.op("Where", graph.op("Unsqueeze", kept, last), z, graph.const(np.float32(0)))
    q = graph.op("Softmax", z, axis=2)

    # p = (1 − g) Σ α_k exp q_k + g exp q_guard; g = 0 if the guard's candidate is not usable
    guarded = graph.op("Gather", kept, graph.const([m]), axis=1)
    g = graph.op("Where", guarded, "guard.share", graph.const(np.float32(0)))
    rest = graph.op("Mul", alpha, graph.op("Sub", graph.const(np.float32(1)), g))
    weights = graph.op("Unsqueeze", graph.op("Concat", rest, g, axis=1), last)
    graph.op("ReduceSum", graph.op("Mul", weights, q), graph.const([1]), keepdims=0, out="probabilities")


def _select_top(graph: Graph, m: int, score: str, experts: tuple[int, ...], top: int) -> str:
    """Keep the `top` best experts, the lower index on a tie; the others get the score of a dropped candidate."""
    expert = graph.const(np.isin(np.arange(m), experts))
    # Candidates that are no experts are put below even dropped ones, so that TopK never returns them.
    competing = graph.op("Where", expert, score, graph.const(np.float32(-np.inf)))
    best, where = graph.ops("TopK", 2, competing, graph.const([top]), axis=1)
    others = graph.op("Where", expert, graph.const(LOWEST), score)
    return graph.op("ScatterElements", others, where, best, axis=1)


def embed_parts(bundle: Bundle) -> onnx.ModelProto:
    """Return a bundle's graph with the tensors of its parts inside, as one model that needs no other files."""
    import onnx

    model = onnx.load_from_string(bundle.graph)
    for held in model.graph.initializer:
        if held.data_location == onnx.TensorProto.EXTERNAL:
            place = {entry.key: entry.value for entry in held.external_data}
            with (bundle.folder / place["location"]).open("rb") as part:
                part.seek(int(place["offset"]))
                held.raw_data = part.read(int(place["length"]))
            held.ClearField("external_data")
            held.data_location = onnx.TensorProto.DEFAULT
    return model


def find_tensor_places(part: bytes) -> dict[str, Place]:
    """Return the places of a safetensors file's tensors, sorted by name."""
    return dict(sorted(read_places(io.BytesIO(part)).items()))


def _point(tensor: onnx.TensorProto, index: int, place: Place) -> None:
    """Make an initializer refer to its bytes in part number `index`."""
    assert tuple(tensor.dims) == place.shape, tensor.name
    for key, value in (("location", format_slot(index)), ("offset", place.start), ("length", place.stop - place.start)):
        tensor.external_data.add(key=key, value=str(value))
