"""A device's runtime with its link, as a task, or as a process that can be killed:

python -m tests.support.runtime_device HOST PORT HOME DEVICE
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import msgspec
import numpy as np

from deploy import load
from deploy.updates.answering import ActiveBundle
from deploy.updates.examination import Limits
from deploy.updates.link import Link, Outcome
from deploy.updates.slots import Slots
from deploy.updates.trust import install_root
from fedge.bundle.manifest import read_bundle
from fedge.data.preprocessing import preprocess
from fedge.data.validation import Validation
from fedge.system.files import write_atomically
from fedge.wire.connection.broker import BrokerSettings
from fedge.wire.topics import Topics
from fedge.wire.transport import Transport
from tests.deploy.bundles import GOLDEN, source

FEDERATION = "test"
LENIENT = Limits(probation_s=0, latency_ratio=100.0, latency_slack_ms=1000.0)
"""What is asserted is never the time."""


def prepare(home: Path, first: Path, root: bytes, *, labels_of: Path | None = None) -> Path:
    """A device that answers with the bundle `first` and whose samples are labelled as the bundle `labels_of` says."""
    slots = Slots(home)
    slots.stage(*source(first))
    slots.switch()
    slots.confirm()
    install_root(home, root)
    write_atomically(
        home / "outcome.json", msgspec.json.encode(Outcome(signed=(read_bundle(first).digest,)))
    )  # a rollout's
    runtime = load(first if labels_of is None else labels_of)
    with np.load(GOLDEN.parent / "expected.npz") as arrays:
        samples = np.tile(arrays["x"], (5, *[1] * (arrays["x"].ndim - 1)))
    Validation(preprocess(runtime.task, runtime.add_batch_axis(samples)), runtime.predict(samples).class_index).save(
        home
    )
    return home


@asynccontextmanager
async def device(
    settings: BrokerSettings, home: Path, device_id: str, limits: Limits = LENIENT, *, waits: bool = False
) -> AsyncIterator[ActiveBundle]:
    """Switched on within. `waits`: bundles of campaigns wait for their introduction."""
    slots = Slots(home)
    answering = ActiveBundle(slots, limits)
    link = Link(device_id, FEDERATION, home, slots, answering, waits=waits)
    transport = Transport(settings, Topics(FEDERATION).make_client_id("serve", device_id))
    await link.attach(transport)
    async with transport:
        running = asyncio.gather(link.follow(), link.publish_health())
        try:
            yield answering
        finally:
            running.cancel()
            with suppress(asyncio.CancelledError):
                await running


async def main(host: str, port: str, home: str, device_id: str) -> None:
    """Run until killed."""
    async with device(BrokerSettings(host, int(port)), Path(home), device_id):
        await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
