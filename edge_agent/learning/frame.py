"""The frame of every step that trains: what is around the learning, for one device and for several side by side.

    begin      make the start of the offered models and what is kept on the device
    look       measure the model that the device would use, if the order asks for it
    learn      the step's own part: `fit` with a recipe, or anything else
    finish     send the change; keep what stays

A step hands `train_alone` its `learn`, and `train_together` its recipe, if several simulated devices may learn at once.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

import numpy as np

from edge_agent.device.device import Device, FailedError, make_failure
from edge_agent.device.encoding import send_update
from edge_agent.learning.evaluation import Evaluation, choose_best_start, evaluate_model
from edge_agent.learning.objectives import Learns, LossOfOrder, Objective
from fedge.errors import ProtocolError
from fedge.models import build, training
from fedge.models.optimizer import Optimizer
from fedge.models.training import (
    CPU,
    Part,
    Stack,
    Trainer,
    can_stack,
    compute_losses_and_gradient_norms,
    compute_mean_loss,
    compute_mean_losses,
    compute_scores,
    draw_stacked_batches,
    make_augmenter,
    pad_samples,
)
from fedge.steps.contract import Declined, Result
from fedge.steps.sgd import Sgd
from fedge.steps.training.train import Start, Train, Trained
from fedge.tensors.layers import Layers, join, paste
from fedge.tensors.layout import Layout, Model, Selector, to_bytes
from fedge.wire.messages import BlobRef, Why

MOST_WEIGHTS: Final = 2**20
"""Most weights in a stack; with more, they leave the processor's cache and a step of a model takes longer again."""
MOST_WEIGHTS_ON_GPU: Final = 2**24
"""Most weights in a stack on a GPU, where memory is the limit. By calculation, a measuring pass of seven `cnn_fedavg`
on 32 x 32 images takes 2 GB."""
MOST_MODELS: Final = 64


@dataclass(frozen=True, slots=True)
class Recipe:
    """A step's rules by which weights move: its losses, optimisers and schedules.

    `sgd`: what the order says of the training. `objective`: gives the loss; if None, that of `sgd`. `optimizer`: made
    anew for each phase, from the models that learn; if None, that of `sgd`. `head_steps`: the head first learns alone
    for so many steps, then the base alone; if 0, the weights that `moves` names learn together.
    """

    sgd: Sgd
    objective: Objective | None = None
    optimizer: Callable[[Learns], Optimizer] | None = None
    head_steps: int = 0
    moves: Part = "all"

    def list_phases(self, n: int) -> tuple[tuple[Part, int], ...]:
        """List which part of the network learns in each phase, and for how many steps, with n samples."""
        steps = self.sgd.count_steps(n)
        return (("head", self.head_steps), ("base", steps)) if self.head_steps else ((self.moves, steps),)


@dataclass(frozen=True, slots=True)
class Learned:
    """The result of a device's learning.

    `model`: the trained model, whose change travels. `kept`: what stays on the device, in the layout that the action's
    `select_kept` returns; None if nothing stays. `report`: further fields of the result, such as references to further
    uploads. `sent`: what travels in place of the change, in float32; None if the change does.
    """

    model: Model
    kept: Model | None = None
    report: Mapping[str, Any] = field(default_factory=dict)
    sent: Layers | None = None


@dataclass(frozen=True, slots=True)
class Begun:
    """A device that is about to learn from `start`, the model of `chosen`.

    `keeps`: layout of what stays on the device; None if nothing. `mine`: what it kept in an earlier round.
    """

    device: Device
    action: Train
    start: Model
    chosen: Start
    keeps: Layout | None
    mine: Layers | None

    def get_model_in_use(self, model: Model, kept: Layers | None) -> Model:
        """Return the model that the device would use; without `kept` if its measurements must not leave the device."""
        shown = kept if self.action.shareable else None
        return self.device.overlay_kept(self.action.STEP, model, shown)

    def get_kept(self, learned: Learned) -> Layers | None:
        """Return what stays on the device.

        Raises:
            FailedError: the contract does not say that anything stays.
        """
        if learned.kept is None:
            return None
        if self.keeps is None:
            raise FailedError(f"step {self.action.STEP} keeps tensors, but `select_kept` of its contract names none")
        return Layers(self.keeps, learned.kept)


Learn = Callable[[Model, Layers | None], Learned]
"""(start, what was kept, or None if nothing yet) -> what was learned."""


def train_alone(device: Device, action: Train, learn: Learn) -> Result:
    """Do one device's round of training."""
    begun = begin(device, action)
    if isinstance(begun, Declined):
        return begun
    before = evaluate_model(device, begun.get_model_in_use(begun.start, begun.mine), measure=action.measure)
    learned = learn(begun.start, begun.mine)
    loss_after = None
    if action.measure:
        device.network.load(begun.get_model_in_use(learned.model, begun.get_kept(learned)))
        loss_after = compute_mean_loss(device.network, *device.data.shared)
    return finish(begun, learned, before, loss_after)


def begin(device: Device, action: Train) -> Begun | Declined:
    """Determine the model from which the device learns. A device without samples that may be shared declines."""
    if not device.data.n_shared:
        return Declined(why=Why.NO_DATA)
    keeps = action.select_kept(action.personal, device.layout)
    mine = None if keeps is None else device.load_kept(action.STEP, keeps, before=device.order.round)
    wholes = [assemble_model(device, s.model, action.personal, mine, action.initial) for s in action.starts]
    return Begun(device, action, *choose_best_start(device, wholes, action.starts, action.choose), keeps, mine)


def assemble_model(
    device: Device, ref: BlobRef, personal: Selector, mine: Layers | None, initial: BlobRef | None
) -> Model:
    """Return a complete model: the received layers over the kept ones, at first over those of `initial`.

    Without an initial model the network's own code initialises the personal layers, and no message reveals them.
    """
    if not personal:
        return device.fetch_model(ref)
    layout = device.layout.without(personal)
    sent = Layers(layout, device.fetch_model(ref, layout))
    if mine is not None:
        return join([mine, sent], device.layout)
    first = build.make_initial_model(device.task, 0)[1] if initial is None else device.fetch_model(initial)
    return paste(first, sent, device.layout)


def fit(learns: Learns, devices: Sequence[Device], recipe: Recipe) -> None:
    """Train from the present weights on the devices' shareable samples, n >= 1; models of a stack train equally long.

    Raises:
        StoppedError: the first device is to stop.
    """
    samples, rngs = [device.data.shared for device in devices], [device.make_rng() for device in devices]
    stacked = isinstance(learns, Stack)
    x, y = training.join_samples(samples) if stacked else samples[0]
    sizes, size = [len(own) for _, own in samples], recipe.sgd.batch_size
    drawn = draw_stacked_batches(sizes, size, rngs) if stacked else rngs[0]
    with (recipe.objective or LossOfOrder(recipe.sgd))(learns, devices) as loss:
        for moves, steps in recipe.list_phases(len(samples[0][1])):
            optimizer = None if recipe.optimizer is None else recipe.optimizer(learns)
            augment = make_augmenter(learns.task, rngs, [min(size, n) for n in sizes] if stacked else None)
            trainer = Trainer(
                *(learns, x, y, recipe.sgd, drawn), loss=loss, moves=moves, optimizer=optimizer, augment=augment
            )
            trainer.run(steps, devices[0].stop)


def finish(begun: Begun, learned: Learned, before: Evaluation, loss_after: float | None) -> Trained:
    """Send the travelling part of the change, or what travels in its place, and keep what stays.

    `before`, `loss_after`: measured on the model that the device would use, or on the shared model if what is kept is
    confidential.

    Raises:
        ProtocolError: `not-finite`, training diverged.
    """
    device, action = begun.device, begun.action
    measured = (before.loss, before.gradient_norm, loss_after)
    if not all(math.isfinite(number) for number in measured if number is not None):
        raise ProtocolError("not-finite", "training diverged")
    trained = learned.model
    change = Model(trained.params - begun.start.params, trained.buffers, trained.counters)
    if learned.sent is not None:
        update = device.send(to_bytes(learned.sent.get_tensors()))
    else:
        update = send_update(device, change, device.layout.without(action.personal), action.codec)
    result: Trained = action.RESULT(
        update=update,
        n_samples=device.data.n_shared,
        cluster=begun.chosen.cluster,
        loss_before=before.loss,
        loss_after=loss_after,
        gradient_norm=before.gradient_norm,
        val_score=before.score,
        **learned.report,
    )
    if (kept := begun.get_kept(learned)) is not None:
        device.save_kept(kept, shareable=action.shareable)
    return result


# ------------------------------------------------------------------------------------------ several devices at once


@dataclass(frozen=True, slots=True)
class _Ready:
    """A device that may learn beside others. `number`: its position among the devices that were asked."""

    number: int
    begun: Begun
    recipe: Recipe


def train_together(
    devices: Sequence[Device], actions: Sequence[Train], recipe_of: Callable[[Train], Recipe]
) -> list[Result | None]:
    """Train small networks side by side (`fedge.models.training.Stack`); None for a device that must train alone.

    Each device's result agrees with that of `train_alone` to float tolerance. The choice depends only on the network
    (`can_stack`) and the step, never on the other devices.
    """
    found: list[Result | None] = [None] * len(devices)
    ready: list[_Ready] = []
    for number, (device, action) in enumerate(zip(devices, actions, strict=True)):
        recipe = recipe_of(action)
        if (
            action.personal
            or recipe.head_steps
            or recipe.moves != "all"
            or not device.data.n_shared
            or not can_stack(device.network)
        ):
            continue
        try:
            begun = begin(device, action)
        except Exception:  # noqa: BLE001, S112 - its own `run` says what is wrong
            continue
        if isinstance(begun, Begun) and begun.keeps is None:
            ready.append(_Ready(number, begun, recipe))
    for group in _iterate_groups(ready):
        try:
            results = _train_group(group)
        except Exception:  # noqa: BLE001, S112 - a user's network, or a label that it has no output for: each alone
            continue
        for one, result in zip(group, results, strict=True):
            found[one.number] = result
    return found


def _iterate_groups(ready: Sequence[_Ready]) -> Iterator[list[_Ready]]:
    """Group devices that can share a stack: with the same network, training and measurements, and similar sizes."""
    alike: dict[tuple[str, Recipe, int, bool], list[_Ready]] = defaultdict(list)
    for one in ready:
        device = one.begun.device
        steps = one.recipe.sgd.count_steps(device.data.n_shared)
        alike[device.fingerprint, one.recipe, steps, one.begun.action.measure].append(one)
    for members in alike.values():
        first = members[0].begun
        most = MOST_WEIGHTS if first.device.network.processor == CPU else MOST_WEIGHTS_ON_GPU
        n = int(np.clip(most // len(first.start.params), 1, MOST_MODELS))
        members.sort(key=lambda one: (one.begun.device.data.n_shared, one.number))
        yield from (members[k : k + n] for k in range(0, len(members), n))


def _train_group(group: Sequence[_Ready]) -> list[Result]:
    """Do what `train_alone` does for n devices that keep nothing, at once."""
    devices, starts = [one.begun.device for one in group], [one.begun.start for one in group]
    measure = group[0].begun.action.measure
    stack = Stack(devices[0].network, starts)
    validated = compute_scores(stack, *pad_samples([device.data.shared_validation for device in devices]))
    looks = [Evaluation(score) for score in validated]
    losses_after: list[float | None] = [None] * len(group)
    everything = pad_samples([device.data.shared for device in devices]) if measure else None
    if everything:
        measured = zip(looks, *compute_losses_and_gradient_norms(stack, *everything), strict=True)
        looks = [replace(look, loss=float(loss), gradient_norm=float(norm)) for look, loss, norm in measured]
    fit(stack, devices, group[0].recipe)
    if everything:
        losses_after = [float(loss) for loss in compute_mean_losses(stack, *everything)]
    return [
        _finish(one.begun, Learned(model), look, loss_after)
        for one, model, look, loss_after in zip(group, stack.present(), looks, losses_after, strict=True)
    ]


def _finish(begun: Begun, learned: Learned, before: Evaluation, loss_after: float | None) -> Result:
    try:
        return finish(begun, learned, before, loss_after)
    except (FailedError, ProtocolError) as error:
        return make_failure(error)
