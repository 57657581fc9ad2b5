"""Confirm a sum that covers enough devices, all of which masked with the same devices; only one sum in a session."""

from __future__ import annotations

from edge_agent.device.device import Device, FailedError
from edge_agent.privacy.masking import Confirmed, Masked, Session
from fedge.steps.contract import Declined, Result
from fedge.steps.masked.confirm_sum import ConfirmSum, SumConfirmed
from fedge.wire.messages import Why


def run(device: Device, action: ConfirmSum) -> Result:
    """Sign the confirmation of a sum, after the confirmation is on disk."""
    session = Session(device, action.session)
    roster, own = session.fetch_roster(action.roster)
    session.load_shared(roster)
    sharers, summed = session.fetch_positions(action.sharers, roster), session.fetch_positions(action.summed, roster)
    masked, confirmed = (
        roster.make_mask_statement(action.sharers),
        roster.make_sum_statement(action.sharers, action.summed),
    )
    mine, before = session.load(Masked), session.load(Confirmed)
    if before is not None and before.statement != confirmed:
        raise FailedError("another sum of this session was confirmed")
    if not set(summed).issubset(sharers):
        raise FailedError("the sum has devices that have shared no secrets")
    if own in summed if mine is None else mine.statement != masked:
        raise FailedError("this device has not masked with these devices")
    near = set(roster.get_neighbours(own)).intersection(summed)
    if unproven := near - roster.find_signers(masked, action.statements):
        raise FailedError(
            f"{', '.join(roster.get_ids(sorted(unproven)))} did not sign to have masked with these devices"
        )
    devices = roster.get_ids(summed)
    reason = session.load_sums().explain_too_close(devices, device.min_cohort)
    if not reason and not roster.are_joined(summed):
        reason = "too few masks join the parts of the sum"
    if reason:
        return Declined(why=Why.TOO_FEW, reason=reason)
    session.record_sum(devices)
    session.save(Confirmed(confirmed, summed))
    return SumConfirmed(confirmation=session.signing.sign(confirmed))
