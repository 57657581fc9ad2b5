"""Cold start: which experts suit the device's samples, by the shared gate (fedcoe.md section 7). Needs no torch."""

from __future__ import annotations

import math
import tempfile
from pathlib import Path
from typing import Final

import numpy as np
from msgspec import UNSET

from edge_agent.device.device import Device, FailedError
from fedge.bundle.graph_reader import explain_unbounded
from fedge.bundle.runtime import make_session, onnxruntime
from fedge.data.task import INPUT
from fedge.errors import raise_as
from fedge.steps.contract import Declined, Result
from fedge.steps.descriptions.route import Route, Routed

CHUNK: Final = 512
"""Most samples in a call of the gate, to limit the memory."""


def run(device: Device, action: Route) -> Result:
    """Return rho (Eq. 12), the mean gate output over samples (n, *input_shape); uniform without samples.

    With `privacy` each output is taken less 1/K and clipped to sqrt(1 - 1/K), the norm of one that is sure. So a false
    gate, too, learns nothing without noise.

    Raises:
        FailedError: the file is not a gate for such samples, or might never end.
    """
    gate, (x, _) = device.fetch(action.gate), device.data.shared
    with raise_as(FailedError, "the gate cannot be run", on=Exception):  # ONNX Runtime's exception tree starts here
        session = _make_session(gate)
        n_experts = session.get_outputs()[0].shape[1]
        parts = (session.run(None, {INPUT: x[start : start + CHUNK]})[0] for start in range(0, len(x), CHUNK))
        p = np.concatenate([np.zeros((0, n_experts)), *parts], dtype=np.float64)
    if not len(x):
        return Routed(shares=(1 / n_experts,) * n_experts, n_samples=0)
    total = p.sum(axis=0)
    if action.privacy is not UNSET and n_experts > 1:
        from edge_agent.privacy.answers import take_noise  # with torch

        noise = take_noise(device, action.privacy, "training")
        if isinstance(noise, Declined):
            return noise
        total = np.maximum(len(p) / n_experts + noise.compute_sum(p - 1 / n_experts, math.sqrt(1 - 1 / n_experts)), 0)
        total = total if total.any() else np.ones(n_experts)
    if not (np.isfinite(total).all() and total.sum() > 0):
        raise FailedError("the gate's output is not finite")
    return Routed(shares=tuple(float(share) for share in total / total.sum()), n_samples=len(x))


def _make_session(gate: bytes) -> onnxruntime.InferenceSession:
    if reason := explain_unbounded(memoryview(gate)):
        raise FailedError(reason)
    with tempfile.TemporaryDirectory(prefix="fedge-gate-") as nowhere:  # a gate that refers to files finds none
        return make_session(gate, Path(nowhere))
