"""Checks that ONNX Runtime predicts the same as torch with the formula of `export.reference`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from export.mixture import Array, Mixture
from export.reference import gate_features, gate_scores, reference
from fedge.bundle import INPUT
from fedge.errors import UpdateRejected
from fedge.task import TaskSpec, gate_pool
from fedge.tensors import Layout, Model

TOLERANCE: Final = 1e-4
"""Largest difference of a probability with which a bundle is still written."""
MAX_SAMPLES: Final = 256


def samples(task: TaskSpec, validation: NDArray[np.floating]) -> NDArray[np.float32]:
    """Samples to compare on: at most 256 of the device's validation samples; without any, 8 random inputs."""
    if len(validation) == 0:
        return np.random.default_rng(0).random((8, *task.input_shape), dtype=np.float32)
    return np.ascontiguousarray(validation[:MAX_SAMPLES], np.float32)


def n_gate_features(task: TaskSpec) -> int:
    """F, the number of inputs of the gate."""
    return int(gate_features(np.zeros((1, *task.input_shape)), gate_pool(task.input_shape)).size)


def logits_of(task: TaskSpec, layout: Layout, models: Sequence[Model], x: NDArray[np.float32]) -> NDArray[np.float32]:
    """Logits of each model by torch, (M, n, C)."""
    import torch

    from fedge.models import build, load

    module = build(task).eval()
    logits = []
    with torch.inference_mode():
        for model in models:
            load(module, model, layout)
            logits.append(module(torch.from_numpy(x)).numpy())
    return np.stack(logits)


def features_of(task: TaskSpec, layout: Layout, model: Model, x: NDArray[np.float32]) -> tuple[Array, Array]:
    """Features (n, D) and logits (n, C) of a model by torch."""
    import torch

    from fedge.models import build, features_and_logits, load

    module = build(task).eval()
    load(module, model, layout)
    with torch.inference_mode():
        f, logits = features_and_logits(module, torch.from_numpy(x), layout)
    return f.numpy().astype(np.float64), logits.numpy().astype(np.float64)


def expected(task: TaskSpec, layout: Layout, mixture: Mixture, x: NDArray[np.float32]) -> tuple[Array, Array, Array]:
    """Probabilities, weights and energies by torch and the float64 formula."""
    logits = logits_of(task, layout, [c.model for c in mixture.candidates], x)
    scores = gate_scores(mixture.gate, gate_features(x, gate_pool(task.input_shape)))
    return reference(mixture, logits, scores)


def run(graph: bytes, folder: Path, x: NDArray[np.float32]) -> list[NDArray[np.float32]]:
    """The graph's three outputs by ONNX Runtime; its parts lie in `folder`."""
    from fedge.ort import session_of

    outputs: list[NDArray[np.float32]] = session_of(graph, folder).run(None, {INPUT: x})
    return outputs


def check(found: NDArray[np.floating], wanted: NDArray[np.floating]) -> float:
    """Largest difference between two arrays of probabilities.

    Raises:
        UpdateRejected: it exceeds `TOLERANCE`, or is NaN.
    """
    difference = float(np.abs(found - wanted).max())
    if not difference <= TOLERANCE:
        raise UpdateRejected(f"ONNX Runtime and torch disagree by {difference:.3g} in probability: no bundle written")
    return difference
