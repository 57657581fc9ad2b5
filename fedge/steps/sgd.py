"""How a device learns: the recipe that travels with an order."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Final, Literal, TypeVar, get_args

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType

from fedge.system.moved import alias_members

TRAINING_PASSES: Final = 3
"""Cost of a training step in forward passes: one for the forward pass, two for the backward pass."""
RECIPE: Final = "recipe"
"""Name under which a device announces, among its steps, the newest version of the recipe that it knows."""
RECIPE_VERSION: Final = 2
"""Version of the recipe. Version 0 is SGD with momentum, all that fedge 0.2 knew; 1 has every field of `Sgd`; 2 has
noise in other answers than updates (`fedge.steps.noise`)."""
OF_SGD: Final = 1
"""Version of the recipe from which a device knows every field of `Sgd`."""
VERSION_STEP: Final = 1000
"""An order whose recipe has version v says the version of its step plus v times this number."""

Optimizer = Literal["sgd", "adam", "adamw"]
"""A rule by which weights move (`fedge.models.optimizer`)."""
ClassWeights = Literal["balanced"]
"""Weights of the classes in the loss; balanced: all classes of the device count the same in all."""
V = TypeVar("V")


@alias_members(steps_for="count_steps", passes="count_passes")
class Sgd(Struct, frozen=True, kw_only=True):
    """The recipe of local training: optimiser and loss. The optimiser's state begins afresh in each participation.

    A field that is UNSET is absent from the order. An order without such fields is one that fedge 0.2 understands.

    `momentum`: of Adam, it is the decay of the mean gradient, beta1. `clip_norm`: largest L2 norm of a step's
    gradient; a longer one is shortened. `label_smoothing`: the share of the target that is spread over all classes.
    `class_weights`: by the labels of the samples that learn, so those of D_L for whatever leaves the device.
    """

    steps: Annotated[int, Meta(ge=0, le=10**7)] = 10
    epochs: Annotated[int, Meta(ge=0, le=10**5)] = 0  # if > 0, passes over the samples, in place of `steps`
    batch_size: Annotated[int, Meta(ge=1, le=2**20)] = 32
    learning_rate: Annotated[float, Meta(gt=0, le=100)] = 0.05
    momentum: Annotated[float, Meta(ge=0, lt=1)] = 0.9
    proximal_mu: Annotated[float, Meta(ge=0)] = 0.0  # FedProx; 0 is plain SGD
    weight_decay: Annotated[float, Meta(ge=0, le=1)] = 0.0  # times the weights, added to the gradient; adamw: beside it
    optimizer: Optimizer | UnsetType = UNSET  # SGD with momentum
    nesterov: bool | UnsetType = UNSET  # whether SGD looks ahead by its momentum
    clip_norm: Annotated[float, Meta(gt=0, le=1e6)] | UnsetType = UNSET
    label_smoothing: Annotated[float, Meta(ge=0, lt=1)] | UnsetType = UNSET
    class_weights: ClassWeights | UnsetType = UNSET

    def count_steps(self, n: int) -> int:
        """Return the number of steps for n samples: `steps`, or as many as `epochs` passes need."""
        return -(-self.epochs * n // max(1, min(self.batch_size, n))) if self.epochs else self.steps

    def count_passes(self, steps: int, n: int) -> float:
        """Return the cost of these steps on n samples, in forward passes of one sample."""
        return TRAINING_PASSES * steps * min(self.batch_size, n)

    @property
    def parts(self) -> dict[str, object]:
        """What this recipe has beyond SGD with momentum, by the fields' names."""
        later = ("optimizer", "nesterov", "clip_norm", "label_smoothing", "class_weights")
        found = {name: getattr(self, name) for name in later}
        return {name: value for name, value in found.items() if value and value != get_args(Optimizer)[0]}

    @property
    def version(self) -> int:
        """The lowest version of the recipe that can say this."""
        return OF_SGD if self.parts else 0


def iterate_recipes(value: object) -> Iterator[Sgd]:
    """Yield the recipes that an action holds, at any depth."""
    if isinstance(value, Sgd):
        yield value
    elif isinstance(value, Struct):
        for name in value.__struct_fields__:
            yield from iterate_recipes(getattr(value, name))
    elif isinstance(value, tuple):
        for item in value:
            yield from iterate_recipes(item)


def scale_learning_rates(value: V, factor: float) -> V:
    """Return an action whose recipes have `factor` times their learning rates; an action without recipes as it is."""
    if isinstance(value, Sgd):
        return msgspec.structs.replace(value, learning_rate=factor * value.learning_rate)
    if isinstance(value, Struct):
        now = {name: getattr(value, name) for name in value.__struct_fields__}
        scaled = {name: scale_learning_rates(own, factor) for name, own in now.items()}
        changes = {name: own for name, own in scaled.items() if own is not now[name]}
        return msgspec.structs.replace(value, **changes) if changes else value
    if isinstance(value, tuple):
        items = tuple(scale_learning_rates(item, factor) for item in value)
        return value if all(a is b for a, b in zip(items, value, strict=True)) else items  # type: ignore[return-value]
    return value
