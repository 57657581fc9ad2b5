"""What tests of introductions share: a bundle as a campaign leaves it, and an introducer that can be killed:

python -m tests.support.introducing HOST PORT HOME CAMPAIGN DEVICE...
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from pathlib import Path

from coordinator.rollout.introduction import Introducer
from coordinator.rollout.settings import IntroductionSettings
from fedge.bundle.campaign import make_campaign_files
from fedge.wire.connection.broker import BrokerSettings
from tests.deploy.bundles import digest, variant
from tests.support.runtime_device import FEDERATION

SETTINGS = IntroductionSettings(stages="0.1,1", soak_s=0.0, absent_s=120.0)


def leave_bundle(home: Path, campaign: int, gate: Callable[[bytes], bytes]) -> str:
    """As an agent leaves it after a campaign; its digest."""
    folder = variant(home / "bundles" / "2", release=2, gate=gate)
    for name, data in make_campaign_files(campaign).items():
        (folder / name).write_bytes(data)
    return digest(folder)


async def main(host: str, port: str, home: str, campaign: str, *devices: str) -> None:
    """Introduce a campaign's bundles until killed."""
    broker = BrokerSettings(host, int(port))
    introducer = Introducer(Path(home), broker, FEDERATION, SETTINGS, lambda event, fields: None)
    introducer.introduce(int(campaign), devices)
    await introducer.run()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
