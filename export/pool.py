"""PM-MoE's mixture as a bundle: a gate weighs the private modules of many devices, sample by sample, on logits.

Source: Feng et al., "PM-MOE: Mixture of Experts on Private Model Parameters for Personalized Federated Learning", WWW
2025, Eq. 5 to 9; specification docs/methods/pm_moe.md.

For every base algorithm the prediction is  logits = rest + Σ_l w_l m_l,  where m_l is the contribution of module l:

    FedPer, FedRep    heads      rest = 0                     m_l = head_l(f)
    FedRoD            heads      rest = global head(f)        m_l = personal head_l(f)
    DBE               heads      rest = head(f)               m_l = W P_l, a bias alone
    LG-FedAvg         bases      rest = bias of the head      m_l = head(base_l(x)) - rest

Heads share one network, the trunk, whose own head gives `rest`. Each base is a network of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

import numpy as np
from numpy.typing import NDArray

from export.branch import export_branch
from export.graph_nodes import Graph
from export.parity import compute_favour, compute_features, compute_logits
from fedge.bundle.formula import LOWEST, softmax
from fedge.bundle.manifest import OUTPUTS
from fedge.data.problems.maths import Array
from fedge.data.task import INPUT, LOGITS, TaskSpec
from fedge.errors import ConfigError
from fedge.tensors.layout import HEAD, Layout, Model, Tensors, to_bytes, unflatten

SLOPE: Final = 0.01
"""Negative slope of the gate's LeakyReLU (section 5)."""
WIDTHS: Final = (128, 256, 128)
"""Hidden units of the gate's layers (section 5)."""
WEIGHT: Final = "weight"
BIAS: Final = "bias"


@dataclass(frozen=True, slots=True)
class PoolGate:
    """The pool's gate: four linear layers with LeakyReLU between them, on (g - mean) / scale.

    The weights are (128, F), (256, 128), (128, 256) and (M, 128); the biases (128,), (256,), (128,) and (M,); mean and
    scale are (F,). g (n, F) holds the trunk's features if the modules are heads, or the flattened model inputs if they
    are bases.
    """

    weights: tuple[NDArray[np.floating], ...]
    biases: tuple[NDArray[np.floating], ...]
    mean: NDArray[np.floating]
    scale: NDArray[np.floating]


@dataclass(frozen=True, slots=True)
class Pool:
    """All that determines a prediction of a pool of modules.

    Attributes:
        kind: whether the modules are heads or bases.
        trunk: the network that gives heads their features, and whose own head gives `rest`; None for bases.
        modules: M modules, by pool index; a head is {"weight": (C, D), "bias": (C,)}, a base is a model of the layout.
        rest: `rest` for bases, (C,); unused zeros for heads.
        gate: see `PoolGate`.
        keep: whether each module survived the denoising, (M,); the device's own module always does.
        own: the index of the device's own module.
        top: k', the number of modules that take part in a sample, from 1 to the number of survivors; on a tie the lower
            index wins.
        anchored: whether the own module always takes part and the weights are renormalised (section 5).
    """

    kind: Literal["head", "base"]
    trunk: Model | None
    modules: tuple[Tensors | Model, ...]
    rest: NDArray[np.floating]
    gate: PoolGate
    keep: NDArray[np.bool_]
    own: int
    top: int
    anchored: bool


# ---------------------------------------------------------------------------------------------------- the formula


def compute_gate_logits(gate: PoolGate, g: NDArray[np.floating]) -> Array:
    """Compute z (n, M) of the gate's inputs g (n, F), in float64."""
    h = (np.asarray(g, np.float64) - gate.mean) / gate.scale
    *hidden, last = zip(gate.weights, gate.biases, strict=True)
    for weight, bias in hidden:
        h = h @ np.asarray(weight, np.float64).T + bias
        h = np.where(h > 0, h, SLOPE * h)
    return np.asarray(h @ np.asarray(last[0], np.float64).T + last[1])


def select_top_weights(
    alpha: Array, top: int, *, own: int | None = None, keep: NDArray[np.bool_] | None = None
) -> Array:
    """Return weights w (n, M): the `top` largest alpha, the lower index on a tie, and 0 elsewhere (section 5).

    If `own` is None (preset "paper"), the weights are these alphas. Otherwise (preset "anchored") the own module
    displaces the weakest of the selected modules, and the weights are renormalised. Modules outside `keep` are never
    selected.

    Example:
        >>> alpha = np.array([[0.1, 0.3, 0.3, 0.05, 0.25]])
        >>> select_top_weights(alpha, 2).tolist(), select_top_weights(alpha, 2, own=4).round(6).tolist()
        ([[0.0, 0.3, 0.3, 0.0, 0.0]], [[0.0, 0.545455, 0.0, 0.0, 0.454545]])
    """
    key = alpha.copy() if keep is None else np.where(keep, alpha, -1.0)
    if own is not None:
        key[:, own] = 2.0
    chosen = np.argsort(-key, axis=1, kind="stable")[:, :top]
    w = np.zeros_like(alpha)
    np.put_along_axis(w, chosen, np.take_along_axis(alpha, chosen, axis=1), axis=1)
    return w if own is None else w / w.sum(axis=1, keepdims=True)


def find_usable(modules: Array) -> NDArray[np.bool_]:
    """Return whether each module's contribution, of (n, M, C), is finite in the graph's float32, (n, M)."""
    with np.errstate(over="ignore", invalid="ignore"):
        found: NDArray[np.bool_] = np.abs(modules.astype(np.float32)).sum(axis=2) < np.inf
    return found


def compute_pool_reference(
    pool: Pool, modules: Array, rest: Array, g: NDArray[np.floating], favoured: NDArray[np.floating] | None = None
) -> tuple[Array, Array]:
    """Compute probabilities (n, C) and weights (n, M) from contributions (n, M, C) and rest (n, C).

    A module whose output is not finite for a sample is dropped for that sample, like one removed by the denoising.
    `favoured` holds weights (n, M) whose modules win where they are level with others up to rounding.
    """
    fit, z = find_usable(modules), compute_gate_logits(pool.gate, g)
    z = np.where(pool.keep & fit, z if favoured is None else z + compute_favour(favoured, z), LOWEST)
    w = select_top_weights(softmax(z), pool.top, own=pool.own if pool.anchored else None, keep=pool.keep) * fit
    logits = rest + np.einsum("nm,nmc->nc", w, np.where(fit[:, :, None], modules, 0.0))
    return softmax(logits), w


def compute_expected(
    task: TaskSpec,
    layout: Layout,
    pool: Pool,
    x: NDArray[np.float32],
    found: Sequence[NDArray[np.floating]] = (),
    lean: float = 0,
) -> Array:
    """Compute probabilities (n, C) by torch and float64; `found` and `lean`: see `export.parity.compute_expected`."""
    favoured = found[1] if lean else None
    if pool.trunk is None:
        models = [module for module in pool.modules if isinstance(module, Model)]
        logits = compute_logits(task, layout, models, x, lean).astype(np.float64)
        rest = np.broadcast_to(np.asarray(pool.rest, np.float64), logits.shape[1:])
        return compute_pool_reference(pool, (logits - rest).transpose(1, 0, 2), rest, x.reshape(len(x), -1), favoured)[
            0
        ]
    f, rest = compute_features(task, layout, pool.trunk, x, lean)
    heads = [module for module in pool.modules if not isinstance(module, Model)]
    modules = np.stack([f @ np.float64(head[WEIGHT]).T + np.float64(head[BIAS]) for head in heads], axis=1)
    return compute_pool_reference(pool, modules, rest, f, favoured)[0]


# ------------------------------------------------------------------------------------------------------- the parts


def encode_pool_parts(pool: Pool, layout: Layout) -> list[bytes]:
    """Serialise a pool's parts in the order of slots: modules, gate, and the trunk if there is one."""
    parts = [to_bytes(unflatten(m, layout) if isinstance(m, Model) else m) for m in pool.modules]
    parts.append(to_bytes(_make_gate_tensors(pool)))
    if pool.trunk is not None:
        parts.append(to_bytes(unflatten(pool.trunk, layout)))
    return parts


def _make_gate_tensors(pool: Pool) -> Tensors:
    """Return the gate, the survivors and the own module as tensors, so that all devices of a pool share one graph."""
    tensors: Tensors = {
        "gate.mean": np.asarray(pool.gate.mean, np.float32),
        "gate.inverse_scale": (1 / np.asarray(pool.gate.scale, np.float64)).astype(np.float32),
        "mask": np.where(pool.keep, np.float32(0), LOWEST),
        "first": np.where(np.arange(len(pool.keep)) == pool.own, np.float32(2 * pool.anchored), np.float32(0))
        - np.where(pool.keep, np.float32(0), np.float32(1)),
        "rest": np.asarray(pool.rest, np.float32),
    }
    for k, (weight, bias) in enumerate(zip(pool.gate.weights, pool.gate.biases, strict=True)):
        tensors |= {f"gate.{k}.weight": np.asarray(weight, np.float32), f"gate.{k}.bias": np.asarray(bias, np.float32)}
    return tensors


def encode_pool_skeleton(task: TaskSpec, layout: Layout, pool: Pool, parts: list[bytes]) -> bytes:
    """Serialise the graph: input x (n, *input_shape) -> probabilities (n, C), weights (n, M), energies (n, M).

    Raises:
        ConfigError: the modules are heads, but the network's graph does not end in a linear layer.
    """
    model, m = export_branch(task), len(pool.modules)
    graph = Graph()
    if pool.trunk is None:
        for k in range(m):
            graph.add_branch(model, f"c{k}/", k, parts[k])
        g = graph.op("Flatten", INPUT)
        own = [f"c{k}/{LOGITS}" for k in range(m)]
    else:
        graph.add_branch(model, "trunk/", m + 1, parts[m + 1])
        g = f"trunk/{_find_features(model, layout)}"
        for k in range(m):
            graph.add_part(k, parts[k], f"c{k}/")
        own = [graph.op("Gemm", g, f"c{k}/{WEIGHT}", f"c{k}/{BIAS}", transB=1) for k in range(m)]
    graph.add_part(m, parts[m])
    stacked = graph.op("Reshape", graph.op("Concat", *own, axis=1), graph.const([-1, m, task.n_classes]))
    if pool.trunk is None:
        rest = "rest"
        stacked = graph.op("Sub", stacked, rest)
    else:
        rest = f"trunk/{LOGITS}"

    # z, alpha; a module whose output is not finite is dropped, like one that did not survive the denoising
    h = graph.op("Mul", graph.op("Sub", g, "gate.mean"), "gate.inverse_scale")
    for k in range(len(WIDTHS)):
        h = graph.op("LeakyRelu", graph.op("Gemm", h, f"gate.{k}.weight", f"gate.{k}.bias", transB=1), alpha=SLOPE)
    last = len(WIDTHS)
    z = graph.op("Add", graph.op("Gemm", h, f"gate.{last}.weight", f"gate.{last}.bias", transB=1), "mask")
    size = graph.op("ReduceL1", stacked, graph.const([2]), keepdims=0)
    usable = graph.op("Less", size, graph.const(np.float32(np.inf)))
    alpha = graph.op("Softmax", graph.op("Where", usable, z, graph.const(LOWEST)), axis=1)

    # the top k; w
    _, chosen = graph.ops("TopK", 2, graph.op("Add", alpha, "first"), graph.const([pool.top]), axis=1)
    none = graph.op("Mul", alpha, graph.const(np.float32(0)))
    w = graph.op("ScatterElements", none, chosen, graph.op("GatherElements", alpha, chosen, axis=1), axis=1)
    if pool.anchored:
        w = graph.op("Div", w, graph.op("ReduceSum", w, graph.const([1]), keepdims=1))
    w = graph.op("Where", usable, w, graph.const(np.float32(0)), out=OUTPUTS[0])

    # logits = rest + sum w m
    kept = graph.op("Where", graph.op("Unsqueeze", usable, graph.const([2])), stacked, graph.const(np.float32(0)))
    added = graph.op("Mul", graph.op("Unsqueeze", w, graph.const([2])), kept)
    logits = graph.op("Add", rest, graph.op("ReduceSum", added, graph.const([1]), keepdims=0))
    graph.op("Softmax", logits, axis=1, out="probabilities")
    alone = (
        graph.op("Add", graph.op("Unsqueeze", rest, graph.const([1])), stacked)
        if pool.trunk
        else graph.op("Add", rest, stacked)
    )
    energy = graph.op("ReduceLogSumExp", alone, graph.const([2]), keepdims=0)
    graph.op("Where", usable, energy, graph.const(np.float32(np.nan)), out=OUTPUTS[1])
    return graph.encode(
        task.input_shape, {"probabilities": (task.n_classes,), "weights": (m,), "energies": (m,)}, model.opset_import
    )


def _find_features(model: Any, layout: Layout) -> str:
    """Return the name of the head's input tensor in the network's graph."""
    weight = layout.select(HEAD).tensors[0].name
    for node in model.graph.node:
        if node.op_type == "Gemm" and len(node.input) > 1 and node.input[1] == weight and node.output[0] == LOGITS:
            name: str = node.input[0]
            return name
    raise ConfigError("the network's graph does not end in its linear head: heads cannot be exchanged")
