"""Checks that ONNX Runtime answers as torch does with the problem's formulas in float64."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Final

import numpy as np
from numpy.typing import NDArray

from export.graph import make_gate_tensors
from export.mixture import Mixture
from fedge.bundle.formula import (
    LOWEST,
    MIN_ENERGY_STD,
    Formula,
    compute_gate_inputs,
    compute_gate_scores,
    compute_log_weights,
    drop_experts,
    fuse,
    prepare_formula,
    softmax,
)
from fedge.data.problems.maths import Array, Floats
from fedge.data.task import INPUT, TaskSpec
from fedge.errors import UpdateRejected
from fedge.tensors.layout import Layout, Model

if TYPE_CHECKING:
    import torch

TOLERANCE: Final = 1e-4
"""Largest difference of an answer up to which a bundle is written."""
LEVEL: Final = 1e-5
"""Relative error of a score by rounding; of scores that are no further apart, either may win a choice."""
MAX_SAMPLES: Final = 256


def select_rows(n: int) -> NDArray[np.int64]:
    """Return at most 256 of the numbers 0 to n - 1, evenly spaced, since samples may be in order of their classes."""
    return np.linspace(0, n - 1, min(n, MAX_SAMPLES)).astype(np.int64)


def select_samples(task: TaskSpec, validation: Floats) -> NDArray[np.float32]:
    """Return the samples to compare on: validation samples of `select_rows` or, without any, 8 random inputs."""
    if len(validation) == 0:
        return np.random.default_rng(0).random((8, *task.input_shape), dtype=np.float32)
    return np.ascontiguousarray(validation[select_rows(len(validation))], np.float32)


def favour_routes(module: torch.nn.Module, lean: float) -> AbstractContextManager[None]:
    """Make a network's routers (submodules `router`) favour later (1) or earlier (-1) routes by about rounding."""
    import torch

    from fedge.models.network import listen_to_layers

    def on_scores(_module: torch.nn.Module, _inputs: object, scores: torch.Tensor) -> torch.Tensor:
        return scores + lean * LEVEL * (1 + scores.abs().amax(-1, keepdim=True)) * torch.arange(scores.shape[-1])

    routers = [router for name, router in module.named_modules() if name.rpartition(".")[2] == "router"]
    return listen_to_layers(routers if lean else [], on_scores)


def compute_logits(
    task: TaskSpec, layout: Layout, models: Sequence[Model], x: NDArray[np.float32], lean: float = 0
) -> NDArray[np.float32]:
    """Compute the logits of each model with torch, (M, n, C); for `lean` see `favour_routes`."""
    import torch

    from fedge.models.build import make_network
    from fedge.models.network import load_model

    module = make_network(task).eval()
    logits = []
    with torch.inference_mode(), favour_routes(module, lean):
        for model in models:
            load_model(module, model, layout)
            logits.append(module(torch.from_numpy(x)).numpy())
    return np.stack(logits)


def compute_features(
    task: TaskSpec, layout: Layout, model: Model, x: NDArray[np.float32], lean: float = 0
) -> tuple[Array, Array]:
    """Compute features (n, D) and logits (n, C) of a model with torch; for `lean` see `favour_routes`."""
    import torch

    from fedge.models.build import make_network
    from fedge.models.network import compute_features_and_logits, load_model

    module = make_network(task).eval()
    load_model(module, model, layout)
    with torch.inference_mode(), favour_routes(module, lean):
        f, logits = compute_features_and_logits(module, torch.from_numpy(x), layout)
    return f.numpy().astype(np.float64), logits.numpy().astype(np.float64)


def make_formula(task: TaskSpec, mixture: Mixture) -> Formula:
    """Return the formula of a mixture in float64, if the problem has one (`Problem.APART`)."""
    return prepare_formula(make_gate_tensors(task, mixture, np.float64), mixture.experts, mixture.top)


def compute_expected(
    task: TaskSpec,
    layout: Layout,
    mixture: Mixture,
    x: NDArray[np.float32],
    found: Sequence[Floats] = (),
    lean: float = 0,
) -> list[Floats]:
    """Compute answers, weights and energies with torch, and in float64 with the formula that engines use, if any.

    For problems without one the problem's own formulas take its place (`mix_outputs`).

    If `lean` is not 0, routers favour routes (`favour_routes`), and the candidates that have a weight in `found`, the
    graph's outputs, are favoured by as much as rounding, too.
    """
    outputs = compute_logits(task, layout, [c.model for c in mixture.candidates], x, lean).astype(np.float64)
    favour = compute_favour(found[-2], np.nan_to_num(found[-1])) if lean else 0.0
    if not task.problem.APART:
        return mix_outputs(task, mixture, outputs, x.astype(np.float64), favour)
    how = make_formula(task, mixture)
    return fuse(how, list(outputs), compute_gate_scores(how, x.astype(np.float64)) + favour)


def mix_outputs(
    task: TaskSpec, mixture: Mixture, outputs: Floats, x: Floats, favour: Array | float = 0.0
) -> list[Floats]:
    """Mix the outputs (M, n, ...) of all candidates for inputs (n, *input_shape): answers, weights and energies.

    `favour`, (n, M), is added to the candidates' scores.
    """
    problem, candidates, gate = task.problem, mixture.candidates, mixture.gate
    reduced = [problem.reduce_outputs(each, x) for each in outputs]
    index = [*range(len(candidates)), mixture.guard.candidate if mixture.guard else 0]
    rows = zip(index, mixture.calibrations, mixture.offsets, strict=True)
    components = [problem.calibrate(reduced[k], how, offset) for k, how, offset in rows]
    raw = np.stack([problem.compute_energies(r, a) for r, a in zip(reduced, components, strict=False)], axis=1)
    mean, std = (np.array([getattr(c, name) for c in candidates]) for name in ("energy_mean", "energy_std"))
    energies = (raw - mean) / np.maximum(std, MIN_ENERGY_STD)
    inputs = compute_gate_inputs(x, gate.convolutions, np.shape(gate.hidden_weight)[1])
    hidden = np.maximum(inputs @ gate.hidden_weight.T + gate.hidden_bias, 0)
    own = compute_log_weights(np.array([c.weight for c in candidates]))
    scores = hidden @ gate.out_weight.T + gate.out_bias + own + favour
    with np.errstate(invalid="ignore"):
        scores += mixture.beta * np.clip(energies, -mixture.energy_clip, mixture.energy_clip)
        usable = np.isfinite(outputs.reshape(*outputs.shape[:2], -1).sum(axis=2)).T & np.isfinite(scores)
    scores, energies = np.where(usable, scores, LOWEST), np.where(usable, energies, np.nan)
    if len(mixture.experts) > mixture.top:
        drop_experts(scores, np.array(mixture.experts), mixture.top)
    alpha = np.where(usable, softmax(scores), 0.0)
    g = 0.5 * usable[:, [mixture.guard.candidate]] if mixture.guard else np.zeros((len(x), 1))
    return [*problem.mix(components, np.concatenate([(1 - g) * alpha, g], axis=1)), alpha, energies]


def compute_favour(weights: Floats, scores: Floats) -> Array:
    """Return what rounding may add to scores (n, M): a small number for candidates with a weight, 0 for others."""
    return np.where(weights > 0, LEVEL * (1 + np.abs(scores).max(axis=1, keepdims=True)), 0.0)


def run_graph(graph: bytes, folder: Path, x: NDArray[np.float32]) -> list[NDArray[np.float32]]:
    """Run a graph, whose parts are in `folder`, with ONNX Runtime, and return its outputs."""
    from fedge.bundle.runtime import make_session

    outputs: list[NDArray[np.float32]] = make_session(graph, folder).run(None, {INPUT: x})
    return outputs


def compute_difference(found: Floats, wanted: Callable[[float], Floats]) -> float:
    """Return the largest difference between values (n, C) of two computations, n >= 1, relative to values above 1.

    Where a route or an expert wins by less than rounding, both winners are right. So a sample that differs from
    `wanted(0)` may equal `wanted(1)` or `wanted(-1)`, which favour one of those that are level.
    """
    each = _compare(found, wanted(0))
    for lean in (1, -1):
        if not each.max() <= TOLERANCE:
            each = np.minimum(each, _compare(found, wanted(lean)))  # NaN stays
    return float(each.max())


def _compare(found: Floats, wanted: Floats) -> Floats:
    """Return the largest difference of each sample, (n,)."""
    return np.asarray((np.abs(found - wanted) / np.maximum(1, np.abs(wanted))).max(axis=1))


def require_parity(found: Floats, wanted: Callable[[float], Floats]) -> float:
    """Require two computations of answers to agree, and return their `compute_difference`.

    Raises:
        UpdateRejected: the difference exceeds `TOLERANCE`, or is NaN.
    """
    largest = compute_difference(found, wanted)
    if not largest <= TOLERANCE:
        raise UpdateRejected(f"ONNX Runtime and torch disagree by {largest:.3g}: no bundle written")
    return largest
