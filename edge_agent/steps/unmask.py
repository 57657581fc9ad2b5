"""Reveal neighbours' shares that open one sum, if it covers enough devices; a session is opened for one sum only."""

from __future__ import annotations

from typing import Final

from msgspec import Struct

from edge_agent.device import Device, FailedError
from edge_agent.masking import Masked, Session
from fedge.masking import too_close
from fedge.messages import Why
from fedge.shamir import SHARE_BYTES
from fedge.step import Declined, Result
from fedge.steps.unmask import Unmask, Unmasked

_SEED: Final = slice(0, SHARE_BYTES)
_KEY: Final = slice(SHARE_BYTES, 2 * SHARE_BYTES)


class Summed(Struct, frozen=True):
    """The opened sum: positions."""

    positions: tuple[int, ...]


def run(device: Device, action: Unmask) -> Result:
    """For each neighbour in this device's masks: the seed's share if it is summed, else the key's."""
    session = Session(device, action.session)
    roster, own = session.roster(action.roster)
    session.shared(roster)
    mine, before = session.read(Masked), session.read(Summed)
    if mine is None:
        raise FailedError("this device has masked nothing for this sum")
    if before is not None and before.positions != action.summed:
        raise FailedError("another sum of this session was opened")
    if action.summed != tuple(sorted(set(action.summed))) or action.summed[-1:] > (len(roster.members) - 1,):
        raise FailedError("positions that are not in the roster, or not ascending")
    devices = roster.ids(action.summed)
    reason = too_close(devices, session.sums(), device.min_cohort)
    if not reason and not roster.connected(action.summed):
        reason = "a sum of parts that no masks join"
    if reason:
        return Declined(why=Why.TOO_FEW, reason=reason)
    session.opened(devices)
    session.keep(Summed(action.summed))
    shares = {k: roster.unseal(session.encryption, k, own, sealed) for k, sealed in mine.shares.items()}
    summed = set(action.summed)
    return Unmasked(
        seeds={k: share[_SEED] for k, share in shares.items() if share is not None and k in summed},
        keys={k: share[_KEY] for k, share in shares.items() if share is not None and k not in summed},
    )
