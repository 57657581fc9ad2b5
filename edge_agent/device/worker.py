"""The worker of a device: carries out orders one at a time through their steps; no network, threads or clock."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec
from msgspec import UNSET

from edge_agent.device.device import (
    PERSONAL,
    Accepted,
    Budget,
    Device,
    FailedError,
    Fetch,
    KeptTensors,
    Source,
    UnpackedModel,
    decode_kept,
    make_failure,
    make_secret_source,
    overlay_tensors,
)
from edge_agent.device.files import read_newest
from edge_agent.device.verdicts import was_accepted
from fedge.errors import DamagedError, FedgeError, ProtocolError, StoreError
from fedge.steps.contract import (
    Action,
    Declined,
    Failed,
    Refusal,
    Result,
    Steps,
    decode_action,
    encode_body,
    list_versions,
    load_device_half,
    load_installed_steps,
)
from fedge.steps.masked.mask_shares import MIN_COHORT
from fedge.system.stopping import Stop, StoppedError, never
from fedge.wire.messages import MAX_BODY_BYTES, Order, Why, iterate_blobs

if TYPE_CHECKING:
    import torch

    from fedge.data.task import TaskSpec
    from fedge.models.training import Network
    from fedge.tasks import DeviceData
    from fedge.tensors.layout import Model

log = logging.getLogger("fedge.agent")

R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class FinishedOrder:
    """The result of an order and its blobs by digest. `unpacked`: unencoded updates, in simulations only (`encoding`).

    `untimed_s`: the part of the duration that sensitive samples may have influenced.
    """

    result: Result
    blobs: dict[str, bytes] = field(default_factory=dict)
    unpacked: dict[str, UnpackedModel] = field(default_factory=dict)
    untimed_s: float = field(default=0.0, compare=False)


class Worker:
    """A worker that carries out the orders of one device.

    Args:
        device_id: the device's name, for failure messages.
        task: what is learned.
        data: the device's samples, which stay in the worker.
        home: durable folder, in which `kept` and `bundles` are the worker's.
        steps: known steps; if None, all that are installed or passed as an action.
        min_cohort: fewest devices in a masked sum, and in the difference of two sums of a run.
        processor: the processor that trains the network; the CPU if None.
        trains: whether the device trains; otherwise steps that need torch or labels are declined.
        budget: the owner's privacy budget for all orders together.
        student: whether a bundle has one network in place of a mixture (docs/methods/student.md).
        source: makes the source of an order's noise; only simulations replace the operating system's.

    Attributes:
        accepted: (id of an order) -> whether the coordinator accepted its report; by default read from the agent's
            folder. A simulated fleet replaces it.

    Raises:
        ConfigError: a sample has a label that the task does not have.
    """

    def __init__(
        self,
        device_id: str,
        task: TaskSpec,
        data: DeviceData,
        home: Path,
        *,
        steps: Steps | None = None,
        min_cohort: int = MIN_COHORT,
        processor: torch.device | None = None,
        trains: bool = True,
        budget: Budget = Budget(),
        student: bool = False,
        source: Callable[[Order], Source] = make_secret_source,
    ) -> None:
        self.id = device_id
        self.task = task
        self.data = data.to_task_types(task).select_usual(task)
        self.home = home
        self.steps = dict(load_installed_steps() if steps is None else steps)
        self.min_cohort = min_cohort
        self.trains = trains
        self.budget = budget
        self.student = student
        self.source = source
        self.fingerprint = task.compute_fingerprint()
        self.accepted: Accepted = partial(was_accepted, home)
        self._processor = processor
        self._limits = steps

    @property
    def network(self) -> Network:
        """The task's network. All workers of a thread share it, so do not rely on its present weights."""
        return self._get_network(self.task)

    def _get_network(self, task: TaskSpec) -> Network:
        from fedge.models.training import CPU, get_shared_network

        return get_shared_network(task, self.fingerprint, self._processor or CPU)

    @property
    def versions(self) -> Mapping[str, int] | None:
        """Versions of the worker's steps by name, or None if the worker takes any step."""
        return None if self._limits is None else list_versions(self._limits)

    def make_device(self, order: Order, fetch: Fetch, stop: Stop = never, action: Action | None = None) -> Device:
        """Make the device that a step may use during this order; `action`: the order's, which may need another head."""
        head_class = action.find_head_class(self.steps) if action is not None else ""
        task = self.task.with_head_class(head_class) if head_class else self.task
        return Device(
            id=self.id,
            task=task,
            fingerprint=self.fingerprint,
            data=self.data,
            home=self.home,
            steps=self.steps,
            min_cohort=self.min_cohort,
            budget=self.budget,
            order=order,
            source=self.source(order),
            _fetch=fetch,
            _network=lambda: self._get_network(task),
            _accepted=self.accepted,
            stop=stop,
            student=self.student,
        )

    def execute(self, order: Order, fetch: Fetch, *, stop: Stop = never, action: Action | None = None) -> FinishedOrder:
        """Carry out an order.

        `stop`: checked between batches. `action`: of the order, if already decoded.

        Returns:
            The order's result: `Failed` if the order or its blobs are unfit or the user's code raises anything,
            `Declined` if there are no data for the order, `Unsupported` if the device does not know the step.

        Raises:
            StoppedError: `stop()` was true.
            StoreError: the disk is full or broken.
        """
        asked = action if action is not None else self.run_guarded(lambda: decode_action(order, self.steps))
        if isinstance(asked, Refusal):
            return FinishedOrder(asked)
        self.steps.setdefault(asked.STEP, type(asked))
        device = self.make_device(order, fetch, stop, asked)
        device.campaign = 0 if asked.campaign is UNSET else asked.campaign
        if (refusal := self.find_refusal(asked)) is not None:
            return FinishedOrder(refusal)
        with self._seed_dropout(asked, order.seed):
            result = self.run_guarded(
                lambda: require_sendable(load_device_half(type(asked)).run(device, asked), device, asked)
            )
        return finish_order(device, result)

    def find_refusal(self, action: Action) -> Declined | None:
        """Return why the worker refuses this action, regardless of its samples, or None."""
        if action.TRAINS and not self.trains:
            return Declined(why=Why.NO_TRAINING)
        fields = action.find_unaccounted()
        if fields and self.budget.max_epsilon is not None:
            name, kind = next(iter(fields.items()))
            text = f"step {action.STEP} tells {name} ({kind.words}) without noise, and this device has a privacy budget"
            return Declined(why=Why.BUDGET, reason=text)
        return None

    def run_guarded(self, work: Callable[[], R]) -> R | Failed:
        """Return the work's result, or `Failed` if order or blobs are unfit or a user's code raises.

        Foreign exceptions (from a user's network) are logged in full.

        Raises:
            StoppedError, StoreError: as in `execute`.
        """
        try:
            return work()
        except DamagedError as error:
            return make_failure(error)
        except (StoreError, StoppedError):
            raise
        except (FedgeError, FailedError, ValueError) as error:
            return make_failure(error)
        except Exception as error:
            log.exception("event=work_failed device=%s", self.id)
            return make_failure(error)

    def _seed_dropout(self, action: Action, seed: int) -> AbstractContextManager[None]:
        """Seed dropout in a user's network with the order's seed."""
        if not action.TRAINS:
            return nullcontext()
        from fedge.models.training import CPU, seed_torch

        return seed_torch(seed, self._processor or CPU)

    def make_personal_model(self, model: Model) -> Model:
        """Return the model that the device would use, the shared model with what the device kept."""
        runs = sorted((self.home / "kept").glob("*/"), key=lambda run: run.stat().st_mtime_ns)
        data = read_newest(runs[-1] / PERSONAL) if runs else None
        if data is None:
            return model
        from fedge.tensors.layers import make_layers
        from fedge.tensors.layout import view_bytes

        kept, layout = decode_kept(data, KeptTensors), self.network.layout
        return overlay_tensors(self.steps, kept.step, model, make_layers(view_bytes(kept.tensors), layout), layout)


def finish_order(device: Device, result: Result) -> FinishedOrder:
    """Make the final result of an order, with its blobs.

    Raises:
        StoreError: the disk is full or broken.
    """
    if not isinstance(result, Refusal):
        device.record_report()
    return FinishedOrder(result, device.blobs, device.unpacked, device.untimed_s)


def require_sendable(result: Any, device: Device, action: Action) -> Result:
    """Return a step's result if the coordinator can read it.

    Raises:
        FailedError: the result is too large for a report, or names tensors that were never sent.
        ProtocolError: the result holds a number that is not finite.
    """
    if isinstance(result, Refusal):
        return result
    step, kind = action.STEP, action.RESULT.__name__
    if not isinstance(result, action.RESULT):
        raise FailedError(f"step {step} returned {type(result).__name__} instead of {kind}")
    try:
        body = encode_body(result)
        msgspec.msgpack.decode(body, type=action.RESULT)
    except (TypeError, OverflowError, msgspec.ValidationError) as error:
        raise FailedError(f"step {step} returned a {kind} that no report holds: {error}") from error
    except ValueError as error:
        raise ProtocolError("not-finite", f"step {step}: {error}") from error
    if len(body) > MAX_BODY_BYTES:
        raise FailedError(
            f"step {step} returned a {kind} of {len(body)} bytes, and a report holds {MAX_BODY_BYTES}: send large "
            "parts with device.send"
        )
    sent = device.blobs.keys() | device.unpacked.keys()
    if missing := [ref.digest for ref in iterate_blobs(result) if ref.digest not in sent]:
        raise FailedError(
            f"step {step} returned a {kind} with tensors that it never sent ({missing[0][:8]}): take the "
            "reference that device.send or send_update returns"
        )
    return result
