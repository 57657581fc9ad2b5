"""A network that returns given logits, and mixtures of such networks: worked numbers go through the real graph."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from edge_agent.learning.mixture import compute_mixture_likelihood, compute_shares
from export import Candidate, GateWeights, Guard, Mixture, write_bundle
from export.parity import make_formula, mix_outputs
from fedge.bundle.formula import Formula, compute_gate_scores
from fedge.bundle.manifest import Manifest
from fedge.data.problems.calibration import PLAIN, Calibration
from fedge.data.problems.classification import Classification
from fedge.data.problems.formulas import Answers
from fedge.data.task import TaskSpec
from fedge.tensors.layout import Layout, Model, TensorInfo
from fedge.wire.messages import Role


class Table(torch.nn.Module):
    """Input: the number of a sample. Output: its row of the table, so that a NaN in one row stays there."""

    def __init__(self, n_samples: int, n_classes: int) -> None:
        super().__init__()
        self.rows = torch.nn.Parameter(torch.zeros(n_samples, n_classes))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.rows[x[:, 0].long()]


def factory(task: TaskSpec) -> Table:
    return Table(int(task.model_options["n_samples"]), task.n_classes)


def task_of(n_samples: int, n_classes: int) -> TaskSpec:
    return TaskSpec(
        name="table",
        classes=tuple(f"class {c}" for c in range(n_classes)),
        input_shape=(1,),
        model="tests.support.tables:factory",
        model_options={"n_samples": n_samples},
    )


def inputs(n_samples: int) -> NDArray[np.float32]:
    return np.arange(n_samples, dtype=np.float32)[:, None]


def layout_of(logits: NDArray[Any]) -> Layout:
    return Layout(tensors=(TensorInfo(name="rows", shape=logits.shape),))


def model_of(logits: NDArray[Any]) -> Model:
    return Model(params=np.float32(logits).ravel(), buffers=np.zeros(0, np.float32), counters=np.zeros(0, np.int64))


def mixture_of(
    logits: NDArray[Any],
    *,
    roles: Sequence[Role] | None = None,
    weights: Sequence[float] | None = None,
    temperature: Sequence[float] | None = None,
    kappa: Sequence[float] | None = None,
    mean: Sequence[float] | None = None,
    std: Sequence[float] | None = None,
    beta: float = 1.0,
    energy_clip: float = np.inf,
    log_prior: NDArray[Any] | None = None,
    gate: GateWeights | None = None,
    guard: Guard | None = None,
    top: int = 2,
) -> Mixture:
    """Tables (M, n, C); everything left out makes it the plain formula of SCMoE-PFL with equal gate scores."""
    m, _, n_classes = logits.shape
    names = roles or [Role.PRIVATE, *[Role.EXPERT] * (m - 1)]
    prior = np.full(n_classes, -np.log(n_classes)) if log_prior is None else log_prior
    candidates = tuple(
        Candidate(
            role=names[k],
            name=f"{names[k]}-{k}",
            model=model_of(logits[k]),
            offset=prior,
            calibration=Calibration(
                temperature=temperature[k] if temperature else 1.0, kappa=kappa[k] if kappa else 0.0
            ),
            energy_mean=mean[k] if mean else 0.0,
            energy_std=std[k] if std else 1.0,
            weight=weights[k] if weights else 1 / m,
        )
        for k in range(m)
    )
    gate = gate or GateWeights.make_untrained((1,), m)
    return Mixture(candidates, beta, gate, guard, top, energy_clip)


def problem_of(n_classes: int) -> Classification:
    return Classification(classes=task_of(1, n_classes).classes)


def calibrated(logits: NDArray[Any], prior: NDArray[Any], how: Calibration = PLAIN) -> NDArray[Any]:
    """Log-probabilities q of logits (n, C)."""
    return np.asarray(problem_of(logits.shape[-1]).calibrate(logits, how, prior).values)


def energies_of(logits: NDArray[Any]) -> NDArray[Any]:
    """Raw energies (n, M) of logits (M, n, C)."""
    problem = problem_of(logits.shape[-1])
    return np.stack([problem.compute_energies(each, Answers(each)) for each in logits], axis=1)


def log_mixture(log_q: NDArray[Any], scores: NDArray[Any]) -> NDArray[Any]:
    """Log-probabilities (n, C) of a mixture with log-probabilities q (M, n, C) and scores (n, M).

    A device computes them for the targets alone, and its mixture's answers apart from them: both must agree.
    """
    usable = np.isfinite(log_q).all(axis=2).T
    known = np.where(usable[:, :, np.newaxis], log_q.transpose(1, 0, 2), np.nan)
    unknown = np.full(len(scores), -np.log(log_q.shape[2]))
    found = [compute_mixture_likelihood(each, scores, unknown) for each in np.moveaxis(known, 2, 0)]
    log_p = np.stack(found, axis=1)
    answers = [Answers(each) for each in log_q]
    (p,) = problem_of(log_q.shape[2]).mix(answers, compute_shares(scores, usable))
    np.testing.assert_allclose(p, np.exp(log_p), atol=1e-9)
    return log_p


def formula_of(mixture: Mixture) -> Formula:
    """The mixture's formula in float64."""
    return make_formula(task_of(1, len(mixture.candidates[0].offset)), mixture)


def by_formula(mixture: Mixture, logits: NDArray[Any], scores: NDArray[Any] | float = 0.0) -> list[NDArray[Any]]:
    """Probabilities, weights and energies of logits (M, n, C) and gate scores r (n, M), in float64."""
    m, n, n_classes = logits.shape
    untrained = replace(GateWeights.make_untrained((1,), m), out_bias=mixture.gate.out_bias)
    values = np.asarray(logits, np.float64)
    return mix_outputs(task_of(n, n_classes), replace(mixture, gate=untrained), values, inputs(n), np.asarray(scores))


def scores_of(gate: GateWeights, x: NDArray[Any]) -> NDArray[Any]:
    """r(x), (n, M), of model inputs (n, *input_shape), in float64."""
    m = len(gate.out_bias)
    how = formula_of(mixture_of(np.zeros((m, 1, 2)), gate=gate, weights=[1.0] * m))
    return compute_gate_scores(how, x.astype(np.float64))


def write(folder: Path, logits: NDArray[Any], mixture: Mixture, release: int = 1) -> Manifest:
    _, n_samples, n_classes = logits.shape
    return write_bundle(
        folder,
        task=task_of(n_samples, n_classes),
        layout=layout_of(logits[0]),
        mixture=mixture,
        validation=inputs(n_samples),
        release=release,
        method="test",
        metrics={},
    )
