"""A bundle's graph with candidates in 8 bits: about a quarter of the memory, and faster on suitable processors.

The speed is measured where the graph is made, which should be the board that will predict.

The quantisation is static (QDQ). Activations are uint8 with ranges calibrated on the device's own validation samples;
weights are int8 per channel, from -64 to 64. An x86-64 without VNNI adds two 8-bit products in 16 bits, which saturate
at 32,767. Since 2 x 255 x 64 is 32,640, this graph gives the same sums on every processor (ONNX Runtime's documentation
of quantisation, `reduce_range`). Gate, fusion and each network's last layer stay in float32. Rounding logits would cost
ten times the error of all other layers together, and that layer is a negligible part of the work. The graph is
specific to one device and includes the weights, so bundles do not share it. The parts stay beside the graph for the
other engines and as its reference.
"""

from __future__ import annotations

import logging
import re
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import msgspec
import numpy as np
from msgspec import Meta, Struct
from numpy.typing import NDArray

from export.bundle import pack_bundle
from export.graph import embed_parts
from export.parity import run_graph
from fedge.bundle.manifest import INT8, MANIFEST, Bundle, Part, encode_manifest
from fedge.data.preprocessing import turn_images
from fedge.data.task import INPUT
from fedge.data.validation import Validation
from fedge.errors import ConfigError, UpdateRejected
from fedge.system.files import compute_digest, write_atomically
from fedge.system.logs import set_level
from fedge.wire.messages import NonNegative, Share

if TYPE_CHECKING:
    import onnx

MIN_SAMPLES: Final = 10
"""Least validation samples for a calibration."""
MAX_SAMPLES: Final = 256
"""Most samples on which activations are calibrated; this bounds time and memory."""
N_TIMED: Final = 100
"""Number of single samples on which both graphs are timed, in turns; the medians are compared."""
_OF_A_NETWORK: Final = re.compile(r"(c\d+|trunk)/")
_LAYERS: Final = frozenset({"Conv", "Gemm", "MatMul"})
_IN_FLOAT: Final = frozenset({"InstanceNormalization"})
"""Operators that stay in float32. Group normalisations are exported with this operator and share constants, which ONNX
Runtime's quantiser cannot take."""


class Int8Limits(Struct, frozen=True, kw_only=True):
    """Limits on how much worse and slower than float32 the 8-bit graph may be, on samples not used for calibration."""

    accuracy_drop: NonNegative = 0.02  # largest loss of personalised accuracy; needs labels
    agreement: Annotated[float, Meta(ge=0, le=1)] = 0.98  # share of samples whose predicted class stays the same
    latency_ratio: NonNegative = 1.0  # relative to float32's median for a single sample, on this machine


class Int8Report(Struct, frozen=True, kw_only=True):
    """The result of comparing the 8-bit graph with float32 on `n` samples; accuracies are None without labels.

    Latencies are medians over single samples, on one thread of this machine.
    """

    n: int
    accuracy: Share | None
    accuracy_int8: Share | None
    agreement: Share
    p99_difference: NonNegative
    latency_ms: NonNegative
    latency_int8_ms: NonNegative
    size_bytes: int


def quantise_bundle(
    bundle: Bundle, validation: Validation, target: Path, limits: Int8Limits | None = None
) -> Int8Report:
    """Write a copy of a bundle at `target` that engine int8 can run, too.

    Every other sample of `validation`, which holds at least 10 of the device's samples, is used for calibration. The
    others decide whether the bundle is written.

    Raises:
        ConfigError: answers are no classes that could be compared, there are too few samples, or `target` exists.
        UpdateRejected: the 8-bit graph predicts worse or takes longer than the limits allow, or cannot be run. Nothing
            is written.
        StoreError: the disk is full or broken.
    """
    problem = bundle.manifest.task.problem
    if not problem.CLASSED:
        raise ConfigError(
            f"8 bits are checked by the classes that they change, and {problem.NAME} has none: run engine fused"
        )
    if len(validation.x) < MIN_SAMPLES:
        raise ConfigError(
            f"there are {len(validation.x)} validation samples: 8 bits need at least {MIN_SAMPLES} of the device's own"
        )
    turned = turn_images(validation.x, bundle.manifest.quarters)
    validation = Validation(turned, validation.y, validation.sensitive)
    with pack_bundle(bundle, target) as copy, tempfile.TemporaryDirectory(prefix="fedge-int8-") as scratch:
        graph = _quantise_graph(embed_parts(bundle), validation.x[::2][:MAX_SAMPLES], Path(scratch))
        report = _evaluate_int8(bundle, graph, validation, limits or Int8Limits())
        write_atomically(copy / INT8, graph)
        write_atomically(copy / MANIFEST, _encode_manifest(bundle, graph, report))
    return report


def _encode_manifest(bundle: Bundle, graph: bytes, report: Int8Report) -> bytes:
    metrics = bundle.manifest.metrics | {"int8_agreement": report.agreement}
    if report.accuracy_int8 is not None:
        metrics["int8_validation_accuracy"] = report.accuracy_int8
    part = Part(digest=compute_digest(graph), size_bytes=len(graph))
    return encode_manifest(msgspec.structs.replace(bundle.manifest, int8=part, metrics=metrics))


def _quantise_graph(model: onnx.ModelProto, x: NDArray[np.float32], scratch: Path) -> bytes:
    """Quantise the graph's networks to 8 bits, except the nodes that compute the logits."""
    import onnx

    from fedge.bundle.runtime import onnxruntime

    # isort: split
    from onnxruntime.quantization import CalibrationDataReader, QuantFormat, QuantType, quantize_static  # noqa: TID251

    class Samples(CalibrationDataReader):  # type: ignore[misc] # untyped
        def __init__(self) -> None:
            self._rest: Iterator[NDArray[np.float32]] = iter(np.array_split(x, -(-len(x) // 16)))

        def get_next(self) -> dict[str, NDArray[np.float32]] | None:
            batch = next(self._rest, None)
            return None if batch is None else {INPUT: np.ascontiguousarray(batch)}

    # first fold what every machine folds, since a BatchNorm's output must not be rounded separately
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_BASIC
    options.optimized_model_filepath = str(scratch / "folded.onnx")
    options.log_severity_level = 3
    onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    folded = onnx.load(scratch / "folded.onnx")
    try:
        # the quantiser advises pre-processing on the root logger; channels of zeros have no range
        with set_level("", logging.ERROR), np.errstate(all="ignore"):
            quantize_static(
                folded,
                scratch / INT8,
                Samples(),
                quant_format=QuantFormat.QDQ,
                activation_type=QuantType.QUInt8,
                weight_type=QuantType.QInt8,
                per_channel=True,
                reduce_range=True,  # weights from -64 to 64
                nodes_to_quantize=_select_nodes(folded),
            )
    except (ValueError, RuntimeError) as error:
        raise UpdateRejected(f"ONNX Runtime cannot quantise this network ({error}): no bundle written") from error
    made = onnx.load(scratch / INT8)
    del made.metadata_props[:]
    made.producer_name = "fedge"
    data: bytes = made.SerializeToString(deterministic=True)
    return data


def _select_nodes(model: onnx.ModelProto) -> list[str]:
    """Return the nodes to quantise: those of the networks that can be, except each candidate's last layer."""
    names: list[str] = []
    last: dict[str, str] = {}
    for node in model.graph.node:
        network = _OF_A_NETWORK.match(node.name)
        if network and node.op_type not in _IN_FLOAT:
            names.append(node.name)
            if node.op_type in _LAYERS and network[1] != "trunk":
                last[network[1]] = node.name
    return [name for name in names if name not in last.values()]


def _evaluate_int8(bundle: Bundle, graph: bytes, validation: Validation, limits: Int8Limits) -> Int8Report:
    """Compare the 8-bit graph with float32 on the samples not used for calibration."""
    x = np.ascontiguousarray(validation.x[1::2])
    y = None if validation.y is None else validation.y[1::2]
    wanted = run_graph(bundle.graph, bundle.folder, x)[0]
    found = run_graph(graph, bundle.folder, x)[0]
    classes, classes_int8 = wanted.argmax(axis=1), found.argmax(axis=1)
    latency_ms, latency_int8_ms = _measure_latencies_ms((bundle.graph, graph), bundle.folder, x)
    report = Int8Report(
        n=len(x),
        accuracy=None if y is None else float((classes == y).mean()),
        accuracy_int8=None if y is None else float((classes_int8 == y).mean()),
        agreement=float((classes == classes_int8).mean()),
        p99_difference=float(np.percentile(np.abs(found - wanted).max(axis=1), 99)),
        latency_ms=latency_ms,
        latency_int8_ms=latency_int8_ms,
        size_bytes=len(graph),
    )
    if not np.isfinite(found).all():
        raise UpdateRejected("8 bits give probabilities that are not finite: no bundle written")
    if report.agreement < limits.agreement:
        raise UpdateRejected(
            f"8 bits agree with float32 on {report.agreement:.3f} of {report.n} samples, "
            f"at least {limits.agreement:.3f} is asked for: no bundle written"
        )
    if report.accuracy is not None and report.accuracy_int8 is not None:
        drop = report.accuracy - report.accuracy_int8
        if drop > limits.accuracy_drop:
            raise UpdateRejected(
                f"8 bits take the accuracy on {report.n} samples from {report.accuracy:.3f} to "
                f"{report.accuracy_int8:.3f}, at most {limits.accuracy_drop:.3f} less is allowed: no bundle written"
            )
    if latency_int8_ms > limits.latency_ratio * latency_ms:
        raise UpdateRejected(
            f"8 bits take {latency_int8_ms:.3f} ms for a sample on this machine, float32 {latency_ms:.3f} ms: no "
            "bundle written; float32 is the better one here, unless memory is short (--int8-latency-ratio)"
        )
    return report


def _measure_latencies_ms(graphs: tuple[bytes, ...], folder: Path, x: NDArray[np.float32]) -> list[float]:
    """Measure the median latency of single samples for each graph, in ms; the graphs take turns."""
    from fedge.bundle.runtime import make_session

    sessions = [make_session(graph, folder) for graph in graphs]
    taken: list[list[float]] = [[] for _ in graphs]
    for i in range(-len(x[:10]), N_TIMED):  # negative: warm-up
        sample = {INPUT: x[i % len(x)][np.newaxis]}
        for session, times in zip(sessions, taken, strict=True):
            begin = time.perf_counter()
            session.run(None, sample)
            if i >= 0:
                times.append(1000 * (time.perf_counter() - begin))
    return [float(np.median(times)) for times in taken]
