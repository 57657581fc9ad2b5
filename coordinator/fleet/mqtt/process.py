"""A process of a coordinator at the broker, and who may send it what."""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
import logging
import math
import time
import uuid
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Final

from coordinator.provision.members import Watched
from coordinator.store.store import Store
from fedge.errors import ProtocolError
from fedge.identity.names import Role, Subject
from fedge.membership.signed_messages import Plain, Signed, speaker
from fedge.system.background import Background
from fedge.system.logs import Lines
from fedge.wire.connection.broker import BrokerSettings, Inbound, Will
from fedge.wire.messages import Status, decode
from fedge.wire.topics import Topics
from fedge.wire.transport import Transport

log = logging.getLogger("fedge.coordinator")
LOOK_S: Final = 3.0
"""Pause between two checks of who belongs to the federation: a revoked device is refused from the next one on."""
SAYS_NOTHING: Final = frozenset({"replayed-report", "unknown-order"})
"""Refusals of repeated messages, which are not the device's fault."""


def signing(broker: BrokerSettings, federation: str, home: Path, role: Role) -> tuple[Plain | Signed, Watched | None]:
    """Our identity and, if messages are signed, the federation's members.

    Raises:
        ConfigError: the certificate is not of this role in this federation, or there is no list of members.
    """
    signed = speaker(broker, Subject(federation, role, role), home)
    if isinstance(signed, Plain):
        return signed, None
    assert broker.ca_file is not None
    members = Watched(Path(broker.ca_file).parent, federation)
    signed.admit = members.admit
    return signed, members


class Process:
    """A connection to the broker, with the checks of who may send what.

    Args:
        broker: how to reach it.
        store: of the federation.
        federation: its name.
        home: exclusive folder of this process.
        role: a helper's, or the coordinator's.
    """

    def __init__(
        self, broker: BrokerSettings, store: Store, federation: str, home: Path, role: Role = Role.INTAKE
    ) -> None:
        self._store = store
        self._topics = Topics(federation)
        self._signed, self._members = signing(broker, federation, home, role)
        self._secret = store.at_broker()
        if role is Role.COORDINATOR:
            gone = Will(self._topics.claims, b"", delay_s=0)
            ours = hashlib.sha256(f"client {self._secret}".encode()).hexdigest()[:32]  # ids are logged; groups are not
            self._transport = Transport(broker, self._topics.client_id("coordinator", ours), will=gone)
        else:  # without a session: the broker would keep a killed helper's messages for an hour
            name = self._topics.client_id("intake", uuid.uuid4().hex)
            self._transport = Transport(broker, name, session_expiry_s=0)
        self._incarnations: dict[str, str] = {}
        self._lines = Lines()
        self._connected_at = math.inf
        self._transport.on_connect(self._note_connection)
        self._failure: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._background = Background(self._fail)

    async def _note_connection(self) -> None:
        self._connected_at = time.monotonic()

    def _fail(self, error: BaseException) -> None:
        if not self._failure.done():
            self._failure.set_exception(error)

    async def _until_failure(self) -> None:
        """Work until something fails for good."""
        if isinstance(self._signed, Signed):
            await self._transport.subscribe(self._topics.agent("+", "status"), self._guard(self._on_status))
        async with self._transport:
            self._background.spawn(self._watch_members())
            try:
                await self._failure
            finally:
                self._background.cancel()

    async def _watch_members(self) -> None:
        """Check the list of members, if there is one."""
        while self._members is not None and isinstance(self._signed, Signed):
            await asyncio.sleep(LOOK_S)
            if self._members.look(self._signed.authority):
                await self._members_changed()

    async def _members_changed(self) -> None:
        """Act upon a changed list."""

    def _admits(self, device: str) -> bool:
        """Whether it belongs to the federation, as a device or a relay."""
        return self._members is None or any(self._members.admits(device, r) for r in (Role.DEVICE, Role.RELAY))

    def _guard(self, handle: Callable[[str, Inbound], None]) -> Callable[[Inbound], Awaitable[None]]:
        """Drop messages that violate the contract: one line, one count, no change."""

        async def guarded(inbound: Inbound) -> None:
            device = self._topics.parts(inbound.topic)[1]
            if not inbound.payload:  # a cleared retained message
                return
            try:
                payload = self._signed.open(inbound.topic, inbound.payload, Role.DEVICE, name=device)
                handle(device, dataclasses.replace(inbound, payload=payload))
                self._heard(device, inbound)
            except ProtocolError as error:
                self._refuse(self._explained(error, device, inbound), device, inbound.topic)

        return guarded

    def _heard(self, device: str, inbound: Inbound) -> None:
        """Note a valid message."""

    def _explained(self, error: ProtocolError, _device: str, _inbound: Inbound) -> ProtocolError:
        """The error to report for an invalid message."""
        return error

    def _refuse(self, error: ProtocolError, device: str, topic: str) -> None:
        level = logging.INFO if error.name in SAYS_NOTHING else logging.WARNING
        if (untold := self._lines.untold(error.name, time.monotonic())) is not None:
            text = "event=refused name=%s device=%s topic=%s detail=%r untold=%d"
            log.log(level, text, error.name, device, topic, str(error), untold)

    def _on_status(self, device: str, inbound: Inbound) -> None:
        self._incarnations[device] = decode(inbound.payload, Status).incarnation

    def _incarnation(self, device: str) -> str:
        """Of the device's agent; empty: not known yet."""
        return self._incarnations.get(device, "")

    def _seal(self, topic: str, payload: bytes, device: str) -> bytes:
        """Sign for the agent's present incarnation; a restarted one gets the next message."""
        return self._signed.seal(topic, payload, to=self._incarnation(device))
