"""pFedMe: a personal model per device that the Moreau envelope of its loss ties to the shared one.

Source: T. Dinh et al., "Personalized Federated Learning with Moreau Envelopes", NeurIPS 2020, Algorithm 1.
A device starts at the global model, w_{i,0} = w. In each local round r it draws a batch and takes K steps of SGD on
f_i(theta) + (lambda / 2) ||theta - w_{i,r}||^2 (Eq. 7), which gives theta_{i,r}; then

    w_{i,r+1} = w_{i,r} - eta lambda (w_{i,r} - theta_{i,r})            (Algorithm 1, line 8)

The server averages w_{i,R} (beta = 1); theta_{i,R} stays on the device and is what its bundle predicts with.
Departures: means are weighted by samples, as FedAvg's; the first theta of a round starts at w, later ones where the
last ended; running statistics are those of theta. Theta shapes what is sent, so it learns from shareable samples alone.

It brings a step of its own, which the owner of each device installs with --steps:

    export PYTHONPATH=examples
    fedge compare --alpha 0.1 --methods fedavg,methods.pfedme:PFedMe,methods.pfedme:PFedMe:bundle=global

    fedge sample --devices 12
    fedge coordinator --broker localhost:1883 --federation shop --home server --task digits --devices 12 \
        --method methods.pfedme:PFedMe
    fedge agent --broker localhost:1883 --federation shop --id cam1 --home cam1 --task digits --data samples/cam1.npz \
        --steps methods.pfedme:TrainPFedMe
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

import msgspec
from msgspec import Meta, Struct

from coordinator.methods.baselines.personal_layers import PersonalLayers, PersonalState
from fedge.steps import Count, Layers, Layout, Model, Selector, Train

if TYPE_CHECKING:
    from edge_agent.steps import Device, Learned
    from fedge.steps import Result

Positive = Annotated[float, Meta(gt=0)]


class TrainPFedMe(Train, frozen=True, kw_only=True):
    """The contract: `Train` whose `sgd.steps` are the local rounds R and whose learning rate is that of theta."""

    STEP: ClassVar = "train_pfedme"
    DEVICE: ClassVar = __name__

    inner_steps: Count  # K
    moreau_lambda: Positive  # lambda
    outer_rate: Positive  # eta

    def passes(self, n_shared: int, n_train: int, n_val: int) -> float:
        """K steps of SGD for each that `Train` counts."""
        one = self.sgd.count_passes(self.sgd.count_steps(n_shared), n_shared)
        return super().passes(n_shared, n_train, n_val) + (self.inner_steps - 1) * one

    @staticmethod
    def select_kept(personal: Selector, layout: Layout) -> Layout:
        """Theta."""
        del personal
        return layout


class PFedMeOptions(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`inner_steps`: K; `moreau_lambda`: lambda; `outer_rate`: eta; `bundle`: which of both models devices install."""

    inner_steps: Annotated[int, Meta(ge=1, le=100)] = 5
    moreau_lambda: Positive = 15.0
    outer_rate: Positive = 0.05
    bundle: Literal["personal", "global"] = "personal"


class PFedMe(PersonalLayers[PersonalState]):
    """The server half: FedAvg of w, while theta stays where it is."""

    name = "pfedme"
    steps = (TrainPFedMe,)
    Options: ClassVar[type[Struct]] = PFedMeOptions

    def make_step(self, state: PersonalState, **common: Any) -> TrainPFedMe:  # noqa: ARG002 - the same in all rounds
        """What a device does in a round."""
        own = {name: getattr(self.options, name) for name in ("inner_steps", "moreau_lambda", "outer_rate")}
        return TrainPFedMe(**common, **own)

    def find_kept_step(self, state: PersonalState) -> str | None:
        """Whether a bundle is made of theta."""
        return super().find_kept_step(state) if self.options.bundle == "personal" else None


def run(device: Device, action: TrainPFedMe) -> Result:
    """The device half, in the frame that all training steps share."""
    from edge_agent.steps import train_alone

    return train_alone(device, action, lambda w, _: learn(device, action, w))


def learn(device: Device, action: TrainPFedMe, w: Model) -> Learned:
    """w_{i,R}, of which the change is sent, and theta_{i,R}, which is kept, from the global model w."""
    from edge_agent.steps import Learned, Trainer, draw_batches

    network, (x, y), rng = device.network, device.data.shared, device.make_rng()
    sgd = msgspec.structs.replace(action.sgd, proximal_mu=action.moreau_lambda)
    drawn = draw_batches(len(y), sgd.batch_size, rng)
    theta, params = w, w.params
    for _ in range(sgd.count_steps(len(y))):
        batch = next(drawn)
        network.load(theta)
        Trainer(network, x[batch], y[batch], sgd, rng, anchor=params).run(action.inner_steps, device.stop)  # Eq. 7
        theta = network.dump()
        params = params - action.outer_rate * action.moreau_lambda * (params - theta.params)  # line 8
    return Learned(Model(params, theta.buffers, theta.counters), kept=theta)


def overlay(model: Model, kept: Layers, layout: Layout) -> Model:  # noqa: ARG001 - the signature of all steps
    """What a device predicts with: theta, in place of the model that it is served."""
    return kept.model
