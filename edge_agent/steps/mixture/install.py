"""Install a bundle of one model, the end of every method whose devices run one network."""

from __future__ import annotations

import math

from edge_agent.device.device import PERSONAL, Device
from edge_agent.learning import private_model
from edge_agent.learning.evaluation import fit_final_offset, fit_own_offset, measure_model
from edge_agent.learning.frame import assemble_model
from edge_agent.learning.mixture import TIE
from export import Candidate, GateWeights, Mixture
from fedge.data.problems.calibration import PLAIN
from fedge.models.training import Trainer, compute_mean_loss
from fedge.steps.mixture.install import FineTune, Install, Installed, Served
from fedge.steps.training.train import find_kept
from fedge.tensors.layers import Layers
from fedge.tensors.layout import Model
from fedge.wire.messages import Role


def run(device: Device, action: Install) -> Installed:
    """Write the bundle of the model that the action describes."""
    model, role = make_served_model(device, action), Role.GLOBAL if action.kept_by is None else Role.PRIVATE
    if action.fine_tune is not None and device.data.n_train:
        model, role = fine_tune(device, model, action.fine_tune), Role.PRIVATE
    return install_alone(device, model, role, action.method)


def load_kept(device: Device, action: Served) -> Layers | None:
    """Return what the run's last training kept on the device, or None, for example if its step is unknown."""
    if action.kept_by is None or device.files.read(PERSONAL) is None:
        return None
    return device.load_kept(action.kept_by, find_kept(action.kept_by, action.personal, device.layout, device.steps))


def make_served_model(device: Device, action: Served) -> Model:
    """Return the model of a final order, combined with what was kept."""
    mine = load_kept(device, action)
    model = assemble_model(device, action.model, action.personal, mine, action.initial)
    return model if action.kept_by is None else device.overlay_kept(action.kept_by, model, mine)


def install_alone(device: Device, model: Model, role: Role, method: str) -> Installed:
    """Write one model unchanged as a bundle, a mixture of one model."""
    offset = fit_final_offset(device, model)
    alone = Mixture(
        candidates=(Candidate(role=role, name=role.value, model=model, offset=offset),),
        beta=0.0,
        gate=GateWeights.make_untrained(device.task.input_shape, 1),
    )
    return device.write_bundle(
        alone, method, measure_model(device, model, PLAIN, fit_own_offset(device, model)).metrics
    )


def fine_tune(device: Device, start: Model, tuning: FineTune) -> Model:
    """Train `start` on n >= 1 samples; return the first checkpoint of smallest validation loss.

    A single checkpoint is used regardless of validation; without validation samples, `otherwise` is used. If training
    diverges, the best earlier checkpoint is returned, or `start` if there is none.
    """
    network, validation = device.network, device.data.validation
    checkpoints = sorted(set(tuning.checkpoints))
    network.load(start)
    trainer = Trainer(network, *device.data.training, tuning.sgd, device.make_rng())
    if len(checkpoints) == 1 or not len(validation[1]):
        trainer.run(checkpoints[0] if len(checkpoints) == 1 else tuning.otherwise, device.stop)
        return private_model.run_or_revert(network.dump, start)
    best, smallest = start, math.inf
    for before, after in zip([0, *checkpoints], checkpoints, strict=False):
        trainer.run(after - before, device.stop)
        loss = compute_mean_loss(network, *validation)
        if loss < smallest - TIE:  # False for NaN
            best, smallest = network.dump(), loss
    return best
