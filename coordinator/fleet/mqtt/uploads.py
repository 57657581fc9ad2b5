"""Fetches and checks uploads named in reports, for the dispatcher (`coordinator.fleet.mqtt`) and intakes alike."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import resource
from collections.abc import Callable
from pathlib import Path
from typing import Final

from coordinator.fleet.fleet import read_valid_result
from coordinator.fleet.mqtt.checking import CheckPool
from coordinator.store.blobs import Blobs
from fedge.data.task import TaskSpec
from fedge.errors import ProtocolError
from fedge.membership.signed_messages import Plain, Signed
from fedge.steps.contract import Action, Result
from fedge.steps.masked.mask_keys import KeysMade, MaskKeys
from fedge.system.files import BlobFolder
from fedge.tensors import codecs
from fedge.tensors.layout import Layout
from fedge.wire.connection.packet_limits import SMALL_CHUNK
from fedge.wire.messages import BlobRef, Order, Report
from fedge.wire.topics import Topics
from fedge.wire.transfer.receiver import Receiver
from fedge.wire.transport import Transport

log = logging.getLogger("fedge.coordinator")

NO_EVIDENCE: Final = frozenset({"digest", "stalled", "unchecked"})
"""Refusals that prove nothing against a device, because the network or our own machine can cause them, too."""
LARGE_FETCHES: Final = 128
"""Most updates of several chunks fetched at once. With one chunk of each under way, the broker holds 64 MB."""
SMALL_FETCHES: Final = 1024
"""Most one-chunk updates fetched at once; fewer if the system does not allow two open files for each."""
GIVES_WAY_S: Final = 20.0
"""Time without any arriving byte after which an update gives its place to the next update and queues again."""
SPARE_FILES: Final = 256
"""Open files that fetches leave for everything else."""
SLACK_BYTES: Final = 1 << 20
"""Most bytes by which an encoded update may exceed its tensors, for headers and zstd on incompressible data."""


class Uploads:
    """The uploads of devices: fetched, checked and stored.

    Args:
        transport: not entered yet.
        received: folder of incoming uploads.
        blobs: where checked uploads are stored.
        topics: the topics of the federation.
        layout: the layout of the model.
        seal: signs a Want for its topic.
    """

    def __init__(
        self,
        transport: Transport,
        received: BlobFolder,
        blobs: Blobs,
        topics: Topics,
        layout: Layout,
        seal: Callable[[str, bytes], bytes],
    ) -> None:
        self.norms: dict[BlobRef, codecs.Norms] = {}
        """Norms of the updates that were checked here."""
        bound = 4 * sum(tensor.size for tensor in layout.tensors) * 2 + SLACK_BYTES
        self._receiver = Receiver(transport, received, max_bytes=bound, seal=seal)
        self._received, self._blobs = received, blobs
        self._topics = topics
        small = max(min(SMALL_FETCHES, (resource.getrlimit(resource.RLIMIT_NOFILE)[0] - SPARE_FILES) // 2), 1)
        self._small, self._large = asyncio.Semaphore(small), asyncio.Semaphore(LARGE_FETCHES)
        self._pool = CheckPool()

    def close(self) -> None:
        """End the processes that check updates."""
        self._pool.close()

    async def fetch(
        self, ref: BlobRef, device: str, layout: Layout | None, *, wanted: Callable[[], bool] = lambda: True
    ) -> bool:
        """Fetch and store a blob; an update must consist of these tensors of our model.

        Args:
            ref: the reference in a report of the device.
            device: the sender.
            layout: the update's tensors; None for plain bytes.
            wanted: polled when nothing has arrived for a while; returns whether the blob is still wanted.

        Returns:
            Whether the blob is stored; False if it is no longer wanted.

        Raises:
            ProtocolError: the blob is not what the device announced, or not what was asked for.
            TransportError: the broker does not let us fetch the blob.
        """
        while ref.digest not in self._blobs:
            if not await self._fetch_in_turn(ref, device):
                log.info("event=gives_way device=%s digest=%s", device, ref.digest)
                if not await asyncio.to_thread(wanted):
                    return False
            elif self._received is not self._blobs:
                with contextlib.suppress(FileNotFoundError):  # another report brought equal bytes, already stored
                    await self._move(ref, layout)
                    return True
        await self._check(ref, layout, self._blobs.get_path(ref.digest))
        return True

    async def _move(self, ref: BlobRef, layout: Layout | None) -> None:
        """Store a received blob after checking it."""
        file = self._received.get_path(ref.digest)
        try:
            await self._check(ref, layout, file)
            await asyncio.to_thread(self._blobs.take, file)
        finally:
            file.unlink(missing_ok=True)

    async def _check(self, ref: BlobRef, layout: Layout | None, file: Path) -> None:
        _require_size(ref, file)
        if layout is not None:
            self.norms[ref] = await self._pool.compute_norms(file, ref.codec, layout)

    async def _fetch_in_turn(self, ref: BlobRef, device: str) -> bool:
        """Fetch a blob in one of the limited places; False if the device does not respond and loses its place."""
        async with self._small if ref.size_bytes <= SMALL_CHUNK else self._large:
            try:
                await self._receiver.fetch(
                    ref,
                    chunks=self._topics.make_update_topic(device, ref.digest),
                    wants=self._topics.make_wants_topic(device),
                    device_id=device,
                    patience_s=GIVES_WAY_S,
                )
            except ProtocolError as error:
                if error.name != "stalled":
                    raise
                return False
        return True


def _require_size(ref: BlobRef, file: Path) -> None:
    """Refuse a false size of bytes that we already have, since other devices may be given this reference."""
    if (size_bytes := file.stat().st_size) != ref.size_bytes:
        raise ProtocolError("wrong-size", f"{ref.digest} has {size_bytes} bytes, not {ref.size_bytes}")


def read_answer(order: Order, action: Action, report: Report, task: TaskSpec, signed: Plain | Signed) -> Result:
    """Return the result in a report, if it answers its order; uploads are not fetched yet.

    Raises:
        ProtocolError: as in `coordinator.fleet.fleet.read_valid_result`, or the device has not signed its keys.
    """
    result = read_valid_result(action, report, task)
    if isinstance(result, KeysMade) and isinstance(action, MaskKeys):
        from fedge.privacy.masked_sums import make_member, require_genuine  # the cohort would refuse unsigned keys

        require_genuine([make_member(order.device_id, result)], order, action.session, signed)
    return result
