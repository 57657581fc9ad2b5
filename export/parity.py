"""Checks that ONNX Runtime predicts the same as torch with the formula of `fedge.bundle.formula` in float64."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Final

import numpy as np
from numpy.typing import NDArray

from export.graph import make_gate_tensors
from export.mixture import Mixture
from fedge.bundle.formula import Array, Floats, Formula, compute_gate_scores, fuse, prepare_formula
from fedge.data.task import INPUT, TaskSpec
from fedge.errors import UpdateRejected
from fedge.tensors.layout import Layout, Model

if TYPE_CHECKING:
    import torch

TOLERANCE: Final = 1e-4
"""Largest difference of a probability up to which a bundle is written."""
LEVEL: Final = 1e-5
"""Relative error of a score by rounding; of scores that are no further apart, either may win a choice."""
MAX_SAMPLES: Final = 256


def select_samples(task: TaskSpec, validation: Floats) -> NDArray[np.float32]:
    """Return the samples to compare on: at most 256 validation samples or, without any, 8 random inputs."""
    if len(validation) == 0:
        return np.random.default_rng(0).random((8, *task.input_shape), dtype=np.float32)
    return np.ascontiguousarray(validation[:MAX_SAMPLES], np.float32)


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


def make_formula(mixture: Mixture) -> Formula:
    """Return the mixture's formula in float64."""
    return prepare_formula(make_gate_tensors(mixture, np.float64), mixture.experts, mixture.top)


def compute_expected(
    task: TaskSpec,
    layout: Layout,
    mixture: Mixture,
    x: NDArray[np.float32],
    found: Sequence[Floats] = (),
    lean: float = 0,
) -> list[Floats]:
    """Compute probabilities, weights and energies with torch and the formula in float64.

    If `lean` is not 0, routers favour routes (`favour_routes`), and the candidates that have a weight in `found`, the
    graph's outputs, are favoured by as much as rounding, too.
    """
    how = make_formula(mixture)
    logits = compute_logits(task, layout, [c.model for c in mixture.candidates], x, lean).astype(np.float64)
    scores = compute_gate_scores(how, x.astype(np.float64))
    if lean:
        scores = scores + compute_favour(found[1], np.nan_to_num(found[2]))
    return fuse(how, list(logits), scores)


def compute_favour(weights: Floats, scores: Floats) -> Array:
    """Return what rounding may add to scores (n, M): a small number for candidates with a weight, 0 for others."""
    return np.where(weights > 0, LEVEL * (1 + np.abs(scores).max(axis=1, keepdims=True)), 0.0)


def run_graph(graph: bytes, folder: Path, x: NDArray[np.float32]) -> list[NDArray[np.float32]]:
    """Run a graph, whose parts are in `folder`, with ONNX Runtime, and return its outputs."""
    from fedge.bundle.runtime import make_session

    outputs: list[NDArray[np.float32]] = make_session(graph, folder).run(None, {INPUT: x})
    return outputs


def compute_difference(found: Floats, wanted: Callable[[float], Floats]) -> float:
    """Return the largest difference between values (n, C) of two computations, n >= 1.

    Where a route or an expert wins by less than rounding, both winners are right. So a sample that differs from
    `wanted(0)` may equal `wanted(1)` or `wanted(-1)`, which favour one of those that are level.
    """
    each = np.abs(found - wanted(0)).max(axis=1)
    for lean in (1, -1):
        if not each.max() <= TOLERANCE:
            each = np.minimum(each, np.abs(found - wanted(lean)).max(axis=1))  # NaN stays
    return float(each.max())


def require_parity(found: Floats, wanted: Callable[[float], Floats]) -> float:
    """Require two computations of probabilities to agree, and return their `compute_difference`.

    Raises:
        UpdateRejected: the difference exceeds `TOLERANCE`, or is NaN.
    """
    largest = compute_difference(found, wanted)
    if not largest <= TOLERANCE:
        raise UpdateRejected(f"ONNX Runtime and torch disagree by {largest:.3g} in probability: no bundle written")
    return largest
