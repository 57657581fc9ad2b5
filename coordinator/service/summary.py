"""HOME/summary.json, and what is reported at the end of a run."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import time
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

import msgspec

from coordinator.fleet import problems
from coordinator.fleet.mqtt.fleet import MqttFleet
from coordinator.methods.installation import require_learned
from coordinator.methods.method import Method
from coordinator.methods.state import State
from coordinator.service.settings import CoordinatorSettings
from coordinator.store.requests import read_requests
from coordinator.store.store import Store
from coordinator.watch.expiring import Expiring, list_of_broker, list_of_devices, list_own
from coordinator.watch.state import read_summary
from coordinator.watch.words import explain_no_bundle
from fedge.data.problems.scores import ACCURACY, Figure
from fedge.errors import ConfigError, FruitlessError, StoreError
from fedge.system.files import write_atomically
from fedge.system.text import format_time
from fedge.wire.messages import BlobRef

log = logging.getLogger("fedge.coordinator")

WARN_S: Final = 24 * 3600.0
"""Pause between two warnings of a certificate that will expire."""
NOTHING: Final[Mapping[str, Any]] = MappingProxyType({})
ROUNDS_TIMED: Final = 1000
"""Last rounds whose times are in the summary."""


def require_fruitful(
    settings: CoordinatorSettings, method: Method[Any], state: State, first: BlobRef, store: Store, fleet: MqttFleet
) -> None:
    """End a run before its devices get bundles if the rounds of training are over and nothing was learned.

    Raises:
        FruitlessError: nothing was learned; HOME/summary.json says so, too.
    """
    if state.round != method.last:
        return
    try:
        require_learned(method, state, first, fleet.problems)
    except FruitlessError as error:
        write_summary(settings, method, state, store, fleet, failed=str(error))
        raise


def log_missing_bundles(summary: Mapping[str, Any]) -> str:
    """Log which devices have no bundle after the last round; return why, in words."""
    why = explain_no_bundle(summary)
    reasons = problems.describe_reasons(why) if why else ""
    if why:
        log.error("event=without_bundle devices=%s reason=%r", list(why), reasons)
    return reasons


def require_bundles(summary: Mapping[str, Any]) -> None:
    """Log which devices have no bundle at the end of a run, and why.

    Raises:
        FruitlessError: no device has a bundle.
    """
    why = log_missing_bundles(summary)
    if not summary["installed"]:
        raise FruitlessError("no device has a bundle" + (f": {why}" if why else ""))


def find_finished(settings: CoordinatorSettings, method: Method[Any], state: State) -> dict[str, Any] | None:
    """Return the summary of a run that an earlier process finished; None if there is work left, or we are to stay.

    Raises:
        FruitlessError: nothing was learned, and the run has not got more rounds since.
    """
    with contextlib.suppress(ConfigError, StoreError):
        summary = read_summary(settings.home)
        if summary["rounds"] == method.last:
            if summary.get("failed") and state.round == method.last:
                go_on = f"to go on with this federation, start it with more rounds than {method.last} (--rounds)"
                raise FruitlessError(f"{summary['failed']}; {go_on}")
            if settings.once and summary.get("ended") and method.is_done(state) and not settings.readmit:
                return summary
    return None


def write_summary(
    settings: CoordinatorSettings,
    method: Method[Any],
    state: State,
    store: Store,
    fleet: MqttFleet,
    *,
    more: Mapping[str, Any] = NOTHING,
    introduced: Mapping[str, Mapping[str, object]] = NOTHING,
    ended: bool = False,
    failed: str = "",
) -> dict[str, Any]:
    """Write HOME/summary.json: the method's summary, and the counters of transport and store.

    `more`: further entries. `introduced`: accuracies of bundles in service, as the introduction knows them. `ended`:
    the coordinator is about to end. `failed`: why the run ends before its devices get bundles.
    """
    counters, wishes = store.get_counters(), read_requests(store)
    devices: dict[str, dict[str, Any]] = {**fleet.registry.describe_devices()}
    for i, told in introduced.items():
        if (device := devices.get(i)) is not None and told["release"] == (device["health"] or {}).get("release"):
            device["of_bundle"] = told
    summary = {
        "federation": settings.federation,
        "seed": settings.seed,
        "privacy": method.settings.protection.describe_promise(),
        **method.summarise(state),
        **describe_score(method.problem.figure),
        "bytes_up": counters.get("bytes_up", 0),
        "bytes_down": counters.get("bytes_down", 0),
        "wall_s": counters.get("milliseconds", 0) / 1000,
        "round_s": [round(seconds, 3) for seconds in store.get_round_seconds(ROUNDS_TIMED).values()],
        "devices": dict(sorted((fleet.registry.list_presence() | fleet.registry.list_behind_relays()).items())),
        "without_bundle": list_without_bundle(method, state, store),
        "clocks": fleet.registry.find_wrong_clocks(),
        "expiring": msgspec.to_builtins(list_expiring(settings, fleet)),
        "quarantined": msgspec.to_builtins(fleet.quarantined),
        "at": time.time(),
        "fleet": devices,
        "waiting": fleet.waiting,
        "paused": wishes.paused and not wishes.steps,
        "retired": wishes.retired,
        "problems": msgspec.to_builtins(dict(sorted(fleet.problems.items()))),
        "refused": {name.removeprefix("refused."): n for name, n in counters.items() if name.startswith("refused.")},
        "last_refused": fleet.last_refused,
        "second": fleet.second,
        "broker": fleet.describe_broker(),
        "rollout": fleet.rollout,
        "refusals": msgspec.to_builtins(fleet.refusals),
        "failing": msgspec.to_builtins(fleet.failing),
        "ended": ended,
        "failed": failed,
        **more,
    }
    write_atomically(settings.home / "summary.json", json.dumps(summary, indent=1).encode())
    return summary


def describe_score(figure: Figure) -> dict[str, str]:
    """Return the entry that names a score which is no accuracy."""
    return {} if figure == ACCURACY else {"score_name": figure.name}


def list_expiring(settings: CoordinatorSettings, fleet: MqttFleet) -> list[Expiring]:
    """List what must be renewed: certificates of the coordinator, the broker and devices, and the list of revoked."""
    now, named = time.time(), settings.with_files()
    own = []
    if named.ca_file is not None and named.cert_file is not None:
        own = list_own(Path(named.ca_file), Path(named.cert_file), now)
    broker = list_of_broker(fleet.describe_broker()["address"], fleet.broker_certificate, now)
    return [*own, *broker, *list_of_devices(fleet.list_certificates(), fleet.list_certified(), now)]


@contextlib.asynccontextmanager
async def warn_daily(settings: CoordinatorSettings, fleet: MqttFleet) -> AsyncIterator[None]:
    """Log once a day which certificates are about to expire."""

    async def warn_endlessly() -> None:
        while True:
            for item in list_expiring(settings, fleet):
                date = "" if item.until is None else f" ends on {format_time(item.until)}"
                log.warning("event=expires device=%s detail=%r", item.device, f"{item.what}{date}: {item.do}")
            await asyncio.sleep(WARN_S)

    running = asyncio.create_task(warn_endlessly())
    try:
        yield
    finally:
        running.cancel()


def list_without_bundle(method: Method[Any], state: State, store: Store) -> list[str]:
    """List devices that trained or were in the last round and have no bundle after the end, by ascending id."""
    if not method.is_done(state):
        return []
    there = {device.id for device in store.get_round_devices(state.round) or ()}
    return sorted((there | state.participations.keys()) - state.installed.keys())
