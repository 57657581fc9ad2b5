"""A coordinator's introducer as a process that can be killed:

python -m tests.support.introducing HOST PORT HOME CAMPAIGN DEVICE...
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from coordinator.rollout.introduction import Introducer
from coordinator.rollout.settings import IntroductionSettings
from fedge.wire.connection.broker import BrokerSettings
from tests.support.runtime_device import FEDERATION

SETTINGS = IntroductionSettings(stages="0.1,1", soak_s=0.0, absent_s=120.0)


async def main(host: str, port: str, home: str, campaign: str, *devices: str) -> None:
    """Introduce a campaign's bundles until killed."""
    broker = BrokerSettings(host, int(port))
    introducer = Introducer(Path(home), broker, FEDERATION, SETTINGS, lambda event, fields: None)
    introducer.introduce(int(campaign), devices)
    await introducer.run()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
