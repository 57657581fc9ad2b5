"""Checks that ONNX Runtime predicts the same as torch with the formula of `fedge.bundle.formula` in float64."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Final

import numpy as np
from numpy.typing import NDArray

from export.graph import gate_tensors
from export.mixture import Mixture
from fedge.bundle.formula import Array, Floats, Formula, fuse, gate_scores, prepared
from fedge.data.task import INPUT, TaskSpec
from fedge.errors import UpdateRejected
from fedge.tensors.layout import Layout, Model

if TYPE_CHECKING:
    import torch

TOLERANCE: Final = 1e-4
"""Largest difference of a probability with which a bundle is still written."""
LEVEL: Final = 1e-5
"""Rounding may move a score by so much, relative to its size: scores no further apart may win a choice either way."""
MAX_SAMPLES: Final = 256


def samples(task: TaskSpec, validation: Floats) -> NDArray[np.float32]:
    """Samples to compare on: at most 256 of the device's validation samples; without any, 8 random inputs."""
    if len(validation) == 0:
        return np.random.default_rng(0).random((8, *task.input_shape), dtype=np.float32)
    return np.ascontiguousarray(validation[:MAX_SAMPLES], np.float32)


def leaning(module: torch.nn.Module, lean: float) -> AbstractContextManager[None]:
    """Routers inside a network (submodules named `router`) favour later routes (1) or earlier ones (-1) by rounding."""
    import torch

    from fedge.models.network import listening

    def favour(_module: torch.nn.Module, _inputs: object, scores: torch.Tensor) -> torch.Tensor:
        return scores + lean * LEVEL * (1 + scores.abs().amax(-1, keepdim=True)) * torch.arange(scores.shape[-1])

    routers = [router for name, router in module.named_modules() if name.rpartition(".")[2] == "router"]
    return listening(routers if lean else [], favour)


def logits_of(
    task: TaskSpec, layout: Layout, models: Sequence[Model], x: NDArray[np.float32], lean: float = 0
) -> NDArray[np.float32]:
    """Logits of each model by torch, (M, n, C). `lean`: see `leaning`."""
    import torch

    from fedge.models.build import build
    from fedge.models.network import load

    module = build(task).eval()
    logits = []
    with torch.inference_mode(), leaning(module, lean):
        for model in models:
            load(module, model, layout)
            logits.append(module(torch.from_numpy(x)).numpy())
    return np.stack(logits)


def features_of(
    task: TaskSpec, layout: Layout, model: Model, x: NDArray[np.float32], lean: float = 0
) -> tuple[Array, Array]:
    """Features (n, D) and logits (n, C) of a model by torch. `lean`: see `leaning`."""
    import torch

    from fedge.models.build import build
    from fedge.models.network import features_and_logits, load

    module = build(task).eval()
    load(module, model, layout)
    with torch.inference_mode(), leaning(module, lean):
        f, logits = features_and_logits(module, torch.from_numpy(x), layout)
    return f.numpy().astype(np.float64), logits.numpy().astype(np.float64)


def formula(mixture: Mixture) -> Formula:
    """The mixture's formula in float64."""
    return prepared(gate_tensors(mixture, np.float64), mixture.experts, mixture.top)


def expected(
    task: TaskSpec,
    layout: Layout,
    mixture: Mixture,
    x: NDArray[np.float32],
    found: Sequence[Floats] = (),
    lean: float = 0,
) -> list[Floats]:
    """Probabilities, weights and energies by torch and the formula in float64.

    `lean`: 0, or as `leaning` has it for routers; then the candidates that have a weight in `found`, the graph's
    outputs, are favoured by rounding, too.
    """
    how = formula(mixture)
    logits = logits_of(task, layout, [c.model for c in mixture.candidates], x, lean).astype(np.float64)
    scores = gate_scores(how, x.astype(np.float64))
    if lean:
        scores = scores + favour(found[1], np.nan_to_num(found[2]))
    return fuse(how, list(logits), scores)


def favour(weights: Floats, scores: Floats) -> Array:
    """What rounding may add to the scores, (n, M), of those that have a weight."""
    return np.where(weights > 0, LEVEL * (1 + np.abs(scores).max(axis=1, keepdims=True)), 0.0)


def run(graph: bytes, folder: Path, x: NDArray[np.float32]) -> list[NDArray[np.float32]]:
    """The graph's outputs by ONNX Runtime; its parts lie in `folder`."""
    from fedge.bundle.runtime import session_of

    outputs: list[NDArray[np.float32]] = session_of(graph, folder).run(None, {INPUT: x})
    return outputs


def difference(found: Floats, wanted: Callable[[float], Floats]) -> float:
    """Largest difference between the values (n, C) of two computations of n >= 1 samples.

    Where a route or an expert wins by less than rounding, both winners are right: a sample that is not as `wanted(0)`
    may be as `wanted(1)` or `wanted(-1)`, which favour one of those that are level.
    """
    each = np.abs(found - wanted(0)).max(axis=1)
    for lean in (1, -1):
        if not each.max() <= TOLERANCE:
            each = np.minimum(each, np.abs(found - wanted(lean)).max(axis=1))  # NaN stays
    return float(each.max())


def check(found: Floats, wanted: Callable[[float], Floats]) -> float:
    """The `difference` between two computations of probabilities.

    Raises:
        UpdateRejected: it exceeds `TOLERANCE`, or is NaN.
    """
    largest = difference(found, wanted)
    if not largest <= TOLERANCE:
        raise UpdateRejected(f"ONNX Runtime and torch disagree by {largest:.3g} in probability: no bundle written")
    return largest
