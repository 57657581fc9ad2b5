"""Reveal neighbours' shares that open the sum that this device has confirmed, if enough others have."""

from __future__ import annotations

from typing import Final

from edge_agent.device.device import Device, FailedError
from edge_agent.privacy.masking import Confirmed, Masked, Session
from fedge.privacy.masked_sums import read_signatures
from fedge.privacy.shares import SHARE_BYTES
from fedge.steps.contract import Result
from fedge.steps.masked.unmask import Unmask, Unmasked

_SEED: Final = slice(0, SHARE_BYTES)
_KEY: Final = slice(SHARE_BYTES, 2 * SHARE_BYTES)


def run(device: Device, action: Unmask) -> Result:
    """Return the shares of the neighbours' secrets: of the seed if the neighbour is in the sum, else of the key."""
    session = Session(device, action.session)
    roster, own = session.fetch_roster(action.roster)
    session.load_shared(roster)
    mine, confirmed = session.load(Masked), session.load(Confirmed)
    if mine is None:
        raise FailedError("this device has masked nothing for this sum")
    if confirmed is None:
        raise FailedError("this device has confirmed no sum of this session")
    signatures = read_signatures(device.fetch(action.confirmations))
    if reason := roster.explain_dispute(confirmed.summed, roster.find_signers(confirmed.statement, signatures)):
        raise FailedError(reason)
    shares = {k: roster.unseal(session.encryption, k, own, sealed) for k, sealed in mine.shares.items()}
    summed = set(confirmed.summed)
    return Unmasked(
        seeds={k: share[_SEED] for k, share in shares.items() if share is not None and k in summed},
        keys={k: share[_KEY] for k, share in shares.items() if share is not None and k not in summed},
    )
