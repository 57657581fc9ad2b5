"""Train the shared model on D_L; the frame shared by all training steps.

Model split (baselines.md sections 6 to 10): some layers stay on the device. FedPer: Arivazhagan et al., "Federated
Learning with Personalization Layers", 2019. LG-FedAvg: Liang et al., "Think Locally, Act Globally", 2020. FedRep:
Collins et al., "Exploiting Shared Representations for Personalized Federated Learning", ICML 2021, Algorithm 1.

Everything learns from D_L: what stays shapes the gradient of what is shared, so anything it learned from a sensitive
sample would show in the upload. FedRep's head is trained for steps of SGD, not epochs.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Final

import numpy as np
import torch
from msgspec import UNSET

from edge_agent.device.device import Device, FailedError, failed
from edge_agent.device.encoding import send_update
from edge_agent.learning.class_means import class_means, first_drawn, near_class_means
from edge_agent.learning.evaluation import Look, best_of, best_start, look
from fedge.errors import ProtocolError
from fedge.models import build
from fedge.models import network as models
from fedge.models.training import (
    CPU,
    Loss,
    Stack,
    Trainer,
    accuracies,
    can_stack,
    cross_entropy,
    joined,
    losses_and_gradient_norms,
    mean_loss,
    mean_losses,
    padded,
    side_by_side,
    tensor,
)
from fedge.steps.contract import Declined, Result
from fedge.steps.sgd import Sgd
from fedge.steps.training.train import Start, Train, Trained
from fedge.tensors.layout import Model, Selector, Tensors, flatten, overlaid, unflatten
from fedge.wire.messages import BlobRef, Why

Learn = Callable[[Model, Tensors | None], tuple[Model, Tensors]]
"""(start, what was kept) -> (the trained model, what is kept now)."""
MOST_WEIGHTS: Final = 2**20
"""Of one stack: with more, the weights leave the processor's cache and a step of a model takes longer again."""
MOST_WEIGHTS_ON_GPU: Final = 2**24
"""There memory is the bound: by count a measuring pass of seven `cnn_fedavg` on 32 x 32 takes 2 GB."""
MOST_MODELS: Final = 64
THREADED: Final = True
"""Whether orders may run in threads: the step draws from no generator of the process."""


def run(device: Device, action: Train) -> Result:
    """FedAvg, or a method whose layers `action.personal` stay here."""
    if action.personal:
        return train(device, action, lambda start, _: learn_split(device, action, start))
    if not device.data.n_shared:
        return Declined(why=Why.NO_DATA)
    start, chosen = best_start(device, action.starts, action.choose)
    before = look(device, start, measure=action.measure)
    x, y = device.data.shared
    with own_loss(device, action, start) as loss:
        Trainer(device.network, x, y, action.sgd, device.rng(), loss=loss).run(
            action.sgd.steps_for(len(y)), device.stop
        )
    update = device.network.change(start)
    loss_after = mean_loss(device.network, x, y) if action.measure else None
    return report(device, action, chosen, before, loss_after, update)


@contextmanager
def own_loss(device: Device, action: Train, start: Model) -> Iterator[Loss]:
    """The device's loss; its network has the start's weights."""
    if action.class_means is UNSET:
        yield cross_entropy
        return
    network = device.network
    x, y = first_drawn(*device.data.shared, device.rng())
    features = torch.from_numpy(network.features(start, x))
    means = class_means(features, torch.from_numpy(y), device.task.n_classes).to(network.processor)
    with near_class_means(models.head_of(network.module, network.layout), action.class_means) as loss:
        yield partial(loss, means=means)


def learn_split(device: Device, action: Train, start: Model) -> tuple[Model, Tensors]:
    """The trained model, and its personal layers. FedRep (`head_steps` > 0): first the head alone, then the base alone.

    Running statistics belong to the base and change in both phases.
    """
    network, shared, sgd, rng = device.network, device.data.shared, action.sgd, device.rng()
    steps = sgd.steps_for(len(shared[1]))
    network.load(start)
    if action.head_steps:
        Trainer(network, *shared, sgd, rng, moves="head").run(action.head_steps, device.stop)
        Trainer(network, *shared, sgd, rng, moves="base").run(steps, device.stop)
    else:
        Trainer(network, *shared, sgd, rng).run(steps, device.stop)
    trained = network.dump()
    tensors = unflatten(trained, device.layout)
    return trained, {info.name: tensors[info.name] for info in device.layout.select(action.personal).tensors}


overlay = overlaid
"""The model with its personal layers replaced by the kept ones."""


# ------------------------------------------------------------------------------------------------------- the frame


def train(device: Device, action: Train, learn: Learn) -> Result:
    """One round of personalised training: choose a start, evaluate it, train, keep what stays, send the change."""
    if not device.data.n_shared:
        return Declined(why=Why.NO_DATA)
    layout = action.kept(action.personal, device.layout)
    assert layout is not None
    mine = device.kept(action.STEP, layout, before=device.order.round)
    wholes = [whole(device, s.model, action.personal, mine, action.initial) for s in action.starts]
    start, chosen = best_of(device, wholes, action.starts, action.choose)
    told = mine if action.shareable else None
    before = look(device, device.overlaid(action.STEP, start, told), measure=action.measure)
    trained, mine = learn(start, mine)
    loss_after = None
    if action.measure:
        device.network.load(device.overlaid(action.STEP, trained, mine if action.shareable else None))
        loss_after = mean_loss(device.network, *device.data.shared)
    update = Model(trained.params - start.params, trained.buffers, trained.counters)
    result = report(device, action, chosen, before, loss_after, update)
    device.keep(mine, shareable=action.shareable)
    return result


def report(
    device: Device, action: Train, chosen: Start, before: Look, loss_after: float | None, update: Model
) -> Trained:
    """The result of a training: the travelling part of the change from the start.

    `before`, `loss_after`: of the model that the device would use, or of the shared one if the former is confidential.

    Raises:
        ProtocolError: `not-finite`, training diverged.
    """
    measured = (before.loss, before.gradient_norm, loss_after)
    if not all(math.isfinite(number) for number in measured if number is not None):
        raise ProtocolError("not-finite", "training diverged")
    return Trained(
        update=send_update(device, update, device.layout.without(action.personal), action.codec),
        n_samples=device.data.n_shared,
        cluster=chosen.cluster,
        loss_before=before.loss,
        loss_after=loss_after,
        gradient_norm=before.gradient_norm,
        val_accuracy=before.accuracy,
    )


def whole(device: Device, ref: BlobRef, personal: Selector, mine: Tensors | None, initial: BlobRef | None) -> Model:
    """A complete model: the received tensors plus the kept ones, at first those of `initial`.

    Without an initial model the network's own code initialises them, and no message reveals them.
    """
    if not personal:
        return device.model(ref)
    layout = device.layout.without(personal)
    sent = unflatten(device.model(ref, layout), layout)
    if mine is not None:
        return flatten(mine | sent, device.layout)
    first = build.initial(device.task, 0)[1] if initial is None else device.model(initial)
    return overlaid(first, sent, device.layout)


# ------------------------------------------------------------------------------------------ several devices at once


@dataclass(frozen=True, slots=True)
class _Ready:
    """A device with a chosen start."""

    number: int
    device: Device
    action: Train
    start: Model
    chosen: Start


def many(devices: Sequence[Device], actions: Sequence[Train]) -> list[Result | None]:
    """Train small networks side by side (`fedge.models.training.Stack`); None: to be done alone.

    Each device's result agrees with its own `run` to float tolerance. The choice depends only on the network
    (`can_stack`), never on the other devices.
    """
    found: list[Result | None] = [None] * len(devices)
    ready: list[_Ready] = []
    for number, (device, action) in enumerate(zip(devices, actions, strict=True)):
        if action.personal or action.head_steps or not device.data.n_shared or not can_stack(device.network):
            continue
        try:
            ready.append(_Ready(number, device, action, *best_start(device, action.starts, action.choose)))
        except Exception:  # noqa: BLE001, S112 - its own `run` says what is wrong
            continue
    for group in _groups(ready):
        try:
            results = _train(group)
        except Exception:  # noqa: BLE001, S112 - a user's network, or a label that it has no output for: each alone
            continue
        for one, result in zip(group, results, strict=True):
            found[one.number] = result
    return found


def _groups(ready: Sequence[_Ready]) -> Iterator[list[_Ready]]:
    """Group devices that can share a stack: same network, training and measurements; similar sizes, to pad less."""
    alike: dict[tuple[str, Sgd, int, object, bool], list[_Ready]] = defaultdict(list)
    for one in ready:
        sgd = one.action.sgd
        steps = sgd.steps_for(one.device.data.n_shared)
        alike[one.device.fingerprint, sgd, steps, one.action.class_means, one.action.measure].append(one)
    for members in alike.values():
        most = MOST_WEIGHTS if members[0].device.network.processor == CPU else MOST_WEIGHTS_ON_GPU
        n = int(np.clip(most // len(members[0].start.params), 1, MOST_MODELS))
        members.sort(key=lambda one: (one.device.data.n_shared, one.number))
        yield from (members[first : first + n] for first in range(0, len(members), n))


def _train(group: Sequence[_Ready]) -> list[Result]:
    """`train` for n devices at once."""
    action, samples = group[0].action, [one.device.data.shared for one in group]
    stack = Stack(group[0].device.network, [one.start for one in group])
    validated = accuracies(stack, *padded([one.device.data.shared_validation for one in group]))
    looks = [Look(None if np.isnan(accuracy) else float(accuracy)) for accuracy in validated]
    losses_after: list[float | None] = [None] * len(group)
    everything = padded(samples) if action.measure else None
    if everything:
        measured = zip(looks, *losses_and_gradient_norms(stack, *everything), strict=True)
        looks = [replace(look, loss=float(loss), gradient_norm=float(norm)) for look, loss, norm in measured]
    x, y = joined(samples)
    drawn = side_by_side([len(own) for _, own in samples], action.sgd.batch_size, [one.device.rng() for one in group])
    with _own_losses(group, stack) as loss:
        Trainer(stack, x, y, action.sgd, drawn, loss=loss).run(action.sgd.steps_for(len(samples[0][1])))
    if everything:
        losses_after = [float(loss) for loss in mean_losses(stack, *everything)]
    updates = stack.changes([one.start for one in group])
    return [
        _reported(one, look, loss_after, update)
        for one, look, loss_after, update in zip(group, looks, losses_after, updates, strict=True)
    ]


@contextmanager
def _own_losses(group: Sequence[_Ready], stack: Stack) -> Iterator[Loss]:
    """`own_loss` for n devices at once."""
    action, task = group[0].action, group[0].device.task
    if action.class_means is UNSET:
        yield cross_entropy
        return
    drawn = [first_drawn(*one.device.data.shared, one.device.rng()) for one in group]
    x, y = (tensor(own, stack.processor) for own in padded(drawn))
    with torch.inference_mode():
        means = class_means(stack.features(x), y, task.n_classes)
    stack.given = (means.clone(),)
    with near_class_means(models.head_of(stack.module, stack.layout), action.class_means) as loss:
        yield loss


def _reported(one: _Ready, before: Look, loss_after: float | None, update: Model) -> Result:
    try:
        return report(one.device, one.action, one.chosen, before, loss_after, update)
    except (FailedError, ProtocolError) as error:
        return failed(error)
