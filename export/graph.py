"""The skeleton: gate, one branch per candidate and the fusion in one ONNX graph without weights (fedge.md section 9).

Everything that differs between devices is in the parts. Each candidate's tensors are in a part of their own; the gate,
the calibration, the weights and the guard are in the gate's part. The graph depends only on the architecture, the
number of candidates and, if not all experts may take part, which candidates are experts.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final

import numpy as np
from numpy.typing import NDArray

from export.branch import export_branch
from export.gate import add_trunk
from export.graph_nodes import Graph
from export.mixture import GateWeights, Mixture
from export.problems.answers import add_answers
from fedge.bundle.formula import MIN_ENERGY_STD, compute_log_weights
from fedge.bundle.manifest import Bundle
from fedge.bundle.trunk import LAYERS
from fedge.data.task import INPUT, LOGITS, TaskSpec, choose_gate_pool

if TYPE_CHECKING:
    import onnx

SMALL_WINDOW: Final = 16
"""Most pixels in a window (images of 32 x 32) for which multiplying every pixel by the gate's first layer is faster
than taking means first. With more pixels, that layer's weights take too long to read for one sample."""


def make_gate_tensors(
    task: TaskSpec, mixture: Mixture, dtype: type[np.floating] = np.float32
) -> dict[str, NDArray[np.generic]]:
    """Return the tensors of the gate's part, which are all but the candidates' weights, with floats as `dtype`.

    The last row of `scale` and `prior`, the last entry of `order`, and `guard.share` belong to the guard. They
    calibrate its candidate's logits a second time, and give its share of the output, ½ or 0.
    """
    candidates, gate, guard = mixture.candidates, mixture.gate, mixture.guard
    log_weight = compute_log_weights(np.array([c.weight for c in candidates]))
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
        "guard.share": [0.5 if guard else 0.0],
    }
    for layer, (weight, bias) in zip(LAYERS, gate.convolutions, strict=False):
        floats |= {f"gate.{layer}.weight": weight, f"gate.{layer}.bias": bias}
    floats |= task.problem.make_rows(mixture.calibrations, mixture.offsets)
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
    add_gate(graph, task, mixture.gate)
    answers = add_answers(graph, task, mixture)
    return graph.encode(task.input_shape, answers | {"weights": (m,), "energies": (m,)}, model.opset_import)


def encode_branch(task: TaskSpec, candidate_part: bytes) -> bytes:
    """Serialise one candidate's network alone: input x (n, *input_shape) -> outputs (n, ...), weights in slot 0."""
    model = export_branch(task)
    graph = Graph()
    graph.add_branch(model, "", 0, candidate_part)
    return graph.encode(task.input_shape, {LOGITS: task.problem.get_output_shape(task.input_shape)}, model.opset_import)


def add_gate(graph: Graph, task: TaskSpec, gate: GateWeights) -> None:
    """Add the gate, whose last bias includes log ω; its output is gate (n, M)."""
    whole = np.shape(gate.hidden_weight)[1] == math.prod(task.input_shape)
    kernel = (1, 1) if whole else choose_gate_pool(task.input_shape)
    seen, weight = INPUT, "gate.hidden.weight"
    if gate.convolutions:
        seen = add_trunk(graph, task.input_shape, "gate.")
    elif 1 < math.prod(kernel) <= SMALL_WINDOW:
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
