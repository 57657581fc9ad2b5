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
from edge_agent.agent.events import describe
from edge_agent.agent.identity import Member
from edge_agent.agent.models import Models
from edge_agent.agent.outbox import Outbox
from edge_agent.device.device import failed
from edge_agent.device.worker import Finished
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
    read_action,
    read_result,
    report_of,
)
from fedge.steps.masked.mask_keys import KeysMade, MaskKeys
from fedge.steps.masked.mask_shares import MaskShares
from fedge.wire.messages import BlobRef, Context, Order, Outcome, Report, Why, decode, encode

log = logging.getLogger("fedge.agent")

SPARE_DISK_BYTES: Final = 64 << 20
"""What an order must leave free, of a small disk a twentieth: for its result, a bundle, the log and everybody else."""


class Works(Protocol):
    """Carries out orders: `edge_agent.agent.workplace.Workplace`, or a stand-in such as a relay's site."""

    def execute(
        self, order: Order, fetch: Callable[[BlobRef], bytes], *, stop: Callable[[], bool], action: Action
    ) -> Finished:
        """Do the work of one order. Raises soon after `stop()` became true."""


@dataclass(eq=False)
class Carrier:
    """Takes orders through fetching, refusing, working and reporting.

    Args:
        me: the device.
        home: its folder, on the disk that orders fill.
        make_worker: called once, in the worker thread, when the first order needs it.
        limits: when to decline.
        measure: the device's present state.
        models: fetches and has them.
        outbox: keeps the tensors of results.
        pool: has the worker thread.
    """

    me: Member
    home: Path
    make_worker: Callable[[], Works]
    limits: Limits
    measure: Callable[[], Context]
    models: Models
    outbox: Outbox
    pool: Executor

    def __post_init__(self) -> None:
        self._worker: Works | None = None
        self._stop_work = threading.Event()
        self._fetching: asyncio.Task[None] | None = None

    def allow(self) -> None:
        """Let the next order be carried out, after a `stop`."""
        self._stop_work.clear()

    def stop(self) -> None:
        """Have the present order end soon, without a report."""
        self._stop_work.set()
        if self._fetching is not None:
            self._fetching.cancel()

    async def carry_out(self, order: Order) -> Report | None:
        """Do one order from its models to its report; a stopped one gives none."""
        self.me.events.say("order_started", logging.DEBUG, **describe(order))
        began = time.monotonic()
        try:
            action = read_action(order, self.me.identity.steps)
            if isinstance(action, Unsupported):
                return self._report(order, action, began)
            if (refused := self._refuse_work(order, action)) is not None:
                return self._report(order, refused, began)
            if not await self._fetch(order, action):
                return None
            work = partial(self._execute, order, action, began)
            return await asyncio.get_running_loop().run_in_executor(self.pool, work)
        except (ProtocolError, TransportError) as error:  # the latter: the broker does not let us fetch a model
            return self._report(order, failed(error), began)

    def _refuse_work(self, order: Order, action: Action) -> Refusal | None:
        """Answer what needs neither a model nor a worker."""
        if not self.me.rules.permitted(action):
            text = f"its result would tell of {', '.join(kind for kind in self.me.rules.withheld)}"
            return Declined(why=Why.NOT_ALLOWED, reason=f"{action.STEP}: {text}")
        mine = self.me.identity.task.fingerprint()
        if order.task_fingerprint != mine:
            text = f"the order is for task {order.task_fingerprint}, this device has {mine}"
            return Failed(why=Why.OTHER_TASK, reason=text)
        needed = self.models.missing_bytes(action)
        disk = shutil.disk_usage(self.home)
        spare = min(SPARE_DISK_BYTES, disk.total // 20)
        if needed + spare > disk.free:
            needs, stays, there = (f"{size / 1e6:.0f} MB" for size in (needed, spare, disk.free))
            text = f"the models need {needs} and {stays} must stay free, {there} are free"
            return Declined(why=Why.DISK, reason=text)
        return self.limits.excuse(self.measure())

    async def _fetch(self, order: Order, action: Action) -> bool:
        """Fetch all models that an action names; False if stopped meanwhile."""
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
        """In the worker thread: do the work and store its tensors durably. None: it was stopped."""
        try:
            if self._worker is None:
                self._worker = self.make_worker()
            if isinstance(action, MaskShares) and (refused := self._strangers(order, action)) is not None:
                return self._report(order, refused, None)
            finished = self._worker.execute(order, self.models.get, stop=self._stop_work.is_set, action=action)
            result = finished.result
            if isinstance(result, KeysMade) and isinstance(action, MaskKeys):
                from fedge.privacy.masked_sums import proven

                result = proven(result, order, action.session, self.me.signed)
            if not isinstance(result, Refusal):
                result = self.me.rules.stripped(result, action.reveals())
            report = self._report(order, result, began + finished.untimed_s if action.TIMED else None)
            read_result(decode(encode(report), Report), action)  # refuse here what the coordinator would refuse
        except StoreError:
            raise
        except Exception as error:  # no order and no user's network may bring the agent down
            if self._stop_work.is_set():
                return None
            log.exception("event=order_failed order=%s", order.id)
            return self._report(order, failed(error), began if action.TIMED else None)
        named = {ref.digest for ref in report.blobs}
        for digest, data in finished.blobs.items():
            if digest in named:
                self.outbox.put_blob(digest, data)
        return report

    def _strangers(self, order: Order, action: MaskShares) -> Declined | None:
        """Why secrets are not shared with a cohort; None: all are members, as far as messages are signed."""
        from fedge.privacy.masked_sums import read_roster, require_genuine  # with `cryptography`

        try:
            require_genuine(read_roster(self.models.get(action.roster)).members, order, action.session, self.me.signed)
        except ProtocolError as error:
            return Declined(why=Why.STRANGERS, reason=str(error))
        return None

    def _report(self, order: Order, result: Result, began: float | None) -> Report:
        """The report of an order. The reason for a failure is logged here; the coordinator gets only its code.

        `began`: start of the work, by the monotonic clock; None: the duration is not reported.
        """
        if isinstance(result, Refusal):
            self.me.events.warn("event=order_refused order=%s why=%s reason=%r", order.id, result.why, result.reason)
        seconds = 0.0 if began is None else max(time.monotonic() - began, 0.0)
        return self.me.rules.stripped(report_of(order, result, seconds))


def may_still_leave(report: Report, order: Order, steps: Steps, rules: Rules) -> bool:
    """Whether a report kept by an earlier agent fits the owner's rules; if not, the work is repeated.

    What the result of a step that is known no longer lets out, nobody can tell.
    """
    try:
        action = read_action(order, steps)
        parts = [rules.stripped(report) == report]
        if isinstance(action, Unsupported):
            parts.append(report.outcome is not Outcome.DONE)
        elif not isinstance(result := read_result(report, action), Refusal):
            parts.append(rules.stripped(result, action.reveals()) == result)
    except (ProtocolError, WithheldError):
        return False
    return all(parts)
