"""Confirm a sum that covers enough devices, all masked with the same ones: one sum in a session."""

from __future__ import annotations

from edge_agent.device.device import Device, FailedError
from edge_agent.privacy.masking import Confirmed, Masked, Session
from fedge.steps.contract import Declined, Result
from fedge.steps.masked.confirm_sum import ConfirmSum, SumConfirmed
from fedge.wire.messages import Why


def run(device: Device, action: ConfirmSum) -> Result:
    """The signed confirmation; the sum is on disk before."""
    session = Session(device, action.session)
    roster, own = session.roster(action.roster)
    session.shared(roster)
    sharers, summed = session.positions(action.sharers, roster), session.positions(action.summed, roster)
    masked, confirmed = roster.masked_with(action.sharers), roster.summing(action.sharers, action.summed)
    mine, before = session.read(Masked), session.read(Confirmed)
    if before is not None and before.statement != confirmed:
        raise FailedError("another sum of this session was confirmed")
    if not set(summed).issubset(sharers):
        raise FailedError("a sum of devices that have shared no secrets")
    if own in summed if mine is None else mine.statement != masked:
        raise FailedError("this device has not masked with these devices")
    near = set(roster.neighbours(own)).intersection(summed)
    if unproven := near - roster.signers(masked, action.statements):
        raise FailedError(f"{', '.join(roster.ids(sorted(unproven)))} did not sign to have masked with these devices")
    devices = roster.ids(summed)
    reason = session.sums().too_close(devices, device.min_cohort)
    if not reason and not roster.joined(summed):
        reason = "a sum of parts that too few masks join"
    if reason:
        return Declined(why=Why.TOO_FEW, reason=reason)
    session.note(devices)
    session.keep(Confirmed(confirmed, summed))
    return SumConfirmed(confirmation=session.signing.sign(confirmed))
