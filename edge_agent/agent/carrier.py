"""Carries out one order at a time, from its models to its report, as far as the device's owner permits."""

from __future__ import annotations

import asyncio
import logging
import shutil
import threading
import time
from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final, Protocol

from edge_agent.agent.context import Limits
from edge_agent.agent.events import get_order_fields
from edge_agent.agent.identity import Member
from edge_agent.agent.models import Models
from edge_agent.agent.outbox import Outbox
from edge_agent.device.device import make_failure
from edge_agent.device.worker import FinishedOrder
from fedge.errors import ProtocolError, StoreError, TransportError
from fedge.privacy.egress import Rules, WithheldError
from fedge.steps.contract import (
    Action,
    Declined,
    Failed,
    Refusal,
    Result,
    Steps,
    Unsupported,
    decode_action,
    decode_result,
    make_report,
)
from fedge.steps.masked.mask_keys import KeysMade, MaskKeys
from fedge.steps.masked.mask_shares import MaskShares
from fedge.wire.messages import BlobRef, Context, Order, Outcome, Report, Why, decode_message, encode_message

log = logging.getLogger("fedge.agent")

SPARE_DISK_BYTES: Final = 64 << 20
"""Bytes of the disk that an order must leave free, for its result, a bundle, the log and everybody else; at most a
twentieth of the disk."""


class OrderExecutor(Protocol):
    """What carries out orders: `edge_agent.agent.workplace.WorkerProcess`, or the site of a relay."""

    def execute(
        self, order: Order, fetch: Callable[[BlobRef], bytes], *, stop: Callable[[], bool], action: Action
    ) -> FinishedOrder:
        """Do the work of one order; raise soon after `stop()` becomes true."""


@dataclass(eq=False)
class Carrier:
    """A carrier of orders: it fetches models, refuses, has the work done, and reports.

    Args:
        me: the device.
        home: the device's folder, on the disk that orders fill.
        make_worker: called once, in the worker thread, when the first order needs it.
        limits: when to decline.
        measure: called for the device's present state.
        models: the models that orders name, which it fetches.
        outbox: keeps the tensors of results.
        pool: the pool of the worker thread.
    """

    me: Member
    home: Path
    make_worker: Callable[[], OrderExecutor]
    limits: Limits
    measure: Callable[[], Context]
    models: Models
    outbox: Outbox
    pool: Executor

    def __post_init__(self) -> None:
        self._worker: OrderExecutor | None = None
        self._stop_work = threading.Event()
        self._fetching: asyncio.Task[None] | None = None

    def resume(self) -> None:
        """Let the next order be carried out, after a `stop`."""
        self._stop_work.clear()

    def stop(self) -> None:
        """Have the present order end soon, without a report."""
        self._stop_work.set()
        if self._fetching is not None:
            self._fetching.cancel()

    async def run_order(self, order: Order) -> Report | None:
        """Do one order from its models to its report, or return None if it was stopped."""
        self.me.events.log_event("order_started", logging.DEBUG, **get_order_fields(order))
        began = time.monotonic()
        try:
            action = decode_action(order, self.me.identity.steps)
            if isinstance(action, Unsupported):
                return self._make_report(order, action, began)
            if (refused := self._find_refusal(order, action)) is not None:
                return self._make_report(order, refused, began)
            if not await self._fetch(order, action):
                return None
            work = partial(self._execute, order, action, began)
            return await asyncio.get_running_loop().run_in_executor(self.pool, work)
        except (ProtocolError, TransportError) as error:  # the latter: the broker does not let us fetch a model
            return self._make_report(order, make_failure(error), began)

    def _find_refusal(self, order: Order, action: Action) -> Refusal | None:
        """Return the refusal of an action that needs neither a model nor a worker, or None."""
        if not self.me.rules.allows(action):
            text = f"its result would tell of {', '.join(kind for kind in self.me.rules.withheld)}"
            return Declined(why=Why.NOT_ALLOWED, reason=f"{action.STEP}: {text}")
        if order.task_fingerprint != self.me.identity.task.compute_fingerprint():
            text = "the order is for another task than this device's; event=other_task in this log says what differs"
            return Failed(why=Why.OTHER_TASK, reason=text)
        needed = self.models.count_missing_bytes(action)
        disk = shutil.disk_usage(self.home)
        spare = min(SPARE_DISK_BYTES, disk.total // 20)
        if needed + spare > disk.free:
            needs, stays, there = (f"{size / 1e6:.0f} MB" for size in (needed, spare, disk.free))
            text = f"the models need {needs} and {stays} must stay free, {there} are free"
            return Declined(why=Why.DISK, reason=text)
        return self.limits.find_refusal(self.measure())

    async def _fetch(self, order: Order, action: Action) -> bool:
        """Fetch all models that an action names, or return False if stopped meanwhile."""
        if self._stop_work.is_set():
            return False
        self._fetching = asyncio.create_task(self.models.fetch(order, action))
        try:
            await self._fetching
        except asyncio.CancelledError:
            if not self._stop_work.is_set():
                raise
            return False
        finally:
            self._fetching = None
        return True

    def _execute(self, order: Order, action: Action, began: float) -> Report | None:
        """Do the work in the worker thread and store its tensors durably; None if it was stopped."""
        try:
            if self._worker is None:
                self._worker = self.make_worker()
            if isinstance(action, MaskShares) and (refused := self._find_strangers(order, action)) is not None:
                return self._make_report(order, refused, None)
            finished = self._worker.execute(order, self.models.get, stop=self._stop_work.is_set, action=action)
            result = finished.result
            if isinstance(result, KeysMade) and isinstance(action, MaskKeys):
                from fedge.privacy.masked_sums import prove_keys

                result = prove_keys(result, order, action.session, self.me.signed)
            if not isinstance(result, Refusal):
                result = self.me.rules.strip(result, action.reveals())
            report = self._make_report(order, result, began + finished.untimed_s if action.timed else None)
            decode_result(
                decode_message(encode_message(report), Report), action
            )  # refuse here what the coordinator would refuse
        except StoreError:
            raise
        except Exception as error:  # no order and no user's network may bring the agent down
            if self._stop_work.is_set():
                return None
            log.exception("event=order_failed order=%s", order.id)
            return self._make_report(order, make_failure(error), began if action.timed else None)
        named = {ref.digest for ref in report.blobs}
        for digest, data in finished.blobs.items():
            if digest in named:
                self.outbox.put_blob(digest, data)
        return report

    def _find_strangers(self, order: Order, action: MaskShares) -> Declined | None:
        """Return why secrets are not shared with a cohort, or None if all its devices prove to be members."""
        from fedge.privacy.masked_sums import read_roster, require_genuine  # with `cryptography`

        try:
            require_genuine(read_roster(self.models.get(action.roster)).members, order, action.session, self.me.signed)
        except ProtocolError as error:
            return Declined(why=Why.STRANGERS, reason=str(error))
        return None

    def _make_report(self, order: Order, result: Result, began: float | None) -> Report:
        """Make an order's report. The reason for a failure is logged here; the coordinator gets only a code.

        `began`: start of the work, by the monotonic clock; None if the duration is not reported.
        """
        if isinstance(result, Refusal):
            self.me.events.warn("event=order_refused order=%s why=%s reason=%r", order.id, result.why, result.reason)
        seconds = 0.0 if began is None else max(time.monotonic() - began, 0.0)
        return self.me.rules.strip(make_report(order, result, seconds))


def may_still_leave(report: Report, order: Order, steps: Steps, rules: Rules) -> bool:
    """Return whether an earlier agent's report fits the owner's rules; otherwise the work is repeated.

    The result of a step that is no longer known cannot be checked.
    """
    try:
        action = decode_action(order, steps)
        parts = [rules.strip(report) == report]
        if isinstance(action, Unsupported):
            parts.append(report.outcome is not Outcome.DONE)
        elif not isinstance(result := decode_result(report, action), Refusal):
            parts.append(rules.strip(result, action.reveals()) == result)
    except (ProtocolError, WithheldError):
        return False
    return all(parts)
