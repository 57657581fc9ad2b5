"""What devices report of themselves, which devices belong to the federation, and the problems of each."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Collection
from functools import partial
from typing import Any, Final

import msgspec

from coordinator.fleet.mqtt.intake import CHECK_LOST, Assignment, Intake
from coordinator.fleet.mqtt.process import SAYS_NOTHING
from coordinator.fleet.mqtt.sole import FederationClaim, describe_claim
from coordinator.fleet.problems import Problem, Streak, prolong_streak
from coordinator.store.registry import LastMessages, Registry
from coordinator.store.store import DEVICES, Store
from fedge import __version__
from fedge.data.classes import AddedClasses, iterate_earlier
from fedge.errors import MALFORMED, ConfigError, ProtocolError
from fedge.identity.authority import MAX_REVOCATIONS_BYTES
from fedge.identity.names import Role
from fedge.membership.signed_messages import Signed
from fedge.system.background import run_in_daemon
from fedge.system.text import format_address, format_time
from fedge.wire.connection.broker import BrokerSettings, Inbound
from fedge.wire.connection.route import read_peer_certificate
from fedge.wire.messages import (
    BEACON_S,
    MAX_TASK_BYTES,
    Announcement,
    Beacon,
    Claim,
    Context,
    Health,
    Report,
    Rollout,
    Status,
    decode_message,
    encode_message,
    is_outdated,
)

log = logging.getLogger("fedge.coordinator")

TOO_LONG: Final = (
    f"the list of revoked certificates is longer than one message ({MAX_REVOCATIONS_BYTES} bytes), so agents do not "
    "receive it: copy crl.pem to each device, beside its ca_file, and start its agent again"
)
MAX_STRANGERS: Final = 100
"""Most problems kept for unknown device names, so that invented names cannot fill the summary."""
KEEP_S: Final = 60.0
"""Pause between two writes of the devices' statuses, which change far more often than a restart needs them."""
NEEDED: Final = "0.2 or later"
"""Versions of fedge that an agent may have."""
LOOK_S: Final = 1.0
"""Pause between two looks whether the broker is there."""
CERTIFICATE_S: Final = 6 * 3600.0
"""Pause between two looks at the broker's certificate while a connection lasts."""
AWAY_S: Final = 3.0
"""Time without the broker after which it counts as unreachable; a connection that is made anew takes less."""
TROUBLES: Final = "troubles"
"""Name of a value in the store: `Troubles`, as JSON."""
TWICE: Final = (
    "two processes speak as this device and take turns: a second one of its --id, a copy of its card or container, or "
    "a stolen identity; end one of them"
)


class Troubles(msgspec.Struct, frozen=True, kw_only=True):
    """What a restart must not forget: refusals and failures in a row by device, and the last rollout."""

    refusals: dict[str, Streak] = {}
    failing: dict[str, Streak] = {}
    rollout: dict[str, Any] | None = None


class Presence(Intake):
    """An intake that knows the devices: statuses, contexts, health, problems, certificates.

    `problems`: the latest refusal, failure or missed deadline by device id. `second`: the last other coordinator of the
    federation that came to the broker. `refusals`, `failing`: what is refused of devices, and orders that they failed,
    in a row. `rollout`: the last one announced, unverified.

    Args:
        broker: how to reach the broker.
        store: the store of the federation, whose home is this process's folder.
        about: what the devices work on.
        observe: called with events for people.
    """

    def __init__(
        self, broker: BrokerSettings, store: Store, about: Assignment, observe: Callable[[str, dict[str, Any]], None]
    ) -> None:
        super().__init__(broker, store, store.home, about, Role.COORDINATOR)
        task, fingerprint = about.task, about.task.compute_fingerprint()
        earlier = [each.compute_fingerprint() for each in iterate_earlier(task, about.classes)]
        known = store.get_last_contexts(), about.no_relays, _read_devices(store)
        self.registry = Registry(fingerprint, *known, earlier)
        described = msgspec.json.encode(task)
        self._beacon = Beacon(
            at=0.0,
            fedge_version=__version__,
            classes=AddedClasses(names=about.classes.names, fingerprint=fingerprint),
            task=described if len(described) <= MAX_TASK_BYTES else b"",
        )
        self.problems: dict[str, Problem] = {}
        self.last_refused: dict[str, str] = {}  # name of an error -> device and detail of the last one
        self.second: dict[str, object] | None = None
        troubles = _read_troubles(store)
        self.refusals, self.failing, self.rollout = dict(troubles.refusals), dict(troubles.failing), troubles.rollout
        self._broker_certificate: bytes | None = None
        self._away_since: float | None = None  # since when the broker is unreachable
        self._observe = observe
        self._round = 0
        self._strangers: set[str] = set()  # among the problems
        self._counted: Counter[str] = Counter()  # refusals since the last look, by name
        self._traffic = (0, 0)  # payload bytes up and down until then
        self._sole = FederationClaim(self._topics, self._signed, store.home, end=self._fail, notice=self._report_second)
        if isinstance(self._signed, Signed) and (kept := store.find_value("heard")):
            self._signed.heard = msgspec.json.decode(kept, type=dict[str, int])

    async def _subscribe(self) -> None:
        for kind, handle in (("status", self._on_status), ("context", self._on_context), ("health", self._on_health)):
            await self._transport.subscribe(self._topics.make_agent_topic("+", kind), self._make_handler(handle))
        await self._transport.subscribe(self._topics.rollout, self._on_rollout)
        await super()._subscribe()

    # -------------------------------------------------------------------------------------------------- from devices

    def _on_status(self, device: str, inbound: Inbound) -> None:
        status = decode_message(inbound.payload, Status)
        if device in self.problems and explain_outdated(device) in self.problems[device].reason:
            del self.problems[device]  # it was updated
        if status.site is not None and self._members and not self._members.admits(device, Role.RELAY):
            raise ProtocolError("certificate", f"{device} says that it is a relay, but its certificate is a device's")
        before = self.registry.get_presence(device)
        appeared = self.registry.handle_status(device, status, time.time())
        self.refusals.pop(device, None)
        if self.registry.is_twice(device):
            since = [f"{i} since {format_time(at)}" for i, at in self.registry.get_twins(device).items()]
            self._record_problem(device, f"{TWICE}. Incarnations: {', before it '.join(since)}")
        if before != status.presence:
            self._observe("device", {"device": device, "presence": status.presence})
        if appeared:
            self._on_appearance(device)

    def _on_context(self, device: str, inbound: Inbound) -> None:
        self.registry.handle_context(device, decode_message(inbound.payload, Context), time.time())

    def _on_health(self, device: str, inbound: Inbound) -> None:
        health = decode_message(inbound.payload, Health)
        if self.registry.handle_health(device, health, time.time()):
            fields = {
                "serving": "serving" if health.serving else "down",
                "phase": health.phase,
                "drift": health.drift,
                "kind": health.drift_kind or "",
                "reason": health.reason,
            }
            self._observe("health", {"device": device, **fields})

    async def _on_rollout(self, inbound: Inbound) -> None:
        """Note the announced rollout for people; devices alone judge whether it is genuine."""
        if not inbound.payload:
            self.rollout = None
            return
        said = decode_message(decode_message(inbound.payload, Announcement).rollout, Rollout)
        found = {"id": said.id, "state": str(said.state), "release": said.release, "target": said.target}
        if self.rollout is None or any(self.rollout.get(name) != value for name, value in found.items()):
            self.rollout = found | {"since": time.time()}
            self._observe("rollout", {"reason": f"release {said.release} is {said.state}"})

    def _record_message(self, device: str, inbound: Inbound) -> None:
        if not (inbound.retained and self.registry.is_away(device)):
            self.registry.record_message(device, time.time())

    def _get_incarnation(self, device: str) -> str:
        return self.registry.get_incarnation(device) or ""

    async def wait_for_status(self, ids: Collection[str], within_s: float) -> None:
        """Wait until each of these devices has shown a status, at most `within_s`."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(within_s):
                await self._wait_or_fail(self.registry.wait_for_status(ids))

    def _on_appearance(self, device: str) -> None:
        """Do what waited for a device that has just appeared."""

    # ------------------------------------------------------------------------------------------------------ problems

    def _explain_error(self, error: ProtocolError, device: str, inbound: Inbound) -> ProtocolError:
        if error.name == "replayed" and inbound.topic.endswith("/status"):
            self.registry.record_outdated(device)
        if error.name == "version" and is_outdated(inbound.payload):
            return ProtocolError("version", explain_outdated(device))
        return error

    def _refuse(self, error: ProtocolError, device: str, topic: str) -> None:
        super()._refuse(error, device, topic)
        self._counted[f"refused.{error.name}"] += 1  # stored with the round, so that a flood causes few writes
        self.last_refused[error.name] = f"{device}: {error}"
        if error.name not in SAYS_NOTHING:
            self._record_problem(device, str(error))
            if device in self.problems:
                before = self.refusals.get(device)
                self.refusals[device] = prolong_streak(before, str(error), time.time(), error.name)

    def _record_problem(self, device: str, reason: str) -> None:
        """Report a problem, at once as an event, and after the round in the status."""
        problem = Problem(round=self._round, reason=reason)
        if self.problems.get(device) != problem and self._store_problem(device, problem):
            self._observe("problem", {"device": device, "round": self._round, "reason": reason})

    def _store_problem(self, device: str, problem: Problem) -> bool:
        """Store a problem of a known device, or of one of the first unknown devices; return whether it was stored."""
        if device not in self.problems and not self.registry.knows(device):
            if len(self._strangers) >= MAX_STRANGERS:
                return False
            self._strangers.add(device)
        self.problems[device] = problem
        return True

    def _report_losses(self, report: Report) -> None:
        super()._report_losses(report)
        self._record_problem(report.device_id, f"the broker lost {report.again} copies of its report: {CHECK_LOST}")

    # ------------------------------------------------------------------------------------------------------- members

    async def _apply_members(self) -> None:
        """Drop devices that no longer belong to the federation."""
        for device in self.registry.list_presence():
            if not self._admits(device):
                log.warning("event=revoked device=%s", device)
                self._record_problem(device, "revoked: it does not belong to the federation any more")
                self.registry.forget(device)
        await self._publish_revocations()

    async def _publish_revocations(self) -> None:
        """Publish the revocations, since devices must learn of a revoked coordinator."""
        assert isinstance(self._signed, Signed)
        if revocations := self._signed.authority.revocations:
            if len(revocations) > MAX_REVOCATIONS_BYTES:
                text = "event=revocations_not_told bytes=%d reason=%r"
                log.error(text, len(revocations), TOO_LONG)
                return
            await self._publish(self._topics.revocations, revocations, retain=True)

    def _report_second(self, claim: Claim) -> None:
        """Log that another coordinator of this federation is at the broker, and has to end."""
        log.error("event=second_coordinator detail=%r", f"{describe_claim(claim)}: it is told to end")
        self.second = {"where": claim.where, "incarnation": claim.incarnation, "since": claim.since, "at": time.time()}
        self._observe("second_coordinator", self.second)

    # -------------------------------------------------------------------------------------------------------- broker

    def describe_broker(self) -> dict[str, object]:
        """Describe for people whether the broker is there, and since when not."""
        at = self._transport.settings
        return {
            "address": format_address(at.host, at.port),
            "connected": self._away_since is None,
            "since": self._away_since,
        }

    @property
    def broker_certificate(self) -> bytes | None:
        """The broker's certificate (DER) as last seen; None without TLS, or before the first connection."""
        return self._broker_certificate

    async def _watch_certificate(self) -> None:
        """Look at the broker's certificate: at each connection, and from time to time while one lasts.

        A broker that has loaded another certificate keeps its connections, so these do not show it.
        """
        settings, shown, looked_at = self._transport.settings, None, 0.0
        while True:
            await asyncio.sleep(LOOK_S)
            if shown != (now := self._transport.peer_certificate):
                self._broker_certificate, shown, looked_at = now, now, time.monotonic()
            if shown is not None and time.monotonic() - looked_at > CERTIFICATE_S:
                looked_at = time.monotonic()
                with contextlib.suppress(OSError, ConfigError):  # who cannot connect is told elsewhere
                    if (tls := settings.make_tls()) is not None:
                        look = partial(read_peer_certificate, settings.address, settings.proxy, tls)
                        self._broker_certificate = await run_in_daemon(look)

    def list_certificates(self) -> dict[str, bytes]:
        """List the certificates (DER) with which our devices signed last, by id."""
        return {i: der for i, der in self._signed.list_certificates().items() if self.registry.knows(i)}

    def list_certified(self) -> dict[str, float]:
        """List when the last certificates end that the authority has issued, by name, in seconds since the epoch."""
        return {} if self._members is None else self._members.list_ends()

    async def _watch_broker(self) -> None:
        """Tell people when the broker goes away and when it is back."""
        last = time.time()
        while True:
            await asyncio.sleep(LOOK_S)
            now = time.time()
            if self._transport.connected:
                last = now
                if self._away_since is not None:
                    self._away_since = None
                    self._observe("broker_back", {})
            elif self._away_since is None and now - last > AWAY_S:
                self._away_since = last
                log.error("event=broker_lost broker=%s", self.describe_broker()["address"])
                self._observe("broker_lost", {})

    async def _publish_time(self) -> None:
        """Publish our time, version and task while connected, so that devices can compare theirs (`fedge doctor`)."""
        topic = self._topics.beacon
        while True:
            beacon = msgspec.structs.replace(self._beacon, at=time.time())
            await self._publish(topic, self._signed.seal(topic, encode_message(beacon)), retain=True)
            await asyncio.sleep(BEACON_S)

    # --------------------------------------------------------------------------------------------------------- tasks

    async def _store_devices_often(self) -> None:
        """Store the devices' statuses for the next start; after kill -9 they are up to a minute old."""
        while True:
            await asyncio.sleep(KEEP_S)
            await self._store_devices()

    async def _store_devices(self) -> None:
        kept = self.registry.export_messages()
        troubles = Troubles(refusals=self.refusals, failing=self.failing, rollout=self.rollout)
        for name, value in ((DEVICES, kept), (TROUBLES, troubles)):
            await asyncio.to_thread(self._store.put_value, name, msgspec.json.encode(value).decode())

    async def sleep(self, seconds: float) -> None:
        """Wait for this time, or until a background task fails, which is raised."""
        await self._wait_or_fail(asyncio.sleep(seconds))

    async def _wait_or_fail(self, work: Awaitable[Any]) -> Any:
        """Wait for something, or until a background task fails, which is raised."""
        waiting = asyncio.ensure_future(work)
        try:
            await asyncio.wait({waiting, self._failure}, return_when=asyncio.FIRST_COMPLETED)
            if self._failure.done():
                self._failure.result()
            return waiting.result()
        finally:
            waiting.cancel()

    def take_counts(self) -> dict[str, int]:
        """Return, and reset, the payload bytes up and down, and refusals by name."""
        up, down = self._transport.bytes_received, self._transport.bytes_sent
        before_up, before_down = self._traffic
        self._traffic = (up, down)
        counted, self._counted = self._counted, Counter()
        return {"bytes_up": up - before_up, "bytes_down": down - before_down, **counted}


def _read_devices(store: Store) -> dict[str, LastMessages]:
    """Read the devices' statuses as last stored; empty if another version of fedge wrote them."""
    with contextlib.suppress(*MALFORMED):
        return msgspec.json.decode(store.find_value(DEVICES) or "{}", type=dict[str, LastMessages])
    return {}


def _read_troubles(store: Store) -> Troubles:
    """Read the troubles as last stored; none if another version of fedge wrote them."""
    with contextlib.suppress(*MALFORMED):
        return msgspec.json.decode(store.find_value(TROUBLES) or "{}", type=Troubles)
    return Troubles()


def explain_outdated(device: str) -> str:
    """Explain what to do about a device whose agent is of fedge 0.1."""
    return (
        f"its agent is of fedge 0.1, which this coordinator does not understand: update fedge on {device} to {NEEDED}"
    )
