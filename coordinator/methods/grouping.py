"""Profiles that can be compared; devices as arms of their group's bandit; what the bandit learns (FedEPC section 5)."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping, Sequence

from coordinator.fleet import Answer, Device
from coordinator.methods import declined
from coordinator.selection import ccmab
from fedge.messages import Context, Sgd, Trained

log = logging.getLogger("fedge.method")


def of_one_length(new: Mapping[str, Sequence[float]], known: Mapping[str, Sequence[float]]) -> frozenset[str]:
    """Ids of the new profiles that can be compared: as long as the known ones, or, without any, as most of them are."""
    lengths = Counter(len(profile) for profile in (known or new).values())
    q = lengths.most_common(1)[0][0] if lengths else 0
    for i in (i for i, profile in new.items() if len(profile) != q):
        log.warning("event=profile_refused device=%s its length differs from that of the others", i)
    return frozenset(i for i, profile in new.items() if len(profile) == q)


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
    assert result.loss_before is not None  # who chooses by a bandit orders `measure`, and `fleet.checks` refuses
    assert result.loss_after is not None  # an answer without
    assert result.gradient_norm is not None
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
