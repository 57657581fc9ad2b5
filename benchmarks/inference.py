"""How fast and small is the device's runtime? Every target, met or missed.

    python benchmarks/inference.py [--json FILE] [--rounds 7] [--quick] [--large]

Processor time of the calling thread, one thread, so that other load on the machine counts little. Each round times
every variant once, in turn; a ratio is the median over the rounds of the ratios within a round.

    floor      one session per candidate, weights inside, and one of the gate's size, back to back: fuses nothing
    fused      the bundle's skeleton: gate, candidates and fusion in one call
    separate   a session per candidate, gate and fusion in numpy
    predict    fused, with preprocessing and `Prediction`
    torch      the same networks and the formula in eager torch

Every kind of problem has a row at batch 1: fused and floor, with three experts.

Load times and memory are those of processes that do nothing else, median of 5. --quick: one network, few rounds, to
see that it runs; --large: a ResNet-18 too (minutes).
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import onnx
import torch
from script import DIGITS, finish, parser_of, show

import deploy
from export import Candidate, GateWeights, Mixture, write_bundle
from export.branch import OPSET, export_branch
from export.graph import embed_parts
from export.graph_nodes import Graph
from export.parity import compute_logits
from fedge.bundle.formula import count_gate_features
from fedge.bundle.manifest import read_bundle
from fedge.bundle.runtime import make_session, make_session_options, onnxruntime
from fedge.data.preprocessing import preprocess
from fedge.data.problems.calibration import Calibration
from fedge.data.problems.multi_label import MultiLabel
from fedge.data.problems.reconstruction import Reconstruction
from fedge.data.problems.regression import Regression
from fedge.data.problems.segmentation import Segmentation
from fedge.data.task import INPUT, TaskSpec, choose_gate_pool
from fedge.models.build import make_initial_model, make_network
from fedge.models.network import load_model
from fedge.tensors.layout import unflatten
from fedge.wire.messages import Role

TASKS = {
    "cnn28": TaskSpec(name="mnist", classes=DIGITS, input_shape=(1, 28, 28), model="networks:cnn28"),
    "cnn32": TaskSpec(name="cifar", classes=DIGITS, input_shape=(3, 32, 32), model="networks:cnn32"),
    "rn18": TaskSpec(name="resnet", classes=DIGITS, input_shape=(3, 32, 32), model="networks:rn18"),
    "mlp": TaskSpec(name="digits", classes=DIGITS, input_shape=(1, 8, 8), model="mlp"),
}  # fmt: skip
"""The first three are those of the targets. The last is the smallest that fedge has: its forward passes cost next to
nothing, so that it shows what the runtime itself costs."""
_LARGE = {"hidden": 512, "code": 32}
KINDS = {
    "classification": TaskSpec(name="c", classes=DIGITS, input_shape=(1, 28, 28), model="cnn_fedavg"),
    "multi-label": TaskSpec(name="l", input_shape=(1, 28, 28), model="cnn_fedavg", asked=MultiLabel(labels=DIGITS)),
    "regression": TaskSpec(
        name="r", input_shape=(1, 28, 28), model="cnn_fedavg", asked=Regression(targets=("a",), mean=(0,), std=(1,))
    ),
    "variance": TaskSpec(
        name="v", input_shape=(1, 28, 28), model="cnn_fedavg",
        asked=Regression(targets=("a",), mean=(0,), std=(1,), variance=True),
    ),
    "segmentation": TaskSpec(name="s", input_shape=(1, 32, 32), model="unet", asked=Segmentation(classes=DIGITS[:4])),
    "reconstruction": TaskSpec(
        name="x", input_shape=(1, 28, 28), model="autoencoder", model_options=_LARGE, asked=Reconstruction()
    ),
}  # fmt: skip
"""A task of each kind."""
HOW = Calibration(temperature=1.4, kappa=0.5)
EXPERTS = (1, 2, 4, 8)
BATCHES = (1, 8, 64)
BUDGET_MS = 20.0
"""Work of a variant in a round."""


@dataclass(frozen=True)
class Target:
    """What was found against what was asked for; `found` is the worst case."""

    name: str
    found: float
    limit: float
    at_least: bool = False

    @property
    def met(self) -> bool:
        return self.found >= self.limit if self.at_least else self.found <= self.limit

    def __str__(self) -> str:
        sign = ">=" if self.at_least else "<="
        return f"{'met   ' if self.met else 'MISSED'}  {self.name:<66} {self.found:>10.5g}  ({sign} {self.limit:g})"


# ------------------------------------------------------------------------------------------------- what is timed


class Subject:
    """A bundle of J experts and a private model with random weights, and the same networks in every other form."""

    def __init__(self, name: str, n_experts: int, folder: Path) -> None:
        self.task = (TASKS | KINDS)[name]
        self.name, self.n_experts, self.folder = name, n_experts, folder
        m = n_experts + 1
        self.layout, _ = make_initial_model(self.task, 0)
        self.models = [make_initial_model(self.task, k)[1] for k in range(m)]
        roles = [Role.PRIVATE, *[Role.EXPERT] * n_experts]
        rng = np.random.default_rng(0)
        n_features = count_gate_features(self.task.input_shape)
        gate = GateWeights(*(rng.normal(size=s) * 0.1 for s in ((16, n_features), (16,), (m, 16), (m,))))
        prior = self.task.problem.make_no_offset(self.task.input_shape)
        self.mixture = Mixture(
            tuple(Candidate(roles[k], f"c{k}", self.models[k], prior, HOW, 2.3, 0.3, 1 / m) for k in range(m)),
            0.5, gate,
        )  # fmt: skip
        write_bundle(
            folder, task=self.task, layout=self.layout, mixture=self.mixture,
            validation=np.zeros((0, *self.task.input_shape)), release=1, method="benchmark", metrics={},
        )  # fmt: skip

    def floor(self) -> Callable[[np.ndarray], object]:
        """Gate and candidates as sessions of their own, one after the other."""
        singles = [make_session(self.single(k), Path()) for k in range(self.n_experts + 1)]
        gate, n_features = make_session(self._gate(), Path()), count_gate_features(self.task.input_shape)

        def run(x: np.ndarray) -> list:
            features = np.ascontiguousarray(x.reshape(len(x), -1)[:, :n_features])
            return [gate.run(None, {INPUT: features}), *(single.run(None, {INPUT: x}) for single in singles)]

        return run

    def single(self, k: int) -> bytes:
        """Candidate k's network with its weights inside."""
        from onnx import numpy_helper

        graph = export_branch(self.task)
        tensors = unflatten(self.models[k], self.layout)
        for held in graph.graph.initializer:
            if held.name in tensors:
                held.CopyFrom(numpy_helper.from_array(np.ascontiguousarray(tensors[held.name]), held.name))
        data: bytes = graph.SerializeToString()
        return data

    def fused_file(self, path: Path) -> None:
        """The skeleton with all numbers inside: what a bundle would be without parts."""
        path.write_bytes(embed_parts(read_bundle(self.folder)).SerializeToString())

    def eager(self) -> Callable[[np.ndarray], Any]:
        """The formula of the mixture in torch, as one would write it."""
        modules = []
        for model in self.models:
            module = make_network(self.task).eval()
            load_model(module, model, self.layout)
            modules.append(module)
        gate, kernel = self.mixture.gate, choose_gate_pool(self.task.input_shape)
        w1, b1, w2, b2 = (
            torch.from_numpy(np.float32(a))
            for a in (gate.hidden_weight, gate.hidden_bias, gate.out_weight, gate.out_bias)
        )
        weights = torch.log(torch.tensor([c.weight for c in self.mixture.candidates]))
        prior = torch.from_numpy(np.float32(self.mixture.candidates[0].offset))

        def run(array: np.ndarray) -> torch.Tensor:
            with torch.inference_mode():
                x = torch.from_numpy(array)
                logits = torch.stack([module(x) for module in modules], dim=1)
                pooled = torch.nn.functional.avg_pool2d(x, kernel).flatten(1)
                scores = torch.relu(pooled @ w1.T + b1) @ w2.T + b2
                energy = ((torch.logsumexp(logits, 2) - 2.3) / 0.3).clip(-3, 3)
                scores = scores + weights + 0.5 * energy
                if self.n_experts > 2:
                    dropped = scores[:, 1:].argsort(dim=1, descending=True)[:, 2:] + 1
                    scores = scores.scatter(1, dropped, -torch.inf)
                alpha = torch.softmax(scores, 1)
                return (alpha[:, :, None] * torch.softmax(logits / 1.4 + 0.5 * prior, 2)).sum(1)

        return run

    def _gate(self) -> bytes:
        graph, n_features, m = Graph(), count_gate_features(self.task.input_shape), self.n_experts + 1
        hidden = graph.op("Gemm", INPUT, graph.add_array("a", np.ones((n_features, 16), np.float32)))
        graph.op("Gemm", graph.op("Relu", hidden), graph.add_array("b", np.ones((16, m), np.float32)), out="s")
        return graph.encode((n_features,), {"s": (m,)}, [onnx.helper.make_opsetid("", OPSET)])


# ------------------------------------------------------------------------------------------------- latency


def call_times(call: Callable[[], object], repeats: int) -> list[float]:
    """Processor time of each call in ms."""
    times = [time.thread_time()]
    for _ in range(repeats):
        call()
        times.append(time.thread_time())
    return (np.diff(times) * 1000).tolist()


def time_rounds(calls: dict[str, Callable[[], object]], rounds: int, repeats: int = 0) -> list[dict[str, list[float]]]:
    """Processor times of every call, in turn, after a few to warm up; `repeats` of 0: as many as fit the budget."""
    for call in calls.values():
        call_times(call, 3)
    repeats = repeats or max(5, int(BUDGET_MS / max(median(call_times(calls["floor"], 5)), 1e-3)))
    return [{key: call_times(call, repeats) for key, call in calls.items()} for _ in range(rounds)]


def ratio_of_kind(subject: Subject, rounds: int) -> dict[str, object]:
    """One sample of a kind of problem: the fused graph against the networks and the gate alone."""
    fused, floor = deploy.load(subject.folder)._engine.run, subject.floor()  # noqa: SLF001 - without preprocessing
    x = np.random.default_rng(0).random((1, *subject.task.input_shape), dtype=np.float32)
    found = time_rounds({"floor": lambda: floor(x), "fused": lambda: fused(x)}, rounds)
    return {
        "kind": subject.name, "floor_ms": median(t for times in found for t in times["floor"]),
        "fused_ratio": median(median(times["fused"]) / median(times["floor"]) for times in found),
    }  # fmt: skip


def latencies(subject: Subject, batch: int, rounds: int) -> dict[str, object]:
    """Median and p99 of every variant, and its ratio to the floor and to the fused graph."""
    runtime, apart = (deploy.load(subject.folder, engine=engine) for engine in ("fused", "separate"))
    x = np.random.default_rng(0).random((batch, *subject.task.input_shape), dtype=np.float32)
    graph, separate = runtime._engine.run, apart._engine.run  # noqa: SLF001 - the engines alone, without preprocessing
    floor, eager = subject.floor(), subject.eager()
    variants: dict[str, Callable[[], object]] = {
        "floor": lambda: floor(x),
        "fused": lambda: graph(x),
        "separate": lambda: separate(x),
        "predict": lambda: runtime.predict(x),
        "torch": lambda: eager(x),
    }
    difference = float(np.abs(runtime.predict_inputs(x).probabilities - eager(x).numpy()).max())
    rounds_of = time_rounds(variants, rounds, 2 if subject.name == "rn18" else 0)
    row: dict[str, object] = {"network": subject.name, "experts": subject.n_experts, "batch": batch}
    for key in variants:
        everything = [t for times in rounds_of for t in times[key]]
        row[f"{key}_ms"], row[f"{key}_p99_ms"] = float(np.median(everything)), float(np.percentile(everything, 99))
        row[f"{key}_ratio"] = median(median(times[key]) / median(times["floor"]) for times in rounds_of)
        row[f"{key}_to_fused"] = median(median(times[key]) / median(times["fused"]) for times in rounds_of)
    return row | {"max_dp_torch": difference}


# ------------------------------------------------------------------------------------------------- load and memory

_CHILD = """
import json, sys, time
def memory():
    fields = dict(line.split(":", 1) for line in open("/proc/self/status") if ":" in line)
    return {key: int(fields[key].split()[0]) / 1024 for key in ("VmRSS", "VmHWM")}
begin = time.process_time()
"""
_LOAD = """
import numpy as np, onnxruntime
from pathlib import Path
from fedge.bundle.runtime import make_session_options
graph, folder, shape = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
data = open(graph, "rb").read() if graph.endswith(".bytes") else graph
before, begin = memory()["VmRSS"], time.process_time()
session = onnxruntime.InferenceSession(data, make_session_options(Path(folder), 1), providers=["CPUExecutionProvider"])
load_ms, added = (time.process_time() - begin) * 1000, memory()["VmRSS"] - before
x = np.ones([1, *shape], np.float32)
for _ in range(200):
    session.run(None, {"x": x})
print(json.dumps({"load_ms": load_ms, "added_mb": added, "peak_mb": memory()["VmHWM"]}))
"""


def child(code: str, *arguments: str, times: int = 3) -> dict[str, float]:
    """The medians of what a process of its own prints."""
    root = str(Path(__file__).parent.parent)
    environment = {**os.environ, "PYTHONPATH": root, "OMP_NUM_THREADS": "1"}
    found = []
    for _ in range(times):
        command = [sys.executable, "-c", _CHILD + code, *arguments]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
        found.append(json.loads(done.stdout))
    return {key: median(one[key] for one in found) for key in found[0]}


def skeleton_against_file(subject: Subject, times: int, rounds: int) -> dict[str, object]:
    """Loading the skeleton with its parts against one file that holds everything; their runs and results.

    Loading is measured in processes in turn, a ratio is the median over the pairs; running in this process.
    """
    with tempfile.TemporaryDirectory() as folder:
        file, graph = Path(folder) / "fused.onnx", Path(folder) / "skeleton.bytes"
        subject.fused_file(file)
        graph.write_bytes(read_bundle(subject.folder).graph)
        shape = json.dumps(subject.task.input_shape)
        pairs = [
            (
                child(_LOAD, str(file), folder, shape, times=1),
                child(_LOAD, str(graph), str(subject.folder), shape, times=1),
            )
            for _ in range(times)
        ]
        whole = make_session(file.read_bytes(), Path())
        parts = deploy.load(subject.folder)._engine.run  # noqa: SLF001 - without preprocessing
    x = np.random.default_rng(1).random((8, *subject.task.input_shape), dtype=np.float32)
    difference = float(np.abs(whole.run(None, {INPUT: x})[0] - parts(x)[0]).max())
    one = x[:1]
    ratios = []
    for _ in range(rounds):
        of_file, of_parts = call_times(lambda: whole.run(None, {INPUT: one}), 50), call_times(lambda: parts(one), 50)
        ratios.append(median(of_parts) / median(of_file))
    return {
        "network": subject.name, "experts": subject.n_experts,
        "file": {key: median(pair[0][key] for pair in pairs) for key in pairs[0][0]},
        "skeleton": {key: median(pair[1][key] for pair in pairs) for key in pairs[0][1]},
        "load_ratio": median(pair[1]["load_ms"] / pair[0]["load_ms"] for pair in pairs),
        "added_ratio": median(pair[1]["added_mb"] / pair[0]["added_mb"] for pair in pairs),
        "run_ratio": median(ratios), "max_dp": difference,
    }  # fmt: skip


def update_share(subject: Subject) -> float:
    """Bytes that an update of one expert sends, in shares of a fair part of all weights: 1 is perfect."""
    manifest = read_bundle(subject.folder).manifest
    sent = manifest.candidates[-1].part.size_bytes
    everything = sum(candidate.part.size_bytes for candidate in manifest.candidates)
    return sent / (everything / len(manifest.candidates))


_IMPORT = """
import {module}
print(json.dumps({{"cpu_s": time.process_time() - begin, "peak_mb": memory()["VmHWM"]}}))
"""
_DEPENDENCIES = """
import numpy, deploy
runtime = deploy.load(sys.argv[1])
runtime.predict(numpy.zeros(runtime.task.input_shape))
site = {name.split(".")[0] for name, module in list(sys.modules.items())
        if "site-packages" in (getattr(module, "__file__", "") or "")}
print(json.dumps(sorted(site)))
"""


def imports(subject: Subject, times: int) -> dict[str, object]:
    """What `import deploy` costs beside `import torch`, and which distributions a prediction needs."""
    ours, torchs = (child(_IMPORT.format(module=module), times=times) for module in ("deploy", "torch"))
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parent.parent)}
    command = [sys.executable, "-c", "import json, sys\n" + _DEPENDENCIES, str(subject.folder)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    imported = [name for name in json.loads(done.stdout) if not name.startswith("_")]
    return {
        "deploy": ours, "torch": torchs, "cpu_ratio": ours["cpu_s"] / torchs["cpu_s"], "imported": imported,
    }  # fmt: skip


# ------------------------------------------------------------------------------------------------- where time goes


def profile(subject: Subject, batch: int, runs: int = 200) -> dict[str, object]:
    """Shares of a prediction's processor time: preprocessing, the graph by kind of node, the rest of Python."""
    runtime = deploy.load(subject.folder)
    x = np.random.default_rng(0).random((batch, *subject.task.input_shape), dtype=np.float32)
    raw = x.astype(np.float64)
    graph = runtime._engine.run  # noqa: SLF001
    inputs = preprocess(subject.task, raw)
    whole = median(call_times(lambda: runtime.predict(raw), runs))
    prepared = median(call_times(lambda: preprocess(subject.task, runtime.add_batch_axis(raw)), runs))
    run = median(call_times(lambda: graph(inputs), runs))
    kinds, outside = _node_times(subject, inputs, runs)
    total = sum(kinds.values())
    return {
        "network": subject.name, "experts": subject.n_experts, "batch": batch, "predict_ms": whole,
        "preprocessing": prepared / whole, "graph": run / whole,
        "python": max(0.0, 1 - (prepared + run) / whole),
        "nodes": {kind: t / total for kind, t in sorted(kinds.items(), key=lambda item: -item[1])},
        "outside_the_candidates": outside / total,
    }  # fmt: skip


def _node_times(subject: Subject, x: np.ndarray, runs: int) -> tuple[dict[str, float], float]:
    """ONNX Runtime's own profile: time by operator, and that of all nodes that belong to no candidate."""
    bundle = read_bundle(subject.folder)
    options = make_session_options(bundle.folder, 1)
    options.enable_profiling = True
    with tempfile.TemporaryDirectory() as folder:
        options.profile_file_prefix = str(Path(folder) / "profile")
        profiled = onnxruntime.InferenceSession(bundle.graph, options, providers=["CPUExecutionProvider"])
        for _ in range(runs):
            profiled.run(None, {INPUT: x})
        events = json.loads(Path(profiled.end_profiling()).read_text())
    kinds: dict[str, float] = defaultdict(float)
    outside = 0.0
    for event in events:
        if event.get("cat") == "Node" and event["name"].endswith("_kernel_time"):
            kinds[event["args"]["op_name"]] += event["dur"]
            of_fusion = ":" in event["name"]  # how the exporter names what it adds to the candidates
            outside += event["dur"] if of_fusion else 0.0
    return dict(kinds), outside


# ------------------------------------------------------------------------------------------------- targets


def worst(rows: Sequence[dict], key: str, batches: Sequence[int], *, largest: bool = True) -> float:
    values = [row[key] for row in rows if row["batch"] in batches]
    return (max if largest else min)(values)


def targets(rows: list[dict], loads: list[dict], importing: dict, singles: list[float], updates: list[float]) -> list:
    rows = [row for row in rows if row["network"] != "mlp"]
    small, large = ([r for r in rows if (r["network"] == "rn18") is is_large] for is_large in (False, True))
    found = [
        Target("fused / floor, batch 1", worst(rows, "fused_ratio", [1]), 1.05),
        Target("fused / floor, batch 8 and 64", worst(rows, "fused_ratio", [8, 64]), 1.03),
        Target("separate / floor, batch 1", worst(rows, "separate_ratio", [1]), 1.20),
        Target("separate / floor, batch 8", worst(rows, "separate_ratio", [8]), 1.10),
        Target("separate / floor, batch 64", worst(rows, "separate_ratio", [64]), 1.03),
        Target("torch eager / fused, batch 1", worst(small, "torch_to_fused", [1], largest=False), 3, at_least=True),
    ]
    if large:
        slowest = worst(large, "torch_to_fused", [1], largest=False)
        found.append(Target("torch eager / fused, batch 1, ResNet-18", slowest, 2, at_least=True))
    found += [
        Target("max |dp|, fused to torch", max(row["max_dp_torch"] for row in rows), 1e-6),
        Target("max |d logit|, a single network to torch", max(singles), 5e-6),
        Target("skeleton / one file: processor time of loading", max(r["load_ratio"] for r in loads), 0.8),
        Target("skeleton / one file: memory added by loading", max(r["added_ratio"] for r in loads), 0.9),
        Target("skeleton / one file: time of a run", max(r["run_ratio"] for r in loads), 1.05),
        Target("skeleton / one file: max |dp|", max(r["max_dp"] for r in loads), 0.0),
        Target("bytes of an update of one expert x (J + 1) / all weights", max(updates), 1.02),
        Target("import deploy: MB", importing["deploy"]["peak_mb"], 50),
        Target("import deploy / import torch: processor time", importing["cpu_ratio"], 0.15),
        Target("distributions imported beside numpy, onnxruntime and msgspec", len(_more(importing)), 0),
    ]
    return found


def _more(importing: dict) -> set[str]:
    return set(importing["imported"]) - {"numpy", "onnxruntime", "msgspec", "typing_extensions"}  # msgspec's


def logit_difference(subject: Subject) -> float:
    x = np.random.default_rng(2).random((64, *subject.task.input_shape), dtype=np.float32)
    found = make_session(subject.single(0), Path()).run(None, {INPUT: x})[0]
    return float(np.abs(found - compute_logits(subject.task, subject.layout, subject.models[:1], x)[0]).max())


# ------------------------------------------------------------------------------------------------- main


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--quick", action="store_true", help="one network, to see that it runs")
    parser.add_argument("--large", action="store_true", help="a ResNet-18, too")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    names = ["cnn28"] if arguments.quick else ["cnn28", "cnn32", *(["rn18"] if arguments.large else []), "mlp"]
    rounds, times = (2, 1) if arguments.quick else (arguments.rounds, 5)
    rows, loads, profiles, singles, updates = [], [], [], [], []
    with tempfile.TemporaryDirectory() as folder:
        for name in names:
            for n_experts in (1, 4) if arguments.quick else EXPERTS[: 3 if name == "rn18" else 4]:
                subject = Subject(name, n_experts, Path(folder) / f"{name}-{n_experts}")
                for batch in BATCHES[: 2 if name == "rn18" else 3]:
                    rows.append(latencies(subject, batch, rounds))
                    show(rows[-1:])
                updates.append(update_share(subject))
                if n_experts in (4, 8) and name != "mlp":
                    loads.append(skeleton_against_file(subject, times, rounds))
                if n_experts == 4:
                    singles.append(logit_difference(subject))
                    profiles += [profile(subject, batch) for batch in (1, 8)]
        importing = imports(subject, times)
        kinds = [ratio_of_kind(Subject(name, 3, Path(folder) / name), rounds) for name in KINDS]
    show(kinds, "\nOne sample of every kind of problem, three experts")
    show(loads, "\nLoading: skeleton and parts against one file")
    show(profiles, "\nWhere the time of a prediction goes")
    print(f"\nA prediction imports: {', '.join(importing['imported'])}")
    reached = targets(rows, loads, importing, singles, updates)
    print("\nTargets (worst case over networks and numbers of experts)")
    print("\n".join(map(str, reached)))
    record = {
            "machine": platform.processor() or platform.machine(), "onnxruntime": onnxruntime.__version__,
            "latency": rows, "kinds": kinds, "load": loads, "profile": profiles, "import": importing,
            "targets": [asdict(target) | {"met": target.met} for target in reached],
        }  # fmt: skip
    finish(arguments, record)


if __name__ == "__main__":
    main()
