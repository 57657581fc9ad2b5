"""A bundle at work: one ONNX Runtime call runs gate, all candidates and the fusion."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
from numpy.typing import NDArray

from fedge.bundle import INPUT, OUTPUTS, Bundle, Manifest, Reference, read
from fedge.energies import free_energy
from fedge.errors import ConfigError, UpdateRejected
from fedge.preprocess import apply
from fedge.task import TaskSpec

Floats = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Prediction:
    """What a bundle says of n samples, in their order.

    Attributes:
        class_index: (n,) int64, the most probable class; the first on a tie.
        class_name: the same by name.
        probabilities: (n, C), rows sum to 1.
        weights: (n, M), share of each candidate in the mixture, 0 for one that was dropped; see the manifest's guard
            for what is added to it.
        energies: (n, M), logsumexp of each candidate's logits, standardised by its validation samples; NaN for a
            candidate whose output was not finite.
        latency_ms: wall time of preprocessing and graph together, for all n samples.
        outlier_above: free energy above which a sample is flagged, inf where the bundle has no reference.
    """

    class_index: NDArray[np.int64]
    class_name: tuple[str, ...]
    probabilities: Floats
    weights: Floats
    energies: Floats
    latency_ms: float
    outlier_above: float = math.inf

    @property
    def outlier(self) -> NDArray[np.bool_]:
        """(n,) whether a sample is unlike those that the bundle was made with; a sample without free energy is."""
        flagged: NDArray[np.bool_] = ~(free_energy(self.weights, self.energies) <= self.outlier_above)
        return flagged

    def rows(self, start: int, stop: int) -> Prediction:
        """What is said of the samples in [start, stop) alone; `latency_ms` is still that of all."""
        return replace(
            self,
            class_index=self.class_index[start:stop],
            class_name=self.class_name[start:stop],
            probabilities=self.probabilities[start:stop],
            weights=self.weights[start:stop],
            energies=self.energies[start:stop],
        )


class Runtime:
    """A verified bundle, loaded. Safe to share between threads."""

    def __init__(self, bundle: Bundle, threads: int | None = None) -> None:
        """Load the graph; `threads` None: one, which is best for single samples and leaves the device its other cores.

        Raises:
            UpdateRejected: ONNX Runtime cannot run the graph, or its outputs are not those of the manifest.
        """
        self.manifest: Manifest = bundle.manifest
        self.digest = bundle.digest
        reference = bundle.manifest.reference
        self._outlier_above = reference.outlier_above if isinstance(reference, Reference) else math.inf
        try:
            self._session = onnxruntime.InferenceSession(
                bundle.graph, session_options(bundle.folder, threads or 1), providers=["CPUExecutionProvider"]
            )
            outputs = self._run(np.zeros((1, *self.task.input_shape), np.float32))
        except Exception as error:  # ONNX Runtime's own tree starts here
            raise UpdateRejected(f"ONNX Runtime cannot run {bundle.folder}: {error}") from error
        sizes = (self.task.n_classes, len(self.manifest.candidates), len(self.manifest.candidates))
        if [output.shape for output in outputs] != [(1, size) for size in sizes]:
            raise UpdateRejected(f"{bundle.folder}: the graph's outputs are not those of the manifest")

    @property
    def task(self) -> TaskSpec:
        """What the bundle is for: classes, input shape and preprocessing."""
        return self.manifest.task

    def predict(self, x: NDArray[Any]) -> Prediction:
        """Predict one raw sample or a batch of them, such as `fedge.preprocess.apply` takes.

        Raises:
            ConfigError: the samples have another shape than the task's.
        """
        begin = time.perf_counter()
        return self._predicted(apply(self.task, self.as_batch(x)), begin)

    def predict_inputs(self, x: Floats) -> Prediction:
        """Predict model inputs, (n, *input_shape) float32: samples that have been preprocessed already."""
        return self._predicted(x, time.perf_counter())

    def _predicted(self, x: Floats, begin: float) -> Prediction:
        probabilities, weights, energies = self._run(x)
        index = probabilities.argmax(axis=1).astype(np.int64)
        return Prediction(
            class_index=index,
            class_name=tuple(self.task.classes[i] for i in index),
            probabilities=probabilities,
            weights=weights,
            energies=energies,
            latency_ms=(time.perf_counter() - begin) * 1000,
            outlier_above=self._outlier_above,
        )

    def as_batch(self, x: NDArray[Any]) -> NDArray[Any]:
        """Raw samples with a first axis that counts them: (1, ...) for one sample, a batch as it is.

        One sample has the model's input shape, or is an image with its channels last or, if grey, without channels.
        """
        raw, shape = np.asarray(x), self.task.input_shape
        single = {shape}
        if len(shape) == 3:
            single |= {(*shape[1:], shape[0])} | ({shape[1:]} if shape[0] == 1 else set())
        return raw[np.newaxis] if raw.shape in single else raw

    def _run(self, x: Floats) -> list[Floats]:
        outputs: list[Floats] = self._session.run(OUTPUTS, {INPUT: x})
        return outputs


def load(path: Path | str, threads: int | None = None) -> Runtime:
    """Verify the bundle in a folder and make it ready to predict.

    Raises:
        ConfigError: there is no such folder, or `threads` is below 1.
        UpdateRejected: the bundle is not what its manifest says. ONNX Runtime has not seen any of it then.
    """
    folder = Path(path)
    if not folder.is_dir():
        raise ConfigError(f"no bundle at {folder}: name the folder that holds manifest.json")
    if threads is not None and threads < 1:
        raise ConfigError(f"threads must be at least 1, not {threads}")
    return Runtime(read(folder), threads)


def session_options(folder: Path, threads: int) -> onnxruntime.SessionOptions:
    """All optimisations (1.3 to 1.5 times faster than less), no spinning threads (battery, shared cores)."""
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_ALL
    options.execution_mode = onnxruntime.ExecutionMode.ORT_SEQUENTIAL
    options.intra_op_num_threads = threads
    options.log_severity_level = 3
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    options.add_session_config_entry("session.model_external_initializers_file_folder_path", str(folder))
    return options
