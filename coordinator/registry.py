"""Who is there: the devices of a federation as their retained status and their last context say it."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from coordinator.fleet import Device
from fedge.errors import ProtocolError
from fedge.messages import Context, Presence, Status


@dataclass(slots=True)
class _Known:
    status: Status
    context: Context | None = None


class Registry:
    """All devices that ever showed themselves. Kept in memory: a status is retained by the broker and told anew."""

    def __init__(self, task_fingerprint: str) -> None:
        self._fingerprint = task_fingerprint
        self._known: dict[str, _Known] = {}
        self._changed = asyncio.Event()

    def on_status(self, topic_id: str, status: Status) -> bool:
        """Take note of a birth or death; True if the device is there with a new incarnation or after an absence.

        Raises:
            ProtocolError: `foreign-id` or `task-mismatch`; nothing changed.
        """
        if status.device_id != topic_id:
            raise ProtocolError("foreign-id", f"{topic_id} speaks for {status.device_id}")
        if status.presence is Presence.ONLINE and status.task_fingerprint != self._fingerprint:
            raise ProtocolError(
                "task-mismatch", f"{topic_id} has task {status.task_fingerprint}, we have {self._fingerprint}"
            )
        before = self._known.get(topic_id)
        old = before.status if before else None
        if old and status.presence is Presence.OFFLINE and status.incarnation != old.incarnation:
            return False  # the last will of an earlier life
        self._known[topic_id] = _Known(status, before.context if before else None)
        self._changed.set()
        return status.presence is Presence.ONLINE and (
            old is None or old.presence is not Presence.ONLINE or old.incarnation != status.incarnation
        )

    def on_context(self, topic_id: str, context: Context) -> None:
        """Take note of how a device is.

        Raises:
            ProtocolError: `foreign-id` or `unknown-device`; nothing changed.
        """
        if context.device_id != topic_id:
            raise ProtocolError("foreign-id", f"{topic_id} speaks for {context.device_id}")
        if topic_id not in self._known:
            raise ProtocolError("unknown-device", f"{topic_id} has shown no status yet")
        self._known[topic_id].context = context
        self._changed.set()

    def presence(self) -> dict[str, Presence]:
        """How each known device is."""
        return {i: known.status.presence for i, known in sorted(self._known.items())}

    def online(self) -> tuple[Device, ...]:
        """The devices that can be asked now: online and with a context, by ascending id."""
        return tuple(
            Device(i, known.status.n_samples, known.context)
            for i, known in sorted(self._known.items())
            if known.status.presence is Presence.ONLINE and known.context is not None
        )

    async def wait_for(self, n: int) -> tuple[Device, ...]:
        """Wait until `n` devices can be asked."""
        while len(devices := self.online()) < n:
            self._changed.clear()
            await self._changed.wait()
        return devices
