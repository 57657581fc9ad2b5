"""A process of a coordinator at the broker, with the checks of who may send it which messages."""

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

from coordinator.provision.members import WatchedMembers
from coordinator.store.store import Store
from fedge.errors import ProtocolError
from fedge.identity.names import Role, Subject
from fedge.membership.signed_messages import Plain, Signed, make_speaker
from fedge.system.background import Background
from fedge.system.logs import Lines
from fedge.wire.connection.broker import BrokerSettings, Inbound, Will
from fedge.wire.messages import Status, decode_message
from fedge.wire.topics import Topics
from fedge.wire.transport import Transport

log = logging.getLogger("fedge.coordinator")
LOOK_S: Final = 3.0
"""Pause between two reads of the members; a revoked device is refused from the next read on."""
SAYS_NOTHING: Final = frozenset({"replayed-report", "unknown-order", "task-behind"})
"""Refusals of repeated messages, and of devices that are just taking up a class: not the device's fault."""


def load_signing(
    broker: BrokerSettings, federation: str, home: Path, role: Role
) -> tuple[Plain | Signed, WatchedMembers | None]:
    """Return our identity and, if messages are signed, the federation's members.

    Raises:
        ConfigError: the certificate is not of this role in this federation, or there is no list of members.
    """
    signed = make_speaker(broker, Subject(federation, role, role), home)
    if isinstance(signed, Plain):
        return signed, None
    assert broker.ca_file is not None
    members = WatchedMembers(Path(broker.ca_file).parent, federation)
    signed.admit = members.admit
    return signed, members


class Process:
    """A coordinator process's connection to the broker, with the checks of who may send which messages.

    Args:
        broker: how to reach the broker.
        store: the federation's store.
        federation: the federation's name.
        home: exclusive folder of this process.
        role: the role of a helper, or the coordinator's.
    """

    def __init__(
        self, broker: BrokerSettings, store: Store, federation: str, home: Path, role: Role = Role.INTAKE
    ) -> None:
        self._store = store
        self._topics = Topics(federation)
        self._signed, self._members = load_signing(broker, federation, home, role)
        self._secret = store.get_broker_secret()
        if role is Role.COORDINATOR:
            gone = Will(self._topics.claims, b"", delay_s=0)
            ours = hashlib.sha256(f"client {self._secret}".encode()).hexdigest()[:32]  # ids are logged; groups are not
            self._transport = Transport(broker, self._topics.make_client_id("coordinator", ours), will=gone)
        else:  # without a session, or the broker would keep a killed helper's messages for an hour
            name = self._topics.make_client_id("intake", uuid.uuid4().hex)
            self._transport = Transport(broker, name, session_expiry_s=0)
        self._incarnations: dict[str, str] = {}
        self._lines = Lines()
        self._connected_at = math.inf
        self._transport.on_connect(self._record_connection)
        self._failure: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._background = Background(self._fail)

    async def _record_connection(self) -> None:
        self._connected_at = time.monotonic()

    def _fail(self, error: BaseException) -> None:
        if not self._failure.done():
            self._failure.set_exception(error)

    async def _run_until_failure(self) -> None:
        """Run until something fails for good."""
        if isinstance(self._signed, Signed):
            await self._transport.subscribe(
                self._topics.make_agent_topic("+", "status"), self._make_handler(self._on_status)
            )
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
            if self._members.update_authority(self._signed.authority):
                await self._apply_members()

    async def _apply_members(self) -> None:
        """Act upon a changed list of members."""

    def _admits(self, device: str) -> bool:
        """Return whether the device belongs to the federation, as a device or a relay."""
        return self._members is None or any(self._members.admits(device, r) for r in (Role.DEVICE, Role.RELAY))

    def _make_handler(self, handle: Callable[[str, Inbound], None]) -> Callable[[Inbound], Awaitable[None]]:
        """Make a handler that drops messages which violate the contract, with a log line and a count, but no change."""

        async def handle_valid(inbound: Inbound) -> None:
            device = self._topics.split(inbound.topic)[1]
            if not inbound.payload:  # a cleared retained message
                return
            try:
                payload = self._signed.open(inbound.topic, inbound.payload, Role.DEVICE, name=device)
                handle(device, dataclasses.replace(inbound, payload=payload))
                self._record_message(device, inbound)
            except ProtocolError as error:
                self._refuse(self._explain_error(error, device, inbound), device, inbound.topic)

        return handle_valid

    def _record_message(self, device: str, inbound: Inbound) -> None:
        """Record a valid message."""

    def _explain_error(self, error: ProtocolError, _device: str, _inbound: Inbound) -> ProtocolError:
        """Return the error to report for an invalid message."""
        return error

    def _refuse(self, error: ProtocolError, device: str, topic: str) -> None:
        level = logging.INFO if error.name in SAYS_NOTHING else logging.WARNING
        if (untold := self._lines.count_suppressed(error.name, time.monotonic())) is not None:
            text = "event=refused name=%s device=%s topic=%s detail=%r untold=%d"
            log.log(level, text, error.name, device, topic, str(error), untold)

    def _on_status(self, device: str, inbound: Inbound) -> None:
        self._incarnations[device] = decode_message(inbound.payload, Status).incarnation

    def _get_incarnation(self, device: str) -> str:
        """Return the incarnation of the device's agent; empty if it is not known yet."""
        return self._incarnations.get(device, "")

    def _seal(self, topic: str, payload: bytes, device: str) -> bytes:
        """Sign for the agent's present incarnation; a restarted agent gets the next message."""
        return self._signed.seal(topic, payload, to=self._get_incarnation(device))
