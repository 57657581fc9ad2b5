"""A separate process for an agent's orders, which holds torch and the samples.

The process ends after some time without orders, which makes the agent small again. The agent or, when memory is short,
the kernel may kill it at any time, because what it keeps is durable, and a repeated order gives the same bytes.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from contextlib import closing, suppress
from functools import lru_cache
from pathlib import Path
from signal import SIGKILL
from typing import Final

import msgspec
import psutil
from msgspec import UNSET, Struct

from edge_agent.agent.identity import SampleCounts
from edge_agent.agent.settings import AgentSettings
from edge_agent.device.device import Budget, make_failure
from edge_agent.device.own_samples import OwnSamples
from edge_agent.device.worker import FinishedOrder, Worker
from edge_agent.samples import SampleStore
from edge_agent.samples.sources import count_shared, has_seen, identify_source
from fedge.errors import ConfigError, StoreError
from fedge.steps.contract import Action, Failed, Refusal, decode_action, decode_result, make_report
from fedge.system.child import Child, DiedError, call_once
from fedge.system.files import BlobFolder, remove_unfinished
from fedge.system.hardware import Processor
from fedge.system.stopping import Stop, StoppedError
from fedge.tasks import DeviceData
from fedge.wire.messages import BlobRef, Order, Report, Why

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

    def __init__(self, settings: AgentSettings) -> None:
        """Set up without starting a process."""
        self._bundles = settings.home / "bundles"
        self._settings = strip_secrets(settings)
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
                self._child = Child("edge_agent.agent.workplace:run_order", self._settings, None)
            child, self._child = self._child, None
            try:
                child.load(stop)
                done = child.call(self._settings, order, returns=OrderResult, stop=stop)
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


def strip_secrets(settings: AgentSettings) -> AgentSettings:
    """Return the settings as another process gets them, which speaks with nobody."""
    return msgspec.structs.replace(settings, password=None, proxy=None, inference_only=not settings.trains)


class SampleWatch:
    """What the agent knows of the device's samples without reading them."""

    def __init__(self, settings: AgentSettings) -> None:
        """Have the source read once, in a process that ends.

        Raises:
            ConfigError: the samples cannot be read.
            StoreError: the store cannot be read or written.
        """
        self._settings = strip_secrets(settings)
        self._inspect()
        self._store = SampleStore(settings.home, settings.make_spec())
        self._failed = ""
        self._revision = self._store.revision
        self.counts = self._count()

    def _inspect(self) -> None:
        call_once("edge_agent.agent.workplace:inspect_samples", self._settings, returns=type(None))

    def _count(self) -> SampleCounts:
        n_shared = count_shared(self._store) if self._settings.trains else 0
        return SampleCounts(n_shared, self._store.data_version, self._store.n_arrived)

    def refresh(self) -> None:
        """Count again, and have a source that has changed read again; one that cannot be read is reported once.

        Raises:
            StoreError: the store cannot be read or written.
        """
        seen = identify_source(self._store, self._settings.data)
        if seen != self._failed and not has_seen(self._store, self._settings.data):
            try:
                self._inspect()
            except (ConfigError, DiedError) as error:
                self._failed = seen
                log.warning("event=samples_unreadable reason=%r", str(error))
        if (revision := self._store.revision) != self._revision:
            self._revision, self.counts = revision, self._count()

    def close(self) -> None:
        """Close the store."""
        self._store.close()


# ------------------------------------------------------------------------------------------------------- the child


def run_order(settings: AgentSettings, order: Order | None) -> OrderResult | None:
    """Carry out an order with a worker that is made once; without an order, only make the worker."""
    if order is None:
        with suppress(Exception):  # the next order meets the error again, and reports it
            worker = _open_workplace(settings).make_worker()
            if settings.trains:
                worker.network  # noqa: B018 - it is kept
        return None
    models, reading_s = BlobFolder(settings.home / "models"), 0.0
    try:
        place = _open_workplace(settings)
        worker = place.make_worker()
        reading_s, place.untold_s = place.untold_s, 0.0
        finished = worker.execute(order, lambda ref: models.get(ref.digest))
        privacy = getattr(decode_action(order, worker.steps), "privacy", UNSET)
        if privacy is not UNSET and not isinstance(finished.result, Refusal):
            log_spent(settings.home, order, privacy.delta)
        report = make_report(order, finished.result, 0.0)
    except StoreError:
        raise
    except Exception as error:
        log.exception("event=order_failed order=%s", order.id)
        finished = FinishedOrder(make_failure(error))
        report = make_report(order, finished.result, 0.0)
    reason = finished.result.reason if isinstance(finished.result, Refusal) else ""
    return OrderResult(report, finished.blobs, reading_s + finished.untimed_s, reason)


def log_spent(home: Path, order: Order, delta: float) -> None:
    """Log the epsilon that this home's samples have spent, in this order's run and in all."""
    from edge_agent.privacy.dp_ledger import Ledger

    ledger = Ledger(home)
    of_run, in_all = ledger.compute_spent(delta, run=order.run), ledger.compute_spent(delta)
    log.info("event=privacy_spent round=%d epsilon=%.3f in_all=%.3f delta=%g", order.round, of_run, in_all, delta)


def open_samples(settings: AgentSettings) -> OwnSamples:
    """Open the device's samples.

    Raises:
        ConfigError: the task or the owner's rules are wrong, or the store holds samples of another task.
        StoreError: the store cannot be read.
    """
    task = settings.make_spec()
    return OwnSamples(task, settings.home, settings.data, seed=settings.seed, trains=settings.trains)


def inspect_samples(settings: AgentSettings) -> None:
    """Read the samples once, note their places, and save the source's validation samples.

    Raises:
        ConfigError: the samples cannot be read, or there is no such GPU.
        StoreError: they cannot be noted.
    """
    if settings.train_on is Processor.CUDA:
        from fedge.models.training import get_torch_device

        get_torch_device(settings.train_on)
    with closing(open_samples(settings)) as samples:
        data = samples.read()
        task, n, n_val = settings.make_spec(), len(data.x_train), len(data.x_val)
        log.info("event=samples task=%s n=%d validation=%d classes=%r", task.name, n, n_val, ", ".join(task.classes))


class Workplace:
    """The worker of this process, whose samples are those of the moment when an order begins.

    Attributes:
        untold_s: the part of the reading time, in seconds, that no report has left out yet. It counts as reading all
            samples, with marked ones.
    """

    def __init__(self, settings: AgentSettings) -> None:
        self.untold_s = 0.0
        self._settings = settings
        self._samples: OwnSamples | None = None
        self._worker: Worker | None = None

    def make_worker(self) -> Worker:
        """Return the worker, made anew if the samples have changed.

        Raises:
            ConfigError: the samples cannot be read.
            StoreError: the store cannot be read.
        """
        began = time.perf_counter()
        try:
            self._samples = self._samples or open_samples(self._settings)
            if self._worker is None or self._samples.has_changed():
                self._worker = None
                self._worker = make_worker(self._settings, self._samples.read())
            return self._worker
        finally:
            self.untold_s += time.perf_counter() - began


@lru_cache(1)
def _open_workplace(settings: AgentSettings) -> Workplace:
    return Workplace(settings)


def make_worker(settings: AgentSettings, data: DeviceData) -> Worker:
    """Make the worker of these samples, on one core beside the agent's keep-alive.

    Raises:
        ConfigError: the task is wrong, or there is no such GPU.
    """
    processor = None
    if settings.trains:
        import torch

        from fedge.models.training import get_torch_device

        torch.set_num_threads(1)
        processor = get_torch_device(settings.train_on)
    return Worker(
        *(settings.id, settings.make_spec(), data, settings.home),
        budget=Budget(settings.max_epsilon, settings.delta),
        steps=settings.find_steps(),
        min_cohort=settings.min_cohort,
        processor=processor,
        trains=settings.trains,
        student=settings.student,
    )
