"""What a bundle has to predict, from its files alone: torch in float64, and the formula sample by sample.

Source: fedge.md sections 7, 9 and 11, scmoe_pfl.md sections 11.2 and 11.3; of PM-MoE's pools pm_moe.md sections 4 and 5
(the steepness of the gate's LeakyReLU is the specification's). It shares no code with `export` or `deploy`
but the reading of files and the preprocessing of samples; all calibration is read from the manifest, where the gate's
part holds it, too: the two must agree.
"""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from fedge.bundle.manifest import Manifest, Part, PoolInfo, read_bundle
from fedge.data.preprocessing import preprocess
from fedge.data.task import choose_gate_pool
from fedge.models import build
from fedge.models import network as models
from fedge.tensors.layout import flatten, from_bytes
from fedge.wire.messages import Role

Vectors = NDArray[np.float64]
TOP_RULE = {Role.GLOBAL, Role.EXPERT}
"""Of these at most `top` take part in a sample; private and local candidates always do."""


def by_torch(folder: Path, x: NDArray[np.generic]) -> tuple[Vectors, Vectors]:
    """Probabilities (n, C) and weights (n, M) that a mixture's or a pool's bundle must give for raw samples."""
    manifest = read_bundle(folder).manifest
    if isinstance(manifest.pool, PoolInfo):
        return by_pool(folder, manifest, manifest.pool, x)
    inputs = torch.from_numpy(preprocess(manifest.task, x)).double()
    layout, _ = build.make_initial_model(manifest.task, 0)
    network = build.make_network(manifest.task).eval()
    logits = []
    with torch.inference_mode():
        for candidate in manifest.candidates:
            part = from_bytes((folder / candidate.part.file_name).read_bytes())
            models.load_model(network, flatten(part, layout), layout)
            logits.append(network.double()(inputs).numpy())
            network.float()
        held = from_bytes((folder / manifest.gate.file_name).read_bytes())
        gate = {name: torch.from_numpy(value).double() for name, value in held.items() if name != "order"}
        scores = gate_scores(gate, inputs, choose_gate_pool(manifest.task.input_shape))
    prior = log_prior(manifest, gate)
    fused = [
        fusion(manifest, np.stack([of_candidate[i] for of_candidate in logits]), scores[i], prior)
        for i in range(len(inputs))
    ]
    return np.stack([p for p, _ in fused]), np.stack([weights for _, weights in fused])


# ------------------------------------------------------------------------------------------------- PM-MoE's pools


def by_pool(folder: Path, manifest: Manifest, info: PoolInfo, x: NDArray[np.generic]) -> tuple[Vectors, Vectors]:
    """`by_torch` of a pool: what every module adds to the rest, weighed by the gate, the best `top` of them."""

    def held(part: Part) -> dict[str, NDArray[np.generic]]:
        return from_bytes((folder / part.file_name).read_bytes())

    inputs = torch.from_numpy(preprocess(manifest.task, x)).double()
    gate = {name: value.astype(np.float64) for name, value in held(manifest.gate).items()}
    modules = [held(candidate.part) for candidate in manifest.candidates]
    if info.trunk is None:  # LG-FedAvg: bases under the shared head, whose bias counts once
        rest = np.tile(gate["rest"], (len(inputs), 1))
        added = np.stack([features_and_logits(manifest, module, inputs)[1] - rest for module in modules], axis=1)
        g = inputs.flatten(1).numpy()
    else:  # heads, or of DBE what its vector adds, over the shared network
        g, rest = features_and_logits(manifest, held(info.trunk), inputs)
        added = np.stack([g @ np.float64(m["weight"]).T + np.float64(m["bias"]) for m in modules], axis=1)
    z = (g - gate["gate.mean"]) * gate["gate.inverse_scale"]
    for k in range(4):
        z = z @ gate[f"gate.{k}.weight"].T + gate[f"gate.{k}.bias"]
        z = z if k == 3 else np.where(z > 0, z, 0.01 * z)
    kept = [k for k in range(len(modules)) if gate["mask"][k] == 0]
    weights = np.stack([pool_weights(manifest, info, added[i], z[i], kept) for i in range(len(inputs))])
    mixed = [
        rest[i] + sum(weights[i, k] * added[i, k] for k in range(len(modules)) if weights[i, k] > 0)
        for i in range(len(inputs))
    ]
    return np.stack([softmax(logits) for logits in mixed]), weights


def features_and_logits(
    manifest: Manifest, tensors: dict[str, NDArray[np.generic]], inputs: torch.Tensor
) -> tuple[Vectors, Vectors]:
    """What goes into the network's last linear layer (n, D), and what comes out of it (n, C)."""
    layout, _ = build.make_initial_model(manifest.task, 0)
    network = build.make_network(manifest.task).eval()
    models.load_model(network, flatten(tensors, layout), layout)
    seen: list[torch.Tensor] = []
    last = [module for module in network.modules() if isinstance(module, torch.nn.Linear)][-1]
    last.register_forward_pre_hook(lambda _, given: seen.append(given[0]))
    with torch.inference_mode():
        logits = network.double()(inputs)
    return seen[0].numpy(), logits.numpy()


def pool_weights(manifest: Manifest, info: PoolInfo, added: Vectors, z: Vectors, kept: list[int]) -> Vectors:
    """One sample: w (M,) of what the modules add (M, C) and the gate's z (M,). Anchored: the own one always counts."""
    usable = [k for k in kept if np.isfinite(added[k].astype(np.float32)).all()]
    alpha = np.zeros(len(z))
    alpha[usable] = softmax(z[usable])
    ranked = sorted(usable, key=lambda k: (-alpha[k], k))
    if info.anchored:
        ranked = [info.own, *(k for k in ranked if k != info.own)]
    w = np.zeros(len(z))
    for k in ranked[: manifest.fusion.top]:
        w[k] = alpha[k]
    return w / w.sum() if info.anchored else w


def gate_scores(gate: dict[str, torch.Tensor], inputs: torch.Tensor, window: tuple[int, int]) -> Vectors:
    """log omega_k + r_k(x), (n, M): the last bias holds both."""
    pooled = torch.nn.functional.avg_pool2d(inputs, window) if inputs.ndim == 4 else inputs
    hidden = torch.relu(pooled.flatten(1) @ gate["gate.hidden.weight"].T + gate["gate.hidden.bias"])
    return (hidden @ gate["gate.out.weight"].T + gate["gate.out.bias"]).numpy()


def log_prior(manifest: Manifest, gate: dict[str, torch.Tensor]) -> Vectors:
    """The device's pi, (C,), of a candidate's kappa * pi; zeros where no candidate uses it."""
    for k, candidate in enumerate(manifest.candidates):
        if candidate.kappa > 0:
            pi = gate["prior"][k].numpy() / candidate.kappa
            assert math.isclose(float(np.exp(pi).sum()), 1.0, abs_tol=1e-5), "log shares"
            return pi
    return np.zeros(manifest.task.n_classes)


def fusion(manifest: Manifest, logits: Vectors, scores: Vectors, pi: Vectors) -> tuple[Vectors, Vectors]:
    """One sample: p (C,) and alpha (M,) of logits (M, C) and log omega + r (M,)."""
    rules = manifest.fusion
    log_a = np.full(len(logits), -math.inf)
    for k, candidate in enumerate(manifest.candidates):
        if np.isfinite(logits[k]).all() and np.isfinite(scores[k]):
            energy = log_sum_exp(logits[k]) - candidate.energy_mean
            energy /= max(candidate.energy_std, 0.1)
            bound = math.inf if rules.energy_clip is None else rules.energy_clip
            log_a[k] = scores[k] + rules.beta * min(max(energy, -bound), bound)
    competing = [k for k, candidate in enumerate(manifest.candidates) if candidate.role in TOP_RULE]
    for loser in sorted(competing, key=lambda k: (-log_a[k], k))[rules.top :]:
        log_a[loser] = -math.inf
    n_classes = logits.shape[1]
    if not np.isfinite(log_a).any():
        return np.full(n_classes, 1 / n_classes), np.zeros(len(logits))
    alpha = np.exp(log_a - log_sum_exp(log_a))
    selected = [k for k in range(len(logits)) if alpha[k] > 0]
    p = np.zeros(n_classes)
    for k in selected:
        candidate = manifest.candidates[k]
        p += alpha[k] * softmax(logits[k] / candidate.temperature + candidate.kappa * pi)
    if rules.guard is not None and np.isfinite(logits[rules.guard.candidate]).all():
        guard = rules.guard
        p = 0.5 * p + 0.5 * softmax(logits[guard.candidate] / guard.temperature + guard.kappa * pi)
    return p, alpha


def log_sum_exp(values: Vectors) -> float:
    largest = float(values.max())
    return largest + math.log(float(np.exp(values - largest).sum()))


def softmax(values: Vectors) -> Vectors:
    return np.exp(values - log_sum_exp(values))
