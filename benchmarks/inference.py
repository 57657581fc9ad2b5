"""What does the fused skeleton cost against the floor: one session per candidate and the gate, back to back?

    python benchmarks/inference.py [--json FILE] [--rounds 9]

CPU time of the calling thread, one thread, so that other load on the machine counts little. Each round times every
variant once, in turn; a ratio is the median over the rounds of the ratios within a round. The floor runs M networks
with different weights and a session of the gate's size; it fuses nothing. Target (findings): at most 1.05 at batch 1.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import numpy as np
import onnxruntime
import torch

import deploy
from export import Candidate, GateWeights, Mixture, write_bundle
from export.branch import branch
from export.parity import n_gate_features
from fedge.messages import Role
from fedge.models import initial
from fedge.task import TaskSpec
from fedge.tensors import unflatten

TASKS = {
    "mlp8": TaskSpec(name="digits", classes=tuple("0123456789"), input_shape=(1, 8, 8), model="mlp"),
    "cnn28": TaskSpec(name="mnist", classes=tuple("0123456789"), input_shape=(1, 28, 28), model="cnn_fedavg"),
    "cnn32": TaskSpec(name="cifar", classes=tuple("0123456789"), input_shape=(3, 32, 32), model="cnn"),
}


def sessions(task: TaskSpec, n_experts: int, folder: Path) -> tuple[deploy.Runtime, list, object]:
    """The bundle's runtime, a session per candidate with its weights inside, and one of the gate."""
    import onnx
    from onnx import helper, numpy_helper

    layout, _ = initial(task, 0)
    m = n_experts + 1
    models = [initial(task, k)[1] for k in range(m)]
    n_features = n_gate_features(task)
    roles = [Role.PRIVATE, *[Role.EXPERT] * n_experts]
    mixture = Mixture(
        tuple(Candidate(roles[k], f"c{k}", models[k], 1.4, 0.5, 2.3, 0.3, 1 / m) for k in range(m)),
        np.full(task.n_classes, -np.log(task.n_classes)), 0.5, GateWeights.untrained(n_features, m),
    )  # fmt: skip
    write_bundle(
        folder, task=task, layout=layout, mixture=mixture, validation=np.zeros((0, *task.input_shape)),
        release=1, method="benchmark", metrics={},
    )  # fmt: skip
    singles = []
    for model in models:
        graph = branch(task)
        tensors = unflatten(model, layout)
        for held in graph.graph.initializer:
            if held.name in tensors:
                held.CopyFrom(numpy_helper.from_array(np.ascontiguousarray(tensors[held.name]), held.name))
        singles.append(session(graph.SerializeToString()))
    nodes = [
        helper.make_node("Gemm", ["x", "a"], ["h"]), helper.make_node("Relu", ["h"], ["r"]),
        helper.make_node("Gemm", ["r", "b"], ["s"]),
    ]  # fmt: skip
    arrays = {"a": np.ones((n_features, 16), np.float32), "b": np.ones((16, m), np.float32)}
    gate = helper.make_graph(
        nodes, "gate",
        [helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, ["n", n_features])],
        [helper.make_tensor_value_info("s", onnx.TensorProto.FLOAT, ["n", m])],
        [numpy_helper.from_array(array, name) for name, array in arrays.items()],
    )  # fmt: skip
    gate_model = helper.make_model(gate, opset_imports=[helper.make_opsetid("", 20)], ir_version=9)
    return deploy.load(folder), singles, session(gate_model.SerializeToString())


def session(graph: bytes) -> onnxruntime.InferenceSession:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    return onnxruntime.InferenceSession(graph, options, providers=["CPUExecutionProvider"])


def cpu_ms(call: Callable[[], object], repeats: int) -> float:
    begin = time.thread_time()
    for _ in range(repeats):
        call()
    return (time.thread_time() - begin) / repeats * 1000


def measure(name: str, n_experts: int, batch: int, rounds: int, folder: Path) -> dict[str, object]:
    task = TASKS[name]
    runtime, singles, gate = sessions(task, n_experts, folder)
    rng = np.random.default_rng(0)
    x = rng.random((batch, *task.input_shape), dtype=np.float32)
    features = rng.random((batch, n_gate_features(task)), dtype=np.float32)

    def floor() -> None:
        gate.run(None, {"x": features})
        for single in singles:
            single.run(None, {"x": x})

    graph = runtime._run  # noqa: SLF001 - the graph alone, without preprocessing
    variants = {"floor": floor, "fused": lambda: graph(x), "predict": lambda: runtime.predict(x)}
    for call in variants.values():
        cpu_ms(call, 3)
    repeats = max(5, int(20 / max(cpu_ms(floor, 5), 1e-3)))  # about 20 ms of work each
    times = [{key: cpu_ms(call, repeats) for key, call in variants.items()} for _ in range(rounds)]
    row: dict[str, object] = {"network": name, "experts": n_experts, "batch": batch}
    row |= {f"{key}_ms": median(t[key] for t in times) for key in variants}
    row |= {f"{key}_ratio": median(t[key] / t["floor"] for t in times) for key in ("fused", "predict")}
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the rows there, too")
    parser.add_argument("--rounds", type=int, default=9)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    print("network   J batch   floor ms   fused ms  ratio   predict ratio")
    with tempfile.TemporaryDirectory() as folder:
        for name in TASKS:
            for n_experts in (1, 2, 4):
                for batch in (1, 8):
                    where = Path(folder) / f"{name}-{n_experts}-{batch}"
                    row = measure(name, n_experts, batch, arguments.rounds, where)
                    rows.append(row)
                    print(
                        f"{name:<8} {n_experts:>2} {batch:>5} {row['floor_ms']:>10.4f} {row['fused_ms']:>10.4f} "
                        f"{row['fused_ratio']:>6.2f} {row['predict_ratio']:>15.2f}", flush=True,
                    )  # fmt: skip
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=2) + "\n")


if __name__ == "__main__":
    main()
