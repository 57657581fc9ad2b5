"""The skeleton: gate, one branch per candidate and the fusion in one ONNX graph without numbers (fedge.md section 9).

Everything that differs between devices lies in the parts: a candidate's tensors in its own file, the gate, the
calibration, the weights and the guard in the gate's. The graph depends on the architecture, on the number of candidates
and, when there are more of them than places, on which candidates are experts; nothing else.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy.typing import NDArray

from export.branch import IR_VERSION, LOGITS, branch
from export.mixture import MIN_ENERGY_STD, Mixture
from export.reference import ZERO_WEIGHT
from fedge.bundle import INPUT, OUTPUTS, slot
from fedge.task import TaskSpec, gate_pool

if TYPE_CHECKING:
    import onnx

LOWEST: Final = np.float32(-3e38)
"""Score of a candidate that is dropped: below every other, and finite, so that a softmax over such scores is too."""


def gate_tensors(mixture: Mixture) -> dict[str, NDArray[np.generic]]:
    """The numbers of the gate's part: all of a device that is not a candidate's weights.

    The last row of `scale` and `prior`, the last entry of `order` and `guard.share` are the guard's alternative: the
    candidate's logits once more with another calibration, and its share of the output, ½ or 0.
    """
    candidates, gate, guard = mixture.candidates, mixture.gate, mixture.guard
    log_weight = [np.log(c.weight) if c.weight > 0 else ZERO_WEIGHT for c in candidates]
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
    order = [*range(len(candidates)), guard.candidate if guard else 0]
    tensors: dict[str, NDArray[np.generic]] = {name: np.array(value, np.float32) for name, value in floats.items()}
    tensors["order"] = np.array(order, np.int64)
    return tensors


def skeleton(task: TaskSpec, mixture: Mixture, candidate_part: bytes, gate_part: bytes) -> bytes:
    """Serialise the graph: input x (n, *input_shape) -> probabilities (n, C), weights (n, M), energies (n, M).

    Args:
        task: its network is every branch.
        mixture: for M and which candidates are experts; no number of it gets into the graph.
        candidate_part: a candidate's safetensors file, for its layout.
        gate_part: the gate's.
    """
    import onnx

    model = branch(task)
    graph = _Graph(n_candidates=len(mixture.candidates))
    graph.add_branches(model, candidate_part)
    graph.add_gate(task, gate_part)
    graph.add_fusion(task.n_classes, mixture.experts if len(mixture.experts) > mixture.top else (), mixture.top)
    n, c, m = "n", task.n_classes, len(mixture.candidates)
    float32 = onnx.TensorProto.FLOAT
    proto = onnx.helper.make_graph(
        graph.nodes,
        "fedge",
        [onnx.helper.make_tensor_value_info(INPUT, float32, [n, *task.input_shape])],
        [onnx.helper.make_tensor_value_info(o, float32, [n, size]) for o, size in zip(OUTPUTS, (c, m, m), strict=True)],
        graph.initializers,
    )
    whole = onnx.helper.make_model(
        proto, opset_imports=list(model.opset_import), ir_version=IR_VERSION, producer_name="fedge"
    )
    data: bytes = whole.SerializeToString(deterministic=True)
    return data


class _Graph:
    """Nodes and initializers as they come together."""

    def __init__(self, n_candidates: int) -> None:
        self.nodes: list[onnx.NodeProto] = []
        self.initializers: list[onnx.TensorProto] = []
        self._m = n_candidates
        self._names = 0

    def add_branches(self, model: onnx.ModelProto, part: bytes) -> None:
        """One copy of the network per candidate, c{k}/logits each."""
        import onnx

        places = tensor_places(part)
        for k in range(self._m):
            renamed = onnx.compose.add_prefix(model, f"c{k}/", rename_inputs=False).graph
            self.nodes.extend(renamed.node)
            for held in renamed.initializer:
                if held.data_location == onnx.TensorProto.EXTERNAL:
                    _point(held, k, places[held.name.removeprefix(f"c{k}/")])
                self.initializers.append(held)

    def add_gate(self, task: TaskSpec, part: bytes) -> None:
        """Residual gate with log ω in its last bias: gate (n, M). Declares the tensors of the gate's part."""
        import onnx

        for name, (dtype, shape, start, length) in tensor_places(part).items():
            held = onnx.TensorProto(name=name, dims=shape, data_location=onnx.TensorProto.EXTERNAL)
            held.data_type = onnx.TensorProto.INT64 if dtype == "I64" else onnx.TensorProto.FLOAT
            _point(held, self._m, (dtype, shape, start, length))
            self.initializers.append(held)
        kernel = gate_pool(task.input_shape)
        pooled = INPUT
        if kernel != (1, 1):
            pooled = self._op("AveragePool", INPUT, kernel_shape=kernel, strides=kernel)
        features = self._op("Flatten", pooled)
        hidden = self._op("Gemm", features, "gate.hidden.weight", "gate.hidden.bias", transB=1)
        self._op("Gemm", self._op("Relu", hidden), "gate.out.weight", "gate.out.bias", transB=1, out="gate")

    def add_fusion(self, n_classes: int, experts: tuple[int, ...], top: int) -> None:
        """From c{k}/logits and gate to the outputs."""
        flat = self._op("Concat", *(f"c{k}/{LOGITS}" for k in range(self._m)), axis=1)
        logits = self._op("Reshape", flat, self._const([-1, self._m, n_classes]))
        classes, infinity = self._const([2]), self._const(np.float32(np.inf))

        # s = log ω + r + β clip(ẽ); ẽ = (logsumexp l − μ) / σ
        lse = self._op("ReduceLogSumExp", logits, classes, keepdims=0)
        energy = self._op("Mul", self._op("Sub", lse, "energy.mean"), "energy.inverse_std")
        clipped = self._op("Clip", energy, "energy.low", "energy.high")
        score = self._op("Add", self._op("Mul", clipped, "energy.beta"), "gate")

        # usable: every logit and the score are finite, seen in one sum that would not be otherwise
        total = self._op("Add", self._op("ReduceL1", logits, classes, keepdims=0), score)
        usable = self._op("Less", self._op("Abs", total), infinity)
        score = self._op("Where", usable, score, self._const(LOWEST))
        self._op("Where", usable, energy, self._const(np.float32(np.nan)), out="energies")
        if experts:
            score = self._select(score, experts, top)
        alpha = self._op("Softmax", score, axis=1)
        self._op("Where", usable, alpha, self._const(np.float32(0)), out="weights")

        # exp q, a row for each candidate and one for the guard; a row of zeros is 1/C, which is what remains
        # when nothing is usable
        rows = self._op("Gather", logits, "order", axis=1)
        kept = self._op("Gather", usable, "order", axis=1)
        z = self._op("Add", self._op("Mul", rows, "scale"), "prior")
        last = self._const([2])
        z = self._op("Where", self._op("Unsqueeze", kept, last), z, self._const(np.float32(0)))
        q = self._op("Softmax", z, axis=2)

        # p = (1 − g) Σ α_k exp q_k + g exp q_guard; g = 0 where the guard's candidate is not usable
        guarded = self._op("Gather", kept, self._const([self._m]), axis=1)
        g = self._op("Where", guarded, "guard.share", self._const(np.float32(0)))
        rest = self._op("Mul", alpha, self._op("Sub", self._const(np.float32(1)), g))
        weights = self._op("Unsqueeze", self._op("Concat", rest, g, axis=1), last)
        self._op("ReduceSum", self._op("Mul", weights, q), self._const([1]), keepdims=0, out="probabilities")

    def _select(self, score: str, experts: tuple[int, ...], top: int) -> str:
        """Keep the `top` best experts, the lower index on a tie; the others get the score of a dropped candidate."""
        expert = self._const(np.isin(np.arange(self._m), experts))
        # Candidates that need no place are put below even the dropped ones, so that TopK never returns them.
        competing = self._op("Where", expert, score, self._const(np.float32(-np.inf)))
        best, where = self._name(), self._name()
        self._add("TopK", [competing, self._const([top])], [best, where], axis=1)
        others = self._op("Where", expert, self._const(LOWEST), score)
        return self._op("ScatterElements", others, where, best, axis=1)

    def _op(self, kind: str, *inputs: str, out: str = "", **attributes: Any) -> str:
        name = out or self._name()
        self._add(kind, list(inputs), [name], **attributes)
        return name

    def _add(self, kind: str, inputs: list[str], outputs: list[str], **attributes: Any) -> None:
        import onnx

        self.nodes.append(onnx.helper.make_node(kind, inputs, outputs, name=f"{kind}:{outputs[0]}", **attributes))

    def _name(self) -> str:
        self._names += 1
        return f"f{self._names}"

    def _const(self, value: object) -> str:
        import onnx

        array = np.array(value)
        name = f"const:{array.dtype}:{array.tolist()}"
        if all(i.name != name for i in self.initializers):
            self.initializers.append(onnx.numpy_helper.from_array(array, name))
        return name


Place = tuple[str, list[int], int, int]


def tensor_places(part: bytes) -> dict[str, Place]:
    """Name -> (dtype, shape, offset in the file, length in bytes) of the tensors of a safetensors file, by name."""
    start = 8 + int.from_bytes(part[:8], "little")
    header = json.loads(part[8:start])
    return {
        name: (t["dtype"], t["shape"], start + t["data_offsets"][0], t["data_offsets"][1] - t["data_offsets"][0])
        for name, t in sorted(header.items())
    }


def _point(tensor: onnx.TensorProto, index: int, place: Place) -> None:
    """Let an initializer refer to its bytes in part number `index`."""
    _, shape, start, length = place
    assert list(tensor.dims) == shape, tensor.name
    for key, value in (("location", slot(index)), ("offset", start), ("length", length)):
        tensor.external_data.add(key=key, value=str(value))
