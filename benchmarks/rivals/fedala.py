"""FedALA: before it trains, a device mixes the global head into its own, number by number, as its samples say.

Source: Zhang et al., "FedALA: Adaptive Local Aggregation for Personalized Federated Learning", AAAI 2023, Algorithm 1,
p = 1: the base is the global one, the head is l + (g - l) W with W in [0, 1] learned by SGD at rate 1 on 80 % of the
samples: in the first round until the last ten losses have a standard deviation below 0.1 (at most 100 passes), later in
one pass. Then all of it trains, and the server averages. W and the head stay on the device; what is sent is shaped by
them, so both learn from D_L alone. Departure: the first round has no own head yet, W begins in the second.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, Final

import numpy as np

from coordinator.methods.baselines.personal_layers import PersonalLayers, PersonalState
from fedge.steps.training.train import Train
from fedge.tensors.layout import HEAD, Layout, Model, Selector, TensorInfo

if TYPE_CHECKING:
    from edge_agent.device.device import Device
    from edge_agent.learning.frame import Learned
    from fedge.steps.contract import Result
    from fedge.tensors.layers import Layers

OWN, MIX = "own", "mix"
SHARE, RATE, SPREAD, LAST, MOST = 0.8, 1.0, 0.1, 10, 100
FRESH: Final = -1.0
"""In place of W before there is one."""


class TrainAla(Train, frozen=True, kw_only=True):
    """The contract: as `Train`; head and W are kept."""

    STEP: ClassVar = "train_ala"
    DEVICE: ClassVar = __name__

    @staticmethod
    def select_kept(personal: Selector, layout: Layout) -> Layout:
        """Both as vectors, as long as the head."""
        del personal
        shape = (layout.select(HEAD).n_params,)
        return Layout(tensors=(TensorInfo(name=MIX, shape=shape), TensorInfo(name=OWN, shape=shape)))


class FedAla(PersonalLayers[PersonalState]):
    """The server half: FedAvg."""

    name = "fedala"
    steps = (TrainAla,)
    needs_head = True

    def make_step(self, state: PersonalState, **common: Any) -> TrainAla:  # noqa: ARG002 - the same in all rounds
        """What a device does in a round."""
        return TrainAla(**common)


def run(device: Device, action: TrainAla) -> Result:
    """The device half, in the frame that all training steps share."""
    from edge_agent.learning.frame import train_alone

    return train_alone(device, action, lambda w, mine: learn(device, action, w, mine))


def learn(device: Device, action: TrainAla, w: Model, mine: Layers | None) -> Learned:
    """The trained model, and its head with W."""
    from edge_agent.learning.frame import Learned
    from fedge.models.training import Trainer

    network, (x, y), sgd = device.network, device.data.shared, action.sgd
    head = network.get_slice("head")
    mix = np.full_like(w.params[head], FRESH) if mine is None else mixture(device, action, w, mine)
    network.load(w if mine is None else mixed(w, mine[OWN], mix, head))
    Trainer(network, x, y, sgd, device.make_rng()).run(sgd.count_steps(len(y)), device.stop)
    trained = network.dump()
    kept = np.concatenate([mix, trained.params[head]])
    return Learned(trained, Model(kept, trained.buffers[:0], trained.counters[:0]))


def mixture(device: Device, action: TrainAla, w: Model, mine: Layers) -> np.ndarray:
    """W, learned from where it was, at first from ones."""
    import torch

    from fedge.models.problems.cross_entropy import cross_entropy
    from fedge.models.training import to_tensor

    network, (x, y), rng = device.network, device.data.shared, device.make_rng(1)
    head = network.get_slice("head")
    own = mine[OWN]
    first = bool((mine[MIX] == FRESH).all())
    mix = np.ones_like(own) if first else mine[MIX].copy()
    chosen = rng.permutation(len(y))[: max(1, round(SHARE * len(y)))]
    losses: list[float] = []
    for _ in range(MOST if first else 1):
        for batch in np.array_split(chosen, max(1, len(chosen) // action.sgd.batch_size)):
            network.load(mixed(w, own, mix, head))
            network.gradient.zero_()
            inputs, labels = (to_tensor(each[batch], network.processor) for each in (x, y))
            network.backward(cross_entropy, inputs, labels)
            gradient = network.gradient[head].cpu().numpy()
            mix = np.clip(mix - RATE * gradient * (w.params[head] - own), 0, 1)
        with torch.no_grad():
            losses.append(cross_entropy(network.module, inputs, labels).item())
        if len(losses) > LAST and np.std(losses[-LAST:]) < SPREAD:
            break
    return np.asarray(mix, np.float32)


def overlay(model: Model, kept: Layers, layout: Layout) -> Model:
    """The global model with the mixed head."""
    return mixed(model, kept[OWN], kept[MIX], slice(-layout.select(HEAD).n_params, None))


def mixed(model: Model, own: np.ndarray, mix: np.ndarray, head: slice) -> Model:
    """The model whose head is own + (its - own) W; its own head as it is before there is a W."""
    params = model.params.copy()
    params[head] = own + (params[head] - own) * np.maximum(mix, 0)
    return Model(params, model.buffers, model.counters)
