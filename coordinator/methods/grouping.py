"""Devices as arms of their group's bandit (FedEPC section 5), and what the bandit learns from their answers."""

from __future__ import annotations

from collections.abc import Mapping

from coordinator.fleet import Answer, Device
from coordinator.methods import declined
from coordinator.selection import ccmab
from fedge.messages import Context, Sgd, Trained


def arm(device: Device, sgd: Sgd) -> ccmab.Arm:
    """A device as it is now; its work is that of one order."""
    context = device.context or Context(device_id=device.id)
    return ccmab.Arm(
        id=device.id,
        n_samples=device.n_samples,
        work=sgd.steps * sgd.batch_size,
        cpu_ghz=context.cpu_ghz,
        free_ram_gb=context.free_ram_gb,
    )


def outcome(answer: Answer) -> ccmab.Outcome | None:
    """What the bandit learns from an answer; None: the device failed or was silent."""
    result = answer.result
    if not isinstance(result, Trained):
        return None
    return ccmab.Outcome(
        loss_before=result.loss_before,
        loss_after=result.loss_after,
        gradient_norm=result.gradient_norm,
        seconds=answer.seconds,
    )


def observed(
    bandit: ccmab.State, selection: ccmab.Selection, answers: Mapping[str, Answer], settings: ccmab.Settings
) -> ccmab.State:
    """The bandit after a round: the loss drop of those that trained, -1 for silence, nothing from a refusal."""
    outcomes = {i: outcome(answers[i]) for i in selection.ids if i in answers and not declined(answers[i])}
    return ccmab.observe(bandit, selection, outcomes, settings)
