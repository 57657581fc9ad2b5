"""Averaged: each device predicts with the running mean of what it has learned, an example of a step of one's own.

A device trains the global model w as in FedAvg, which gives w_i, and moves a model theta of its own:

    theta <- decay theta + (1 - decay) w_i               (Polyak and Juditsky, 1992, with a forgetting mean)

The server averages w_i; theta stays on the device and is what its bundle predicts with. The first theta is w_i. Theta
learns from shareable samples alone, since w_i does. For methods with a personal model that do better, see `fedge
methods`: ditto, apfl, pfedme.

It brings a step of its own, which the owner of each device installs with --steps:

    export PYTHONPATH=examples
    fedge compare --alpha 0.1 --methods fedavg,methods.averaged:Averaged,methods.averaged:Averaged:bundle=global

    fedge sample --devices 12
    fedge coordinator --broker localhost:1883 --federation shop --home server --task digits --devices 12 \
        --method methods.averaged:Averaged
    fedge agent --broker localhost:1883 --federation shop --id cam1 --home cam1 --task digits --data samples/cam1.npz \
        --steps methods.averaged:TrainAveraged
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, Literal

from msgspec import Struct

from coordinator.methods.baselines.personal_layers import PersonalLayers, PersonalState
from fedge.steps import Layers, Layout, Model, Selector, Share, Train

if TYPE_CHECKING:
    from edge_agent.steps import Device, Learned
    from fedge.steps import Result


class TrainAveraged(Train, frozen=True, kw_only=True):
    """The contract: `Train`, after which the device moves theta."""

    STEP: ClassVar = "train_averaged"
    DEVICE: ClassVar = __name__

    decay: Share

    @staticmethod
    def select_kept(personal: Selector, layout: Layout) -> Layout:
        """Theta, a whole model."""
        del personal
        return layout


class AveragedOptions(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`decay`: share of theta that stays in a round; `bundle`: which of both models devices install."""

    decay: Share = 0.5
    bundle: Literal["personal", "global"] = "personal"


class Averaged(PersonalLayers[PersonalState]):
    """The server half: FedAvg of w, while theta stays where it is."""

    name = "averaged"
    steps = (TrainAveraged,)
    Options: ClassVar[type[Struct]] = AveragedOptions

    def make_step(self, state: PersonalState, **common: Any) -> TrainAveraged:  # noqa: ARG002 - the same in all rounds
        """What a device does in a round."""
        return TrainAveraged(decay=self.options.decay, **common)

    def find_kept_step(self, state: PersonalState) -> str | None:
        """Whether a bundle is made of theta."""
        return super().find_kept_step(state) if self.options.bundle == "personal" else None


def run(device: Device, action: TrainAveraged) -> Result:
    """The device half, in the frame that all training steps share."""
    from edge_agent.steps import train_alone

    return train_alone(device, action, lambda w, mine: learn(device, action, w, mine))


def learn(device: Device, action: TrainAveraged, w: Model, mine: Layers | None) -> Learned:
    """w_i, of which the change is sent, and theta, which is kept, from the global model w."""
    from edge_agent.steps import Learned, Recipe, fit

    device.network.load(w)
    fit(device.network, [device], Recipe(action.sgd))
    w_i = device.network.dump()
    before = w_i if mine is None else mine.model
    theta = before.params + (1 - action.decay) * (w_i.params - before.params)
    return Learned(w_i, kept=Model(theta.astype(w_i.params.dtype), w_i.buffers, w_i.counters))


def overlay(model: Model, kept: Layers, layout: Layout) -> Model:  # noqa: ARG001 - the signature of all steps
    """What a device predicts with: theta, in place of the model that it is served."""
    return kept.model
