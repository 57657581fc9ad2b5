"""`fit_mixture` with another gate, without energies, or with one model in its place: rows of scmoe_pfl.md 17."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

import numpy as np

from edge_agent.learning import gate, private_model
from edge_agent.steps.mixture import fit_mixture
from export import GateWeights
from fedge.steps.mixture.fit_mixture import FitMixture
from fedge.steps.mixture.install import Installed
from fedge.wire.messages import Role

if TYPE_CHECKING:
    from edge_agent.device.device import Device
    from edge_agent.learning.private_model import Samples
    from fedge.tasks import DeviceData
    from fedge.tensors.layout import Model

Learns = Literal["validation", "training", "training+validation", "untrained", "uniform"]
"""What the gate learns from; untrained: nothing, the energies decide; uniform: nor they, all count the same."""


class FitAblatedMixture(FitMixture, frozen=True, kw_only=True):
    """`learns` and `offset` are in place of `gate` and `energy_offset`.

    `alone`: one model in place of the mixture, the mean of the experts, the best of them, or the private model.
    """

    STEP: ClassVar = "fit_ablated_mixture"
    DEVICE: ClassVar = __name__

    learns: Learns
    offset: Literal["never", "untrained", "always"]
    energy: bool = True
    alone: Literal["average", "best", "private"] | None = None


def run(device: Device, action: FitAblatedMixture) -> Installed:
    experts = fit_mixture.fetch_experts(device, action)
    if action.alone in {"average", "best"} and experts:
        average = action.alone == "average"
        one = private_model.average_models(experts) if average else fit_mixture.choose_best(device, experts)
        return write_alone(device, action, one, Role.EXPERT)
    private = fit_mixture.fit_private(device, action, experts)
    if action.alone == "private" and private:
        return write_alone(device, action, private, Role.PRIVATE)
    models, roles = fit_mixture.make_candidates(private, experts)
    samples = gate_data(device.data, action.learns)
    levelled = action.offset == "always" or (action.offset == "untrained" and len(samples[1]) < gate.MIN_SAMPLES)
    offsets = fit_mixture.compute_mean_energies(device, models) if levelled else np.zeros(len(models))
    weights = fit_mixture.fit_gate(device, models, roles, samples, offsets, action.top, energy=action.energy)
    energy = action.energy and action.learns != "uniform"
    return fit_mixture.write_mixture(device, models, roles, weights, offsets, action.top, energy=energy)


def write_alone(device: Device, action: FitAblatedMixture, model: Model, role: Role) -> Installed:
    untrained = GateWeights.make_untrained(device.task.input_shape, 1)
    return fit_mixture.write_mixture(device, [model], (role,), untrained, np.zeros(1), action.top)


def gate_data(data: DeviceData, what: Learns) -> Samples:
    match what:
        case "validation":
            return data.validation
        case "training":
            return data.training
        case "training+validation":
            return data.labelled
        case "untrained" | "uniform":
            return data.x_val[:0], data.y_val[:0]
