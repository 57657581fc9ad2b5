"""A bundle of one model: the end of every method whose devices run one network."""

from __future__ import annotations

import math

from edge_agent.device.device import PERSONAL, Device
from edge_agent.learning import private_model
from edge_agent.learning.evaluation import final_prior, logits, metrics, prior
from edge_agent.learning.frame import whole
from edge_agent.learning.mixture import PLAIN, TIE
from export import Candidate, GateWeights, Mixture
from fedge.bundle.formula import calibrated
from fedge.models.training import Trainer, mean_loss
from fedge.steps.mixture.install import FineTune, Install, Installed, Served
from fedge.steps.training.train import kept_by
from fedge.tensors.layers import Layers
from fedge.tensors.layout import Model
from fedge.wire.messages import Role


def run(device: Device, action: Install) -> Installed:
    """Write the bundle of the model that the action describes."""
    model, role = served(device, action), Role.GLOBAL if action.kept_by is None else Role.PRIVATE
    if action.fine_tune is not None and device.data.n_train:
        model, role = fine_tuned(device, model, action.fine_tune), Role.PRIVATE
    return install_alone(device, model, role, action.method)


def kept(device: Device, action: Served) -> Layers | None:
    """What the run's last training kept here; None: nothing, for example if the device does not know the step."""
    if action.kept_by is None or device.files.read(PERSONAL) is None:
        return None
    return device.kept(action.kept_by, kept_by(action.kept_by, action.personal, device.layout, device.steps))


def served(device: Device, action: Served) -> Model:
    """The model of a final order, combined with what was kept."""
    mine = kept(device, action)
    model = whole(device, action.model, action.personal, mine, action.initial)
    return model if action.kept_by is None else device.overlaid(action.kept_by, model, mine)


def install_alone(device: Device, model: Model, role: Role, method: str) -> Installed:
    """Write one model unchanged as a bundle: a mixture of one."""
    alone = Mixture(
        candidates=(Candidate(role=role, name=role.value, model=model),),
        log_prior=final_prior(device),
        beta=0.0,
        gate=GateWeights.untrained(device.task.input_shape, 1),
    )
    log_p = calibrated(logits(device, model, device.data.x_val), prior(device), PLAIN)
    return device.write_bundle(alone, method, metrics(device, log_p))


def fine_tuned(device: Device, start: Model, tuning: FineTune) -> Model:
    """`start` trained on n >= 1 samples: the checkpoint with the smallest validation loss, the earliest on a tie.

    A single checkpoint is used regardless of validation; without validation samples, `otherwise` is. If training
    diverges, the best earlier checkpoint counts, or `start` if there is none.
    """
    network, validation = device.network, device.data.validation
    checkpoints = sorted(set(tuning.checkpoints))
    network.load(start)
    trainer = Trainer(network, *device.data.training, tuning.sgd, device.rng())
    if len(checkpoints) == 1 or not len(validation[1]):
        trainer.run(checkpoints[0] if len(checkpoints) == 1 else tuning.otherwise, device.stop)
        return private_model.or_before(network.dump, start)
    best, smallest = start, math.inf
    for before, after in zip([0, *checkpoints], checkpoints, strict=False):
        trainer.run(after - before, device.stop)
        loss = mean_loss(network, *validation)
        if loss < smallest - TIE:  # False for NaN
            best, smallest = network.dump(), loss
    return best
