"""Cold start without torch: a profile by the shared gate, and a bundle from files (fedcoe.md section 7).

Nothing here needs more than ONNX Runtime, so a device that only predicts takes part with `InferenceWorker`.
"""

from __future__ import annotations

import re
import tempfile
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from edge_agent.outcome import FailedError, Fetch, Outcome, Stop, failed
from fedge.bundle import GRAPHS, INPUT, MANIFEST, Bundle, read
from fedge.errors import StoreError
from fedge.files import whole_folder, write_atomically
from fedge.messages import Declined, InstallBundle, Installed, Order, Route, Routed
from fedge.ort import onnxruntime
from fedge.task import TaskSpec

CHUNK: Final = 512
"""Samples per call of the gate: bounds the memory."""
_PART: Final = re.compile(r"[0-9a-f]{64}\.safetensors\Z")


class InferenceWorker:
    """The worker of a device that does not train.

    Args:
        device_id: for the texts of failures.
        task: what is predicted.
        x: (n, *input_shape) model inputs, without labels; they stay here. n may be 0.
        home: durable folder; `bundles` is the worker's.
    """

    def __init__(self, device_id: str, task: TaskSpec, x: NDArray[np.float32], home: Path) -> None:
        self.device_id = device_id
        self.task = task
        self.home = home
        self._x = x

    def execute(self, order: Order, fetch: Fetch, *, stop: Stop | None = None) -> Outcome:  # noqa: ARG002 - as Worker's
        """Carry out an order; `Declined` where it needs training, `Failed` where the order or its files are unfit.

        Raises:
            StoreError: the disk is full or broken.
        """
        try:
            match order.action:
                case Route() as action:
                    return Outcome(route(action, fetch, self._x), {})
                case InstallBundle() as action:
                    return Outcome(install_bundle(action, fetch, self.home, self.task), {})
                case _:
                    return Outcome(Declined(reason="this device does not train"), {})
        except StoreError:
            raise
        except Exception as error:  # noqa: BLE001 - as the Worker's
            return failed(self.device_id, error)


def route(action: Route, fetch: Fetch, x: NDArray[np.float32]) -> Routed:
    """Eq. 12: rho, the mean output of the gate over the samples (n, *input_shape); uniform without samples.

    Raises:
        FailedError: the file is no gate for such samples.
    """
    gate = fetch(action.gate)
    try:
        with tempfile.TemporaryDirectory(prefix="fedge-gate-") as nowhere:  # a gate that names files finds none
            session = _session(gate, Path(nowhere))
        n_experts = session.get_outputs()[0].shape[1]
        total = np.zeros(n_experts)
        for start in range(0, len(x), CHUNK):
            (p,) = session.run(None, {INPUT: x[start : start + CHUNK]})
            total += p.sum(axis=0, dtype=np.float64)
    except Exception as error:  # ONNX Runtime's own tree starts here
        raise FailedError(f"the gate cannot be run: {error}") from error
    if not len(x):
        return Routed(shares=(1 / n_experts,) * n_experts, n_samples=0)
    if not (np.isfinite(total).all() and total.sum() > 0):
        raise FailedError("the gate's output is not finite")
    return Routed(shares=tuple(float(share) for share in total / total.sum()), n_samples=len(x))


def install_bundle(action: InstallBundle, fetch: Fetch, home: Path, task: TaskSpec) -> Installed:
    """Put the files in place as HOME/bundles/RELEASE, after they were verified and the graph has run once.

    Raises:
        FailedError: a file has another name than those of a bundle, or the bundle is for another task or release.
        UpdateRejected: the files are not what their manifest says. What was installed before is untouched.
        StoreError: the disk is full or the folder cannot be written.
    """
    strange = [name for name in action.files if name not in {MANIFEST, *GRAPHS} and not _PART.match(name)]
    if strange:
        raise FailedError(f"{strange[0]!r} is no file of a bundle")
    folder = home / "bundles" / str(action.release)
    try:
        with whole_folder(folder) as unfinished:
            for name, ref in action.files.items():
                write_atomically(unfinished / name, fetch(ref))
            bundle = read(unfinished)
            _check(bundle, action, task)
    except OSError as error:
        raise StoreError(f"cannot write bundle {folder}: {error}") from error
    manifest = bundle.manifest
    return Installed(
        bundle_digest=bundle.digest,
        roles=tuple(candidate.role for candidate in manifest.candidates),
        max_abs_diff=manifest.max_abs_diff,
        guarded=manifest.fusion.guard is not None,
    )


def _check(bundle: Bundle, action: InstallBundle, task: TaskSpec) -> None:
    manifest = bundle.manifest
    if {MANIFEST, *manifest.files} != set(action.files):
        raise FailedError("there are files that the manifest does not name")
    if manifest.task.fingerprint() != task.fingerprint():
        raise FailedError(f"the bundle is for task {manifest.task.name} of another fingerprint")
    if manifest.release != action.release:
        raise FailedError(f"the bundle is release {manifest.release}, the order says {action.release}")
    sample = np.zeros((1, *task.input_shape), np.float32)
    try:
        outputs = _session(bundle.graph, bundle.folder).run(None, {INPUT: sample})
    except Exception as error:  # ONNX Runtime's own tree starts here
        raise FailedError(f"the bundle cannot be run: {error}") from error
    if outputs[0].shape != (1, task.n_classes):
        raise FailedError("the bundle's output is not that of the task")


def _session(graph: bytes, parts: Path) -> onnxruntime.InferenceSession:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    options.log_severity_level = 4  # a graph that cannot be run is reported by its exception
    options.add_session_config_entry("session.model_external_initializers_file_folder_path", str(parts))
    return onnxruntime.InferenceSession(graph, options, providers=["CPUExecutionProvider"])
