"""DBE: a vector added to the features stays on the device; the shared features' mean is pulled to a global mean.

Source: Zhang et al., "Eliminating Domain Bias for Federated Learning in Representation Space", NeurIPS 2023;
baselines.md section 10. Prediction: Hd(B(x) + P) = W f + (W P + b): in a bundle the vector becomes part of the head's
bias.

P shapes the gradient of the shared layers, so it learns from the same samples, D_L.
"""

from __future__ import annotations

import msgspec
import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from edge_agent.device.device import Device
from edge_agent.learning.frame import Learned, train_alone
from fedge.models import network as models
from fedge.models.optimizer import make_optimizer
from fedge.models.problems.cross_entropy import Loss, cross_entropy
from fedge.models.problems.losses import make_loss_of
from fedge.models.training import Trainer, to_tensor
from fedge.steps.contract import Result
from fedge.steps.training.train_dbe import TrainDbe
from fedge.tensors import codecs
from fedge.tensors.layers import Layers
from fedge.tensors.layout import HEAD, Codec, Floats, Layout, Model, TensorInfo


def make_regularised_loss(
    head: nn.Linear, offset: Tensor, goal: Tensor, *, kappa: float, entropy: Loss = cross_entropy
) -> Loss:
    """Return the loss L(Hd(f + P)) + kappa mean_d[(r_d - g_d)^2 / 2], with r the mean of f.

    `offset`: P. `goal`: g. `entropy`: L of a module's outputs, such as cross-entropy.
    """

    def compute_loss(module: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        seen: list[Tensor] = []

        def shift_features(_: nn.Module, inputs: tuple[Tensor], _output: Tensor) -> Tensor:
            seen.append(inputs[0])
            return functional.linear(inputs[0] + offset, head.weight, head.bias)

        with models.listen_to_layers([head], shift_features):
            loss = entropy(module, x, y)
        away = seen[-1].mean(dim=0) - goal
        return loss + kappa * (0.5 * away**2).mean()

    return compute_loss


def run(device: Device, action: TrainDbe) -> Result:
    """Train the shared model and the vector together."""
    goal = decode_mean(device.fetch(action.global_mean), device.layout)
    return train_alone(device, action, lambda start, mine: train_models(device, action, start, mine, goal))


def train_models(device: Device, action: TrainDbe, start: Model, mine: Layers | None, goal: Floats) -> Learned:
    """Train the shared model and the offset P together on D_L, n >= 1; P has an optimiser of its own, the same one.

    `mine`: the offset so far; zero if None. `goal`: g (D,), the mean of the features over all devices.

    Raises:
        ProtocolError: `not-finite`, because training of the shared model diverged.
    """
    network, sgd = device.network, action.sgd
    network.load(start)
    before = np.zeros(len(goal), np.float32) if mine is None else mine.model.params.copy()
    offset = to_tensor(before, network.processor)
    gradient, optimizer = torch.zeros_like(offset), make_optimizer(msgspec.structs.replace(sgd, proximal_mu=0.0))

    def update_offset(p: Tensor) -> None:
        assert p.grad is not None
        optimizer.begin(gradient)
        optimizer.step(p.data, gradient.add_(p.grad))
        p.grad = None

    offset.requires_grad_().register_post_accumulate_grad_hook(update_offset)  # type: ignore[no-untyped-call]
    g = to_tensor(goal, network.processor)
    head = models.get_head(network.module, network.layout)
    entropy = make_loss_of(device.task.problem, sgd, device.data.shared[1], network.processor)
    trainer = Trainer(
        network,
        *device.data.shared,
        sgd,
        device.make_rng(),
        loss=make_regularised_loss(head, offset, g, kappa=action.kappa, entropy=entropy),
    )
    trainer.run(sgd.count_steps(device.data.n_shared), device.stop)
    trained = network.dump()
    return Learned(trained, Model(offset.detach().cpu().numpy(), trained.buffers[:0], trained.counters[:0]))


def decode_mean(data: bytes, layout: Layout) -> Floats:
    """Decode the global mean g (D,) from the blob that the coordinator sent.

    Raises:
        ProtocolError: `layout`, `malformed` or `not-finite`.
    """
    d = layout.select(HEAD).tensors[0].shape[1]
    return codecs.decode(data, Codec.FLOAT32, Layout(tensors=(TensorInfo(name="mean", shape=(d,)),))).params


def overlay(model: Model, kept: Layers, layout: Layout) -> Model:
    """Add the offset to the head: b <- W P + b, in float64."""
    n_classes, d = layout.select(HEAD).tensors[0].shape
    n_weights, params = n_classes * d, model.params.copy()
    head = params[-n_classes * (d + 1) :]
    w, p, b = (own.astype(np.float64) for own in (head[:n_weights], kept.model.params, head[n_weights:]))
    head[n_weights:] = w.reshape(n_classes, d) @ p + b
    return Model(params, model.buffers, model.counters)
