"""Bundles made by the coordinator, for devices that do not train (fedge.md section 12, fedcoe.md sections 6 and 7).

`make_files` needs torch, for comparison. `make_child_bundle` runs it in a short-lived child, so that this process does
not load torch.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from coordinator.methods.state import GlobalModel
from export import Candidate, GateWeights, Mixture, write_bundle
from fedge.bundle.trunk import LAYERS
from fedge.data.problems.calibration import PLAIN, Calibration
from fedge.data.task import TaskSpec
from fedge.errors import ConfigError, raise_as
from fedge.system import child
from fedge.tensors.layout import Layout, Model, Tensors
from fedge.wire.messages import BlobRef, Role


def make_mixture(
    task: TaskSpec,
    models: Sequence[Model],
    shares: Sequence[float],
    log_prior: NDArray[np.float64] | None = None,
    *,
    gate: Tensors | None = None,
    top: int | None = None,
) -> Mixture:
    """Mix several models' outputs in fixed shares or by a gate, or leave one model unchanged.

    With a gate of `coordinator.methods.server.learning` and shares of 1 this is FedCoE's global model (fedcoe.md, E13):
    the scores of a mixture without energies are the gate's own, so its softmax over the best is p_j / Σ p_j.

    Args:
        task: the task of the models.
        models: at least one.
        shares: the share of each model in the output, before the gate; without a gate they sum to 1.
        log_prior: added to the logits of class c, (C,); nothing (kappa = 0) if None.
        gate: the tensors of a gate over the models; the shares are fixed if None.
        top: how many models take part in a sample; all if None.
    """
    alone = len(models) == 1
    return Mixture(
        candidates=tuple(
            Candidate(
                role=Role.GLOBAL if alone else Role.EXPERT,
                name=Role.GLOBAL.value if alone else f"{Role.EXPERT.value}-{k}",
                model=model,
                offset=task.problem.make_no_offset(task.input_shape) if log_prior is None else log_prior,
                calibration=PLAIN if log_prior is None else Calibration(temperature=1.0, kappa=1.0),
                weight=share,
            )
            for k, (model, share) in enumerate(zip(models, shares, strict=True))
        ),
        beta=0.0,
        gate=GateWeights.make_untrained(task.input_shape, len(models)) if gate is None else _make_gate(gate),
        top=top or len(models),
    )


def load_global_mixture(
    task: TaskSpec, given: GlobalModel, get_model: Callable[[BlobRef], Model], get_tensors: Callable[[BlobRef], Tensors]
) -> Mixture:
    """Load a method's global model as a mixture: one model, or experts and the gate that chooses among them."""
    gate = None if given.gate is None else get_tensors(given.gate)
    models = [get_model(ref) for ref in given.models]
    return make_mixture(task, models, [1.0] * len(models), gate=gate, top=given.top)


def _make_gate(tensors: Tensors) -> GateWeights:
    """Return the shared gate's tensors as the gate of a mixture; its last layer has no bias (fedcoe.md section 4)."""
    own = {name: np.asarray(tensor, np.float32) for name, tensor in tensors.items()}
    return GateWeights(
        hidden_weight=own["hidden.weight"],
        hidden_bias=own["hidden.bias"],
        out_weight=own["out.weight"],
        out_bias=np.zeros(len(own["out.weight"])),
        convolutions=tuple(
            (own[f"{layer}.weight"], own[f"{layer}.bias"]) for layer in LAYERS if f"{layer}.weight" in own
        ),
    )


def make_files(
    mixture: Mixture, samples: NDArray[np.floating], *, task: TaskSpec, layout: Layout, release: int, method: str
) -> dict[str, bytes]:
    """Make the files of a bundle by name; equal arguments give equal bytes.

    Args:
        mixture: the mixture by which the bundle predicts.
        samples: (n, *input_shape) model inputs on which torch and ONNX Runtime must agree; n may be 0.
        task: the bundle's task.
        layout: the layout of the models.
        release: the release of the bundle.
        method: named in the manifest.

    Raises:
        ConfigError: the network cannot be expressed in ONNX.
        UpdateRejected: torch and ONNX Runtime disagree.
    """
    with tempfile.TemporaryDirectory(prefix="fedge-bundle-") as folder:
        write_bundle(
            Path(folder) / "bundle",
            task=task,
            layout=layout,
            mixture=mixture,
            validation=samples,
            release=release,
            method=method,
            metrics={},
        )
        return {file.name: file.read_bytes() for file in sorted(Path(folder, "bundle").iterdir())}


def make_child_bundle(
    task: TaskSpec, layout: Layout, mixture: Mixture, *, release: int, method: str
) -> dict[str, bytes]:
    """Make the files of a bundle with the mixture's predictions, without torch in this process.

    Raises:
        ConfigError: the network cannot be exported; the text says why.
    """
    with raise_as(ConfigError, f"no bundle of the network of task {task.name} can be made", on=ConfigError):
        return child.call_once(
            "coordinator.methods.server.assembling:make_bundle",
            task,
            layout,
            mixture,
            release,
            method,
            returns=dict[str, bytes],
        )


def make_bundle(task: TaskSpec, layout: Layout, mixture: Mixture, release: int, method: str) -> dict[str, bytes]:
    """Make the files of a bundle with the mixture's predictions; loads torch.

    Raises:
        ConfigError: the network cannot be built or expressed in ONNX.
        UpdateRejected: torch and ONNX Runtime disagree.
    """
    none = np.zeros((0, *task.input_shape), np.float32)
    return make_files(mixture, none, task=task, layout=layout, release=release, method=method)
