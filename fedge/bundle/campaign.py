"""The campaign that left a bundle on its device, in a file beside the manifest.

A runtime with a broker holds such a bundle back until the campaign's introduction reaches the device. The manifest does
not name the file, so a copy of the bundle that a person installs enters service at once.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Final

import msgspec
from msgspec import Struct

from fedge.errors import MALFORMED
from fedge.wire.messages import Count

FILE: Final = "campaign.json"


class _Mark(Struct, frozen=True, kw_only=True):
    campaign: Count = 0


def make_campaign_files(campaign: int) -> Mapping[str, bytes]:
    """Return the file for a bundle's folder by its name; none for a bundle that enters service at once."""
    return {FILE: msgspec.json.encode(_Mark(campaign=campaign))} if campaign else {}


def read_campaign(folder: Path) -> int:
    """Return the number of the campaign that left the bundle in a folder; 0 if it may enter service at once."""
    try:
        return msgspec.json.decode((folder / FILE).read_bytes(), type=_Mark).campaign
    except (OSError, *MALFORMED):
        return 0
