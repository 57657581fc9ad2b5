"""Make key pairs for one masked sum; a repeated order gets the same keys."""

from __future__ import annotations

from edge_agent.device.device import Device
from edge_agent.privacy.masking import Session
from fedge.steps.contract import Result
from fedge.steps.masked.mask_keys import KeysMade, MaskKeys


def run(device: Device, action: MaskKeys) -> Result:
    """Return the public halves; the private ones are already on disk."""
    session = Session(device, action.session)
    session.start()
    encryption, masking, signing = session.public
    return KeysMade(encryption=encryption, masking=masking, signing=signing)
