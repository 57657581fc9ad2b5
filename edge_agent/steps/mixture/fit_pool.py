"""PM-MoE stage 2 on a device: denoise the pool of private modules, train a gate over the rest, write the bundle.

Source: Feng et al., "PM-MOE: Mixture of Experts on Private Model Parameters for Personalized Federated Learning", WWW
2025, Eq. 5 to 13; specification docs/methods/pm_moe.md. Preset `anchored` (the default) departs from the paper as the
specification's section 5 says: standardised inputs, the own module always selected, weights renormalised.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from edge_agent.device.device import Device, FailedError
from edge_agent.learning.evaluation import measure_answers
from edge_agent.learning.frame import assemble_model
from edge_agent.steps.mixture.install import install_alone, load_kept, make_served_model
from export import Pool, PoolGate
from export.pool import BIAS, SLOPE, WEIGHT, WIDTHS, compute_pool_reference, find_usable
from fedge.data.problems.formulas import Answers
from fedge.data.problems.maths import Array
from fedge.errors import ProtocolError
from fedge.models.training import draw_batches, to_tensor
from fedge.steps.mixture.fit_pool import FitPool
from fedge.steps.mixture.install import Installed
from fedge.steps.training.train import Train, find_kept
from fedge.steps.training.train_dbe import TrainDbe
from fedge.steps.training.train_dp import TrainDp
from fedge.steps.training.train_rod import TrainRod
from fedge.system.stopping import Stop, StoppedError
from fedge.tensors.layers import Layers, paste
from fedge.tensors.layout import HEAD, Layout, Model, Tensors, flatten, from_bytes
from fedge.wire.messages import Role

log = logging.getLogger("fedge.worker")

METHOD: Final = "pm-moe"
NO_NORM: Final = 1e-12  # an expert's output with a smaller norm counts as 0, section 6
OWN_BIAS: Final = 4.0  # b_0, section 5
LAST_SCALE: Final = 0.1  # scale of the last layer's first weights, preset "anchored"
BATCH_SIZE: Final = 32  # of the gate, section 5
LEARNING_RATE: Final = 0.1
DROPOUT: Final = 0.1
SPREAD: Final = 1e-3  # added to the deviation of the gate's inputs


@dataclass(frozen=True, slots=True)
class Modules:
    """The pool of private modules, decoded.

    `items`: M modules, with the device's own in place of missing ones; `present`: (M,), whether each was received;
    `vectors`: (M, D) of a parameter pool (DBE), which section 6 compares.
    """

    kind: Literal["head", "base"]
    trunk: Model | None
    items: tuple[Tensors | Model, ...]
    rest: NDArray[np.float32]
    present: NDArray[np.bool_]
    vectors: Array | None = None


def run(device: Device, action: FitPool) -> Installed:
    """Fit the gate and install the pool, or only the own module if it is alone or better (sections 5 to 7).

    Raises:
        FailedError: the device has no module of its own.
    """
    data = device.data
    mine = load_kept(device, action)
    if mine is None:
        raise FailedError("nothing was kept here: the device has no module of its own")
    model = make_served_model(device, action)
    modules = make_modules(device, action, mine)
    m = len(modules.items)
    top = action.top or math.ceil(m / 2)
    if data.n_train == 0 or m == 1:
        return _install_own(device, model)
    experts, added, rest, g = _compute_outputs(device, modules, data.x_train)
    conf = compute_confidences(experts, action.own)
    fit = find_usable(added).all(axis=0)
    keep = denoise_pool(np.where(fit, conf, -np.inf), action.own, action.denoise, modules.present)
    top = min(top, int(keep.sum()))
    if keep.sum() == 1 or (top == 1 and action.preset == "anchored"):  # no gradient for a gate
        return _install_own(device, model)
    left = np.where(keep[:, np.newaxis], added, 0.0)  # 0 times a non-finite value is NaN
    trained = train_gate(g, left, rest, data.y_train, keep, top, action, device.seed, device.stop)
    if not all(np.isfinite(numbers).all() for numbers in (*trained.weights, *trained.biases)):
        return _install_own(device, model)
    pool = Pool(
        kind=modules.kind,
        trunk=modules.trunk,
        modules=modules.items,
        rest=modules.rest,
        gate=trained,
        keep=keep,
        own=action.own,
        top=top,
        anchored=action.preset == "anchored",
    )
    p = _predict(device, modules, pool, data.x_val)
    own = device.network.compute_logits(model, data.x_val)
    if action.guard and (p.argmax(axis=1) == data.y_val).sum() < (own.argmax(axis=1) == data.y_val).sum():
        return _install_own(device, model)
    return device.write_bundle(pool, METHOD, _measure(device, p))


# --------------------------------------------------------------------------------------------------------- the pool


def make_modules(device: Device, action: FitPool, mine: Layers) -> Modules:
    """Make modules of what each base method keeps, and the shared part that they combine with (section 3's table)."""
    layout, head_layout = device.layout, device.layout.select(HEAD)
    own = find_kept(action.kept_by, action.personal, layout, device.steps)
    found = [_decode_module(device.fetch(ref) if ref else None, own, k) for k, ref in enumerate(action.pool)]
    found[action.own] = mine
    present = np.array([layers is not None for layers in found])
    pool = [mine if other is None else other for other in found]
    weight, bias = (info.name for info in head_layout.tensors)
    nothing = np.zeros(head_layout.tensors[1].shape, np.float32)
    plain = assemble_model(device, action.model, action.personal, mine, action.initial)
    head = Layers(layout, plain)
    match action.kept_by:
        case Train.STEP | TrainDp.STEP if own == head_layout:
            none = np.zeros_like(mine.model.params)
            trunk = paste(plain, Layers(own, Model(none, mine.model.buffers, mine.model.counters)), layout)
            return Modules("head", trunk, _make_heads(pool, weight, bias), nothing, present)
        case Train.STEP | TrainDp.STEP if own == layout.without(HEAD):
            models = tuple(paste(plain, other, layout) for other in pool)
            return Modules("base", None, models, np.asarray(head[bias], np.float32), present)
        case TrainRod.STEP:
            return Modules("head", plain, _make_heads(pool, weight, bias), nothing, present)
        case TrainDbe.STEP:
            p = np.stack([other.model.params for other in pool]).astype(np.float64)
            moved = (p @ np.float64(head[weight]).T).astype(np.float32)  # W P_l: a change of the head's bias
            offsets = tuple({WEIGHT: np.zeros_like(head[weight]), BIAS: bias_l} for bias_l in moved)
            return Modules("head", plain, offsets, nothing, present, vectors=p)
    raise FailedError(f"what step {action.kept_by} keeps cannot be pooled")


def _make_heads(pool: Sequence[Layers], weight: str, bias: str) -> tuple[Tensors, ...]:
    return tuple({WEIGHT: other[weight], BIAS: other[bias]} for other in pool)


def _decode_module(data: bytes | None, layout: Layout, index: int) -> Layers | None:
    """Decode a received module, or return None if it is missing or unfit (section 11)."""
    if data is None:
        return None
    try:
        return Layers(layout, flatten(from_bytes(data), layout))
    except ProtocolError as error:
        log.warning("event=module_refused index=%d name=%s detail=%s", index, error.name, error)
        return None


def _compute_outputs(device: Device, modules: Modules, x: NDArray[np.float32]) -> tuple[Array, Array, Array, Array]:
    """Return the experts' outputs (n, M, O), contributions (n, M, C), rest (n, C), gate inputs (n, F)."""
    if modules.trunk is None:
        network = device.network
        models = [item for item in modules.items if isinstance(item, Model)]
        features = np.stack([network.compute_features(model, x) for model in models], axis=1).astype(np.float64)
        found = np.stack([network.compute_logits(model, x) for model in models], axis=1)
        rest = np.broadcast_to(modules.rest.astype(np.float64), (len(x), found.shape[2]))
        return features, found - rest[:, None], rest, x.reshape(len(x), -1).astype(np.float64)
    f = device.network.compute_features(modules.trunk, x).astype(np.float64)
    rest = device.network.compute_logits(modules.trunk, x)
    heads = [item for item in modules.items if not isinstance(item, Model)]
    added = np.stack([f @ np.float64(head[WEIGHT]).T + np.float64(head[BIAS]) for head in heads], axis=1)
    return added if modules.vectors is None else modules.vectors[np.newaxis], added, rest, f


def _predict(device: Device, modules: Modules, pool: Pool, x: NDArray[np.float32]) -> Array:
    if not len(x):
        return np.zeros((0, device.task.n_classes))
    _, added, rest, g = _compute_outputs(device, modules, x)
    return compute_pool_reference(pool, added, rest, g)[0]


def _measure(device: Device, p: Array) -> dict[str, float]:
    """Return figures for the bundle, from probabilities (m, C) of the validation samples."""
    problem, y = device.task.problem, device.data.y_val
    with np.errstate(divide="ignore"):
        answers = Answers(np.log(p))
    found = problem.compute_log_likelihood(answers, y)
    likelihoods = np.where(np.isfinite(found), found, problem.compute_unknown(y))
    return measure_answers(device, [answers], np.ones((len(y), 1)), likelihoods).metrics


def _install_own(device: Device, model: Model) -> Installed:
    """Install the device's own module alone."""
    return install_alone(device, model, Role.PRIVATE, METHOD)


# ------------------------------------------------------------------------------------------- section 6: denoising


def compute_confidences(outputs: Array, own: int) -> Array:
    """Compute conf[l] = mean_i ln sum_d exp(v[d]), (M,); v: unit outputs of l times those of the own (Eq. 10-12).

    Args:
        outputs: H, (n, M, O), n >= 1. A norm below 1e-12 gives v = 0, a value that is not finite -inf.
        own: j, index of the device's own module.
    """
    with np.errstate(invalid="ignore", over="ignore"):
        norms = np.linalg.norm(outputs, axis=2, keepdims=True)
        units = np.divide(outputs, norms, out=np.zeros_like(outputs), where=norms >= NO_NORM)
        v = units * units[:, own : own + 1]
        conf = np.logaddexp.reduce(v, axis=2).mean(axis=0)
    return np.where(np.isfinite(conf) & np.isfinite(outputs).all(axis=(0, 2)), conf, -np.inf)


def denoise_pool(conf: Array, own: int, ratio: float, present: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Return survivors (M,): all but the floor(gamma (M - 1) + 1e-9) others of lowest conf, the higher index on a tie.

    An expert of conf -inf, whose outputs are not all finite, is treated as not present.

    Example:
        >>> denoise_pool(np.array([1, 1, 1, 1, 1.5, 1]), 1, 0.5, np.ones(6, bool)).astype(int).tolist()
        [1, 1, 1, 0, 1, 0]
    """
    keep = present & (conf > -np.inf)
    others = [k for k in range(len(conf)) if keep[k] and k != own]
    n_dropped = math.floor(ratio * len(others) + 1e-9)
    dropped = sorted(others, key=lambda k: (conf[k], -k))[:n_dropped]
    keep[own] = True
    keep[dropped] = False
    return np.asarray(keep)


# -------------------------------------------------------------------------------------------- section 5: the gate


def train_gate(
    g: Array,
    added: Array,
    rest: Array,
    y: NDArray[np.int64],
    keep: NDArray[np.bool_],
    top: int,
    action: FitPool,
    seed: int,
    stop: Stop,
) -> PoolGate:
    """Train the gate alone by SGD; base and pool are frozen, so their outputs are precomputed.

    Args:
        g: (n, F) inputs of the gate.
        added: (n, M, C) each module's contribution to the logits.
        rest: (n, C) the logits without any module.
        y: (n,) labels.
        keep: (M,) survivors of the denoising.
        top: k' <= survivors.
        action: preset, epochs, own index.
        seed: the seed of weights, batches and dropout.
        stop: checked between batches.

    Raises:
        StoppedError: `stop()` was true.
    """
    anchored = action.preset == "anchored"
    mean = g.mean(axis=0) if anchored else np.zeros(g.shape[1])
    scale = g.std(axis=0) + SPREAD if anchored else np.ones(g.shape[1])
    inputs, steps, others = (to_tensor(a.astype(np.float32)) for a in ((g - mean) / scale, added, rest))
    labels, survivors = to_tensor(y), torch.from_numpy(keep)
    n_batches = action.epochs * math.ceil(len(y) / min(BATCH_SIZE, len(y)))
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        network = make_gate_network(g.shape[1], len(keep), action.own if anchored else None)
        parameters = list(network.parameters())
        rng = np.random.default_rng(seed)
        for _, batch in zip(range(n_batches), draw_batches(len(y), BATCH_SIZE, rng), strict=False):
            if stop():
                raise StoppedError
            i = torch.from_numpy(batch)
            w = select_weights(network(inputs[i]), survivors, top, action.own if anchored else None)
            logits = others[i] + torch.einsum("nm,nmc->nc", w, steps[i])
            gradients = torch.autograd.grad(nn.functional.cross_entropy(logits, labels[i]), parameters)
            with torch.no_grad():  # as torch.optim.SGD, which would import torch's compiler
                for parameter, gradient in zip(parameters, gradients, strict=True):
                    parameter.add_(gradient, alpha=-LEARNING_RATE)
    layers = [layer for layer in network if isinstance(layer, nn.Linear)]
    return PoolGate(
        weights=tuple(layer.weight.detach().double().numpy() for layer in layers),
        biases=tuple(layer.bias.detach().double().numpy() for layer in layers),
        mean=mean,
        scale=scale,
    )


def make_gate_network(n_inputs: int, n_experts: int, own: int | None) -> nn.Sequential:
    """Make F - 128 - 256 - 128 - M with LeakyReLU and dropout, orthogonal; `own`: preset "anchored"."""
    sizes = (n_inputs, *WIDTHS)
    layers: list[nn.Module] = []
    for a, b in zip(sizes, WIDTHS, strict=False):
        layers += [nn.Linear(a, b), nn.LeakyReLU(SLOPE), nn.Dropout(DROPOUT)]
    last = nn.Linear(WIDTHS[-1], n_experts)
    network = nn.Sequential(*layers, last)
    for layer in network:
        if isinstance(layer, nn.Linear):
            nn.init.orthogonal_(layer.weight)
    if own is not None:
        with torch.no_grad():
            last.weight *= LAST_SCALE
            last.bias.zero_()
            last.bias[own] = OWN_BIAS
    return network


def select_weights(z: Tensor, keep: Tensor, top: int, own: int | None) -> Tensor:
    """Return w (n, M) of the gate's z, as `export.pool.select_top_weights`; only selected entries get gradients."""
    alpha = torch.softmax(z.masked_fill(~keep, -torch.inf), dim=1)
    key = alpha.detach().masked_fill(~keep, -1.0)
    if own is not None:
        key[:, own] = 2.0
    chosen = torch.argsort(-key, dim=1, stable=True)[:, :top]
    w = torch.zeros_like(alpha).scatter(1, chosen, alpha.gather(1, chosen))
    return w if own is None else w / w.sum(dim=1, keepdim=True)
