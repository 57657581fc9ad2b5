"""FedRoD: a shared model that learns as if all classes were equally frequent, and a second head that stays here.

Source: Chen and Chao, "On Bridging Generic and Personalized Federated Learning for Image Classification", ICLR 2022;
baselines.md section 9. Prediction: Hd_g(f) + Hd_p(f); the logits add, so a bundle has one combined head.

Departures: the second head starts at zero, so that an untrained device predicts as the shared model does. The second
head sends no gradient into the base, so it learns from all training samples, in its own batches, on the features after
step (a), in evaluation mode. The shared model learns from D_L, with the class counts of D_L.
"""

from __future__ import annotations

import msgspec
import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from edge_agent.device.device import Device, FailedError
from edge_agent.learning.frame import Learned, train_alone
from fedge.models import network as models
from fedge.models.optimizer import make_optimizer
from fedge.models.problems.cross_entropy import Loss
from fedge.models.training import Trainer, draw_batches, make_augmenter, to_tensor
from fedge.steps.contract import Result
from fedge.steps.training.train_rod import TrainRod
from fedge.tensors.layers import Layers
from fedge.tensors.layout import HEAD, Layout, Model


def make_balanced_softmax(log_counts: Tensor, smoothing: float = 0.0) -> Loss:
    """Return the loss, mean cross-entropy of logits + ln(n_c), n_c the local class counts.

    log_counts: (C,) ln(n_c); a class without samples (ln 0) gets no mass. `smoothing`: the share of a target that is
    spread evenly over the classes with samples, since another could never have its part.
    """
    there = torch.isfinite(log_counts)

    def compute_loss(module: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        balanced = module(x) + log_counts
        loss = functional.cross_entropy(balanced, y)
        if not smoothing:
            return loss
        even = -torch.log_softmax(balanced, dim=1)[:, there].mean()
        return (1 - smoothing) * loss + smoothing * even

    return compute_loss


def run(device: Device, action: TrainRod) -> Result:
    """Train both heads, batch by batch."""
    return train_alone(device, action, lambda start, mine: train_models(device, action, start, mine))


def train_models(device: Device, action: TrainRod, start: Model, mine: Layers | None) -> Learned:
    """Train the shared model (a) and the second head (b) alternately, batch by batch.

    The shared model learns from D_L, n >= 1; the second head from all training samples, or from D_L if it may be
    pooled. `mine`: the second head so far; zero if None.

    Raises:
        FailedError: the order asks for class weights.
        ProtocolError: `not-finite`, because training of the shared model diverged.
    """
    network, shared, sgd = device.network, device.data.shared, action.sgd
    if sgd.class_weights:
        raise FailedError("balanced softmax weighs the classes already: class weights would do so twice")
    network.load(start)
    n_classes, d = network.layout.select(HEAD).tensors[0].shape
    head = np.zeros((n_classes, d + 1), np.float32)  # the bias is the last column
    if mine is not None:
        weight, bias = np.split(mine.model.params, [n_classes * d])
        head = np.column_stack([weight.reshape(n_classes, d), bias])
    own = to_tensor(head, network.processor)
    gradient, optimizer = torch.zeros_like(own).view(-1), make_optimizer(msgspec.structs.replace(sgd, proximal_mu=0.0))
    smoothing = sgd.label_smoothing or 0.0
    targets = (1 - smoothing) * torch.eye(n_classes, device=network.processor) + smoothing / n_classes
    counts = to_tensor(device.data.count_shared_classes(n_classes), network.processor)
    trainer = Trainer(network, *shared, sgd, device.make_rng(), loss=make_balanced_softmax(counts.log(), smoothing))
    own_samples = device.data.shared if action.poolable else device.data.training
    x, y = (to_tensor(each, network.processor) for each in own_samples)
    rng = device.make_rng(1)
    augment, drawn = make_augmenter(device.task, [rng]), draw_batches(len(y), sgd.batch_size, rng)
    for _, batch in zip(range(sgd.count_steps(len(shared[1]))), drawn, strict=False):
        trainer.run(1, device.stop)
        with device.pause_timing(), torch.no_grad():
            inputs, labels = x[batch], y[batch]
            if augment is not None:
                inputs, labels = augment(inputs, labels)
            f, logits = models.compute_features_and_logits(network.module, inputs, network.layout)
            f = functional.pad(f, (0, 1), value=1.0)
            # gradient of the mean cross-entropy of logits + f own^T: (p - target)^T f / n
            excess = torch.softmax(logits + f @ own.T, dim=1) - targets[labels]
            optimizer.begin(gradient)
            gradient.view_as(own).add_(excess.T @ f, alpha=1 / len(batch))
            optimizer.step(own.view(-1), gradient)
    learned = own.cpu().numpy()
    if np.isfinite(learned).all():  # divergence is not reported, since the head learns from all samples
        head = learned
    trained = network.dump()
    own_head = np.concatenate([head[:, :-1].ravel(), head[:, -1]])
    return Learned(trained, Model(own_head, trained.buffers[:0], trained.counters[:0]))


def overlay(model: Model, kept: Layers, layout: Layout) -> Model:  # noqa: ARG001 - the head comes last in all of them
    """Add both heads to one: W = W_g + W_p, b = b_g + b_p."""
    params, own = model.params.copy(), kept.model.params
    params[-len(own) :] = np.add(params[-len(own) :], own, dtype=np.float64)
    return Model(params, model.buffers, model.counters)
