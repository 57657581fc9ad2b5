"""A separate process for an agent's orders, which holds torch and the samples.

The process ends after some time without orders, which makes the agent small again. The agent or, when memory is short,
the kernel may kill it at any time, because what it keeps is durable, and a repeated order gives the same bytes.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from signal import SIGKILL
from typing import TYPE_CHECKING, Final

import msgspec
import psutil
from msgspec import Struct

from edge_agent.agent.settings import AgentSettings
from edge_agent.device.device import Budget, make_failure
from edge_agent.device.worker import FinishedOrder, Worker
from fedge.data.task import TaskSpec
from fedge.errors import ConfigError, StoreError
from fedge.steps.contract import Action, Failed, Refusal, decode_action, decode_result, make_report
from fedge.steps.training.train_dp import TrainDp, TrainedDp
from fedge.system.child import Child, DiedError
from fedge.system.files import BlobFolder, get_versions, remove_unfinished
from fedge.system.hardware import Processor
from fedge.system.stopping import Stop, StoppedError
from fedge.wire.messages import BlobRef, Order, Report, Why

if TYPE_CHECKING:
    from fedge.tasks import DeviceData

log = logging.getLogger("fedge.agent")

KEEP_S: Final = 60.0
"""Time for which the process waits for the next order; the steps of a round follow each other faster."""
ENOUGH_BYTES: Final = 1 << 29
"""Free memory below which the process ends after each order."""
LOADING_S: Final = 600.0
"""Time for which a process that is still loading waits for the next order, however little memory is free."""
ATTEMPTS: Final = 2
"""Attempts at an order whose process dies. A lack of memory may pass; a network that crashes does so again."""


def measure_free_bytes() -> int:
    """Return the free memory in bytes of this machine, or of this process's group (systemd's MemoryMax) if less."""
    free = psutil.virtual_memory().available
    with suppress(OSError, ValueError, LookupError):  # no cgroup v2, or no limit
        (own,) = (line[3:] for line in Path("/proc/self/cgroup").read_text().splitlines() if line.startswith("0::"))
        free = min(free, read_free_bytes(Path(f"/sys/fs/cgroup{own}")))
    return free


def read_free_bytes(cgroup: Path) -> int:
    """Return the bytes below a cgroup's limit; unused pages that cache files count as free.

    Raises:
        OSError, ValueError, LookupError: the cgroup has no limit, or is not of version 2.
    """
    limit, used = (int((cgroup / name).read_text()) for name in ("memory.max", "memory.current"))
    stat = dict(line.split() for line in (cgroup / "memory.stat").read_text().splitlines())
    return limit - used + int(stat["inactive_file"])


class OrderResult(Struct, frozen=True):
    """The result of an order. `reason`: why it was refused, which is not part of the report."""

    report: Report
    blobs: dict[str, bytes]
    untimed_s: float
    reason: str


class WorkerProcess:
    """The separate process that carries out orders (`edge_agent.agent.carrier.OrderExecutor`)."""

    def __init__(self, settings: AgentSettings, digest: str) -> None:
        """Set up without starting a process; orders fail once the samples no longer have this `digest`."""
        self._bundles = settings.home / "bundles"
        self._digest = digest
        self._settings = msgspec.structs.replace(
            settings, password=None, proxy=None, inference_only=not settings.trains
        )
        self._child: Child | None = None
        self._in_use = threading.Lock()
        self._rest: threading.Timer | None = None

    def execute(
        self,
        order: Order,
        fetch: Callable[[BlobRef], bytes],  # noqa: ARG002 - the child reads the agent's own folder
        *,
        stop: Stop,
        action: Action,
    ) -> FinishedOrder:
        """Carry out an order.

        Raises:
            StoppedError: `stop()` was true; the process is killed, unless it is still loading torch and the samples.
            StoreError: the disk is full or broken.
        """
        with self._in_use:
            if self._rest is not None:
                self._rest.cancel()
            try:
                return self._execute(order, stop, action)
            finally:
                self._schedule_close()

    def _execute(self, order: Order, stop: Stop, action: Action) -> FinishedOrder:
        began = time.monotonic()
        for _ in range(ATTEMPTS):
            if self._child is None:
                remove_unfinished(self._bundles)
                self._child = Child("edge_agent.agent.workplace:run_order", self._settings, self._digest, None)
            child, self._child = self._child, None
            try:
                child.load(stop)
                done = child.call(self._settings, self._digest, order, returns=OrderResult, stop=stop)
            except DiedError as error:
                log.warning("event=worker_died order=%s reason=%r", order.id, str(error))
                died = error
                continue
            except StoppedError:
                if not child.loaded:  # otherwise a device that loads for longer than its orders last would never do one
                    self._child = child
                else:
                    remove_unfinished(self._bundles)
                raise
            self._child = child
            result = decode_result(done.report, action)
            if isinstance(result, Refusal):
                result = msgspec.structs.replace(result, reason=done.reason)
            return FinishedOrder(result, done.blobs, untimed_s=min(done.untimed_s, time.monotonic() - began))
        why = Why.MEMORY if died.status == -SIGKILL else Why.ERROR
        return FinishedOrder(Failed(why=why, reason=f"the process that does the work ended {ATTEMPTS} times: {died}"))

    def _schedule_close(self) -> None:
        """Let the process wait for the next order, or end it."""
        keep_s = self._settings.keep_worker_s
        if keep_s is None:
            keep_s = KEEP_S if measure_free_bytes() >= ENOUGH_BYTES else 0.0
        if self._child is not None and not self._child.loaded:
            keep_s = max(keep_s, LOADING_S)
        self._rest = threading.Timer(keep_s, self.close)
        self._rest.daemon = True
        self._rest.start()

    def close(self) -> None:
        """End the process, if any; the next order starts another."""
        with self._in_use:
            if self._child is not None:
                self._child.close()
                self._child = None


# ------------------------------------------------------------------------------------------------------- the child


def run_order(settings: AgentSettings, digest: str, order: Order | None) -> OrderResult | None:
    """Carry out an order with a worker that is made once; without an order, only make the worker."""
    if order is None:
        with suppress(Exception):  # the next order meets the error again, and reports it
            place = _load_worker(settings, digest, get_versions(settings.data))
            if settings.trains:
                place.worker.network  # noqa: B018 - it is kept
        return None
    models, reading_s = BlobFolder(settings.home / "models"), 0.0
    try:
        place = _load_worker(settings, digest, get_versions(settings.data))
        reading_s, place.untold_s = place.untold_s, 0.0
        finished = place.worker.execute(order, lambda ref: models.get(ref.digest))
        if isinstance(finished.result, TrainedDp):
            log_spent(settings.home, order)
        report = make_report(order, finished.result, 0.0)
    except StoreError:
        raise
    except Exception as error:
        log.exception("event=order_failed order=%s", order.id)
        finished = FinishedOrder(make_failure(error))
        report = make_report(order, finished.result, 0.0)
    reason = finished.result.reason if isinstance(finished.result, Refusal) else ""
    return OrderResult(report, finished.blobs, reading_s + finished.untimed_s, reason)


def log_spent(home: Path, order: Order) -> None:
    """Log the epsilon that this home's samples have spent, in this order's run and in all."""
    from edge_agent.privacy.dp_ledger import Ledger

    action, ledger = decode_action(order, {TrainDp.STEP: TrainDp}), Ledger(home)
    assert isinstance(action, TrainDp)
    delta = action.privacy.delta
    of_run, in_all = ledger.compute_spent(delta, run=order.run), ledger.compute_spent(delta)
    log.info("event=privacy_spent round=%d epsilon=%.3f in_all=%.3f delta=%g", order.round, of_run, in_all, delta)


def require_processor(processor: Processor) -> None:
    """Check that the settings' processor exists.

    Raises:
        ConfigError: it does not exist.
    """
    from fedge.models.training import get_torch_device

    get_torch_device(processor)


def load_samples(settings: AgentSettings, task: TaskSpec) -> DeviceData:
    """Load the samples of the device, without labels if the device does not train.

    Raises:
        ConfigError: the samples cannot be read.
    """
    from fedge.tasks import DeviceData, read_device_data, read_device_inputs

    if settings.trains:
        return read_device_data(task, settings.data, seed=settings.seed)
    return DeviceData.from_inputs(read_device_inputs(task, settings.data))


@dataclass(slots=True)
class _LoadedWorker:
    """The worker, and the part of its making time, in seconds, that no report has left out yet."""

    worker: Worker
    untold_s: float


@lru_cache(1)
def _load_worker(settings: AgentSettings, digest: str, _: object) -> _LoadedWorker:
    """Make the worker as `_make_worker` does, and time it; the time counts as reading all samples, with marked ones."""
    began = time.perf_counter()
    worker = _make_worker(settings, digest)
    return _LoadedWorker(worker, time.perf_counter() - began)


def _make_worker(settings: AgentSettings, digest: str) -> Worker:
    """Make the worker, on one core beside the agent's keep-alive; make it anew if the samples change.

    Raises:
        ConfigError: the samples cannot be read, or are no longer those of the digest.
    """
    task = settings.make_spec()
    data = load_samples(settings, task)
    if data.compute_digest() != digest:
        raise ConfigError(f"{settings.data} has changed since the agent started: start the agent again")
    processor = None
    if settings.trains:
        import torch

        from fedge.models.training import get_torch_device

        torch.set_num_threads(1)
        processor = get_torch_device(settings.train_on)
    return Worker(
        *(settings.id, task, data, settings.home),
        budget=Budget(settings.max_epsilon, settings.delta),
        steps=settings.find_steps(),
        min_cohort=settings.min_cohort,
        processor=processor,
        trains=settings.trains,
    )
