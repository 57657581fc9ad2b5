"""APFL: a device predicts with a mixture of its own model and the shared one, whose shares it learns.

Source: Deng et al., "Adaptive Personalized Federated Learning", 2020, Algorithm 1; baselines.md section 13. The own
model v and its share alpha shape nothing that is sent, so they learn from all training samples, including sensitive
ones, in batches of their own.
"""

from __future__ import annotations

import msgspec
import numpy as np
import torch
from torch import Tensor

from edge_agent.device.device import Device
from edge_agent.learning.frame import Learned, train_alone
from fedge.models.optimizer import make_optimizer
from fedge.models.training import Trainer, to_tensor
from fedge.steps.contract import Result
from fedge.steps.personal.train_apfl import TrainApfl
from fedge.steps.sgd import Sgd
from fedge.tensors.layers import Layers
from fedge.tensors.layout import Floats, Layout, Model


def run(device: Device, action: TrainApfl) -> Result:
    """Train both models and alpha together."""
    return train_alone(device, action, lambda w, mine: train_models(device, action, w, mine))


class Mixing:
    """An optimiser that moves v and alpha by the gradient at v_bar = alpha v + (1 - alpha) w, which it leaves alone.

    Example: v = (1, 3), w = (0, 1), alpha = 0.5, gradient (1, 1), rate 0.1 without momentum. v becomes v - 0.1 * 0.5 *
    (1, 1) = (0.95, 2.95), and alpha 0.5 - 0.1 * (1 * 1 + 1 * 2) = 0.2.
    """

    def __init__(self, sgd: Sgd, v: Tensor, w: Tensor, alpha: float) -> None:
        self.v, self.w, self.alpha = v, w, alpha
        self._rate = sgd.learning_rate
        self._gradient, self._optimizer = torch.zeros_like(v), make_optimizer(sgd)

    def begin(self, gradient: Tensor) -> None:
        """Set the gradient to zero."""
        gradient.zero_()

    def step(self, weights: Tensor, gradient: Tensor) -> None:  # noqa: ARG002 - v moves, not the mixture
        """Move v along alpha times the gradient, and alpha along the gradient's product with v - w."""
        slope = float(gradient @ (self.v - self.w))
        self._optimizer.begin(self._gradient)
        self._optimizer.step(self.v, self._gradient.add_(gradient, alpha=self.alpha))
        self.alpha = float(np.clip(self.alpha - self._rate * slope, 0, 1))


def train_models(device: Device, action: TrainApfl, w: Model, mine: Layers | None) -> Learned:
    """Train w on D_L, and v and alpha on all samples, step by step; v begins as w if `mine` is None.

    Running statistics that stay are those of the mixture.

    Raises:
        ProtocolError: `not-finite`, because training of the shared model diverged.
    """
    network, data, sgd = device.network, device.data, action.sgd
    before = Layers(device.layout, w) if mine is None else mine
    own, alpha = (w.params, action.alpha) if mine is None else split_share(mine.model.params)
    statistics = before.model
    mixing = Mixing(
        msgspec.structs.replace(sgd, proximal_mu=0.0),
        to_tensor(own.copy(), network.processor),
        to_tensor(w.params.copy(), network.processor),
        alpha,
    )
    shared = Trainer(network, *data.shared, sgd, device.make_rng(), anchor=w.params)
    mixed = Trainer(network, *data.training, sgd, device.make_rng(1), optimizer=mixing)
    local = w
    for _ in range(sgd.count_steps(data.n_shared)):
        with device.pause_timing():
            mixing.w.copy_(to_tensor(local.params, network.processor))
            v_bar = mix_params(mixing.v.cpu().numpy(), local.params, mixing.alpha)
            network.load(Model(v_bar, statistics.buffers, statistics.counters))
            mixed.run(1, device.stop)
            statistics = network.present()
        network.load(local)
        shared.run(1, device.stop)
        now = network.present()
        local = Model(now.params.copy(), now.buffers, now.counters)
    network.load(local)
    v, share = mixing.v.cpu().numpy(), np.array([mixing.alpha], np.float32)
    if not all(np.isfinite(each).all() for each in (v, share, statistics.buffers)):
        # divergence is not reported, since v learns from all samples
        v, share, statistics = own, np.array([alpha], np.float32), before.model
    return Learned(network.dump(), Model(np.concatenate([v, share]), statistics.buffers, statistics.counters))


def split_share(params: Floats) -> tuple[Floats, float]:
    """Split what is kept into v (d,) and alpha."""
    return params[:-1], float(params[-1])


def mix_params(v: Floats, w: Floats, alpha: float) -> Floats:
    """Return v_bar = alpha v + (1 - alpha) w, (d,)."""
    return np.float32(alpha) * v + np.float32(1 - alpha) * w


def overlay(model: Model, kept: Layers, layout: Layout) -> Model:  # noqa: ARG001 - the signature of all steps
    """Mix the shared model with the device's own."""
    v, alpha = split_share(kept.model.params)
    return Model(mix_params(v, model.params, alpha), kept.model.buffers, kept.model.counters)
