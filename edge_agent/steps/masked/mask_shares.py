"""Share the secrets behind this device's masks with its neighbours, once."""

from __future__ import annotations

import secrets

import msgspec

from edge_agent.device.device import Device, FailedError
from edge_agent.privacy.masking import Session, Shared
from fedge.privacy.masked_sums import make_commitment
from fedge.privacy.shares import SECRET_BYTES, split_secret
from fedge.steps.contract import Declined, Result, encode_body
from fedge.steps.masked.mask_shares import MaskShares, SharesMade
from fedge.wire.messages import Why


def run(device: Device, action: MaskShares) -> Result:
    """Share the seed of the device's own mask and its masking key, sealed for each neighbour."""
    session = Session(device, action.session)
    roster, own = session.fetch_roster(action.roster)
    if (n := len(roster.members)) < (fewest := device.min_cohort):
        return Declined(why=Why.TOO_FEW, reason=f"the cohort has {n} devices, but the owner wants {fewest}")
    known = session.load(Shared)
    if known is not None:
        if known.roster != roster.digest:
            raise FailedError("secrets were shared for another roster")
        return msgspec.msgpack.decode(known.result, type=SharesMade)
    neighbours, seed = roster.get_neighbours(own), secrets.token_bytes(SECRET_BYTES)
    holders = [k + 1 for k in neighbours]  # f(0) is the secret
    of_seed = split_secret(seed, roster.threshold, holders)
    of_key = split_secret(session.masking.private_bytes_raw(), roster.threshold, holders)
    result = SharesMade(
        sealed={k: roster.seal(session.encryption, own, k, of_seed[k + 1] + of_key[k + 1]) for k in neighbours},
        commitment=make_commitment(seed),
    )
    session.save(Shared(roster.digest, seed, encode_body(result)))
    return result
