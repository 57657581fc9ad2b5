"""The interface between methods and devices: a method writes actions, and a fleet brings back the devices' answers.

Methods see only this interface. It has two implementations: `coordinator.fleet.mqtt` (real devices) and
`coordinator.fleet.simulated` (workers in this process).
"""

from __future__ import annotations

import hashlib
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import msgspec
import numpy as np
from numpy.typing import NDArray

from coordinator.fleet.versions import Descent, find_descents
from coordinator.store.records import Device
from fedge.data.task import TaskSpec
from fedge.errors import ConfigError, ProtocolError
from fedge.models.weights import find_device_weights
from fedge.steps.contract import Action, Refusal, Result, decode_result, encode_body, require
from fedge.steps.mixture.install import Installed
from fedge.steps.sgd import RECIPE
from fedge.system.moved import alias_members, alias_names
from fedge.tensors.codecs import Norms
from fedge.tensors.layout import Codec, Layout, Model, Tensors, view_bytes
from fedge.wire.messages import MAX_BODY_BYTES, BlobRef, Difference, Order, Report, iterate_blobs

if TYPE_CHECKING:
    from coordinator.fleet.sites import Sites


def prepare_actions(
    devices: Mapping[str, Device], actions: Mapping[str, Action], task: TaskSpec, campaign: int = 0
) -> tuple[dict[str, Action], dict[str, Refusal]]:
    """Return the actions to send, and immediate answers for devices that are not asked; both by id.

    Devices that get the same action, and know and withhold the same, share one object, so that it is encoded once.
    `campaign`: the campaign whose introduction lets the bundles into service; 0 if they enter it at once.
    """
    frozen = find_device_weights(task)
    shared: dict[tuple[object, ...], Action | Refusal] = {}

    def fill_action(action: Action) -> Action:
        if frozen is not None and action.TRAINS:
            action = msgspec.structs.replace(action, weights=frozen)
        leaves_bundle = action.EXPORTS or issubclass(action.RESULT, Installed)
        return msgspec.structs.replace(action, campaign=campaign) if campaign and leaves_bundle else action

    def prepare_action(device: Device, action: Action) -> Action | Refusal:
        known = None if device.steps is None else (device.steps.get(action.STEP), device.steps.get(RECIPE))
        key = id(action), device.withholds, known
        if key not in shared:
            shared[key] = device.prepare_action(fill_action(action))
        return shared[key]

    found = {i: prepare_action(devices[i], action) for i, action in actions.items()}
    refused = {i: each for i, each in found.items() if isinstance(each, Refusal)}
    return {i: each for i, each in found.items() if isinstance(each, Action)}, refused


@dataclass(frozen=True, slots=True)
class Answer:
    """A device's answer. `result`: None if nothing acceptable came in time. `seconds`: time measured by the device.

    `round`: the round in which the order was written; for answers that are rounds late (`Fleet.stream`), this gives
    the staleness.
    """

    device_id: str
    result: Result | None
    seconds: float = 0.0
    round: int = field(default=0, compare=False)


class AcceptedUpdate(msgspec.Struct, frozen=True, kw_only=True):
    """The norms and samples of an accepted update, as a reference for later ones."""

    norms: Norms
    n_samples: int


def make_order(
    run: str,
    seed: int,
    round_number: int,
    label: str,
    device_id: str,
    task_fingerprint: str,
    action: Action,
    *,
    left_s: float,
    descents: Mapping[str, Descent] | None = None,
    issue: str = "",
    body: bytes | None = None,
) -> Order:
    """Make the order for one action; equal run, issue, round, label and device give equal id and seed.

    `body`: the action as bytes, if many orders share it.
    """
    steps = find_descents(iterate_blobs(action), descents) if descents else {}
    entropy = hashlib.sha256(f"{seed}.{round_number}.{label}.{device_id}".encode()).digest()
    return Order(
        id=f"{run}{issue}.{round_number}.{label}.{device_id}",
        device_id=device_id,
        run=run,
        round=round_number,
        label=label,
        seed=int.from_bytes(entropy[:6]),
        task_fingerprint=task_fingerprint,
        left_s=left_s,
        step=action.STEP,
        version=action.order_version,
        body=encode_body(action) if body is None else body,
        differences={digest: Difference(base=step.base, blob=step.blob) for digest, step in steps.items()},
    )


def read_valid_result(action: Action, report: Report, task: TaskSpec) -> Result:
    """Return the result in a report if it answers the action in this task; tensors are checked when decoded.

    Raises:
        ProtocolError: `malformed`, `not-finite`, `wrong-result`, or a name from the step's own check.
    """
    return require_answer(action, decode_result(report, action), task)


def require_answer(action: Action, result: Result, task: TaskSpec) -> Result:
    """Return the result if it answers the action in this task; both fleets use this check.

    Raises:
        ProtocolError: `wrong-result`, or a name from the step's own check.
    """
    if not isinstance(result, Refusal):
        require(isinstance(result, action.RESULT), f"{type(result).__name__} does not answer {action.STEP}")
        action.check(result, task)
    return result


def require_sendable(actions: Iterable[Action]) -> None:
    """Refuse, before sending, actions that no message can hold or every device would refuse.

    Raises:
        ConfigError: a value is out of the protocol's range; the text names the field.
    """
    for action in {id(action): action for action in actions}.values():  # usually one action shared by all
        try:
            body = encode_body(action)
            msgspec.msgpack.decode(body, type=type(action))
        except (TypeError, msgspec.ValidationError, OverflowError, ValueError) as error:
            raise ConfigError(
                f"no order can hold this: {error}; change the option of the method that sets it"
            ) from error
        if len(body) > MAX_BODY_BYTES:
            raise ConfigError(
                f"{type(action).__name__} of {len(body)} bytes fits into no order, which holds {MAX_BODY_BYTES}: put "
                "large parts into a file (fleet.put_bytes), and name that"
            )


@alias_members(
    devices="get_devices",
    inference_only="get_inference_devices",
    busy="get_busy_devices",
    norms="get_norms",
    note="record_event",
)
class Fleet:
    """The devices of a federation, as a method sees them in one round. `task`: the task that they learn.

    This base class passes all requests to another fleet; subclasses change the actions, some methods, or all.
    """

    task: TaskSpec

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self.task = fleet.task

    @property
    def descents(self) -> dict[str, Descent] | None:
        """The descents of models stored as successors of other models (`coordinator.fleet.versions`), or None."""
        return self._fleet.descents

    @descents.setter
    def descents(self, descents: dict[str, Descent] | None) -> None:
        self._fleet.descents = descents

    @property
    def sites(self) -> Sites | None:
        """The sites on which updates are summed in place, such as sites of relays; None without any."""
        return self._fleet.sites

    def get_devices(self) -> tuple[Device, ...]:
        """Return the devices that can train, by ascending id; a snapshot stored at the start of the round."""
        return self._fleet.get_devices()

    def get_inference_devices(self) -> tuple[Device, ...]:
        """Return the devices that cannot train, by ascending id, from the snapshot; they do steps without torch."""
        return self._fleet.get_inference_devices()

    def change_actions(self, actions: Mapping[str, Action]) -> Mapping[str, Action]:
        """Return the actions as the other fleet gets them."""
        return actions

    async def run(self, label: str, actions: Mapping[str, Action]) -> dict[str, Answer]:
        """Have each device do its action; return one answer per action, by ascending device id.

        `label` is unique within the round. A device that does not know the step is not asked and answers `Unsupported`;
        a device whose owner withholds what the step reveals answers `Declined`. The call returns when all have
        answered, or at the round's deadline. When called again after a crash with the same label and actions, answered
        work is not repeated.
        """
        return await self._fleet.run(label, self.change_actions(actions))

    def stream(
        self, label: str, actions: Mapping[str, Action], seen: Sequence[AcceptedUpdate] = ()
    ) -> AsyncIterator[Answer]:
        """Have each device do its action; yield answers as they arrive.

        `label` is unique within the round. Each device has a day, whatever the round's deadline, since nobody waits for
        the device. `seen`: earlier updates; norms of new updates are compared with these and with each other.

        Answers to orders left open by earlier streams of this run are included. A caller that leaves the loop leaves
        the other orders open; their answers arrive in a later stream, possibly of a later round. The stream ends when
        no order is open; an order that is never answered yields an answer without result.

        The order of answers is recorded before each is yielded. After a crash, the same calls first replay the answers
        yielded in this round, then continue.
        """
        return self._fleet.stream(label, self.change_actions(actions), seen)

    def get_busy_devices(self) -> frozenset[str]:
        """Return the devices with a streamed order whose answer is not yielded yet; the same after a crash."""
        return self._fleet.get_busy_devices()

    def put(self, tensors: Mapping[str, NDArray[np.generic]], codec_: Codec = Codec.FLOAT32) -> BlobRef:
        """Store a model that actions can refer to. Equal tensors give an equal reference."""
        return self._fleet.put(tensors, codec_)

    def put_model(self, model: Model, layout: Layout) -> BlobRef:
        """Store the tensors of a model as `put` does, exactly; nobody may change it any more."""
        return self._fleet.put_model(model, layout)

    def put_bytes(self, data: bytes) -> BlobRef:
        """Store a file that actions can refer to; the codec in the reference is meaningless."""
        return self._fleet.put_bytes(data)

    def get(self, ref: BlobRef, layout: Layout) -> Model:
        """Return a model or an accepted update; an update's `params` are the difference from its start."""
        return self._fleet.get(ref, layout)

    def get_norms(self, ref: BlobRef, layout: Layout) -> Norms:
        """Return the L2 norms of parameters and buffers of what `get` returns; known for last step's updates."""
        return self._fleet.get_norms(ref, layout)

    def get_bytes(self, ref: BlobRef) -> bytes:
        """Return the bytes of a blob that this side `put` or a device sent."""
        return self._fleet.get_bytes(ref)

    def get_tensors(self, ref: BlobRef) -> Tensors:
        """Return tensors in FLOAT32 that this side `put` or a device sent, of any shapes; not to be changed."""
        return view_bytes(self.get_bytes(ref))

    def accuse(self, device_id: str, error: ProtocolError) -> None:
        """Log a device's wrong message, and record it as evidence (`coordinator.fleet.quarantine`)."""
        self._fleet.accuse(device_id, error)

    def record_event(self, event: str, fields: Mapping[str, object]) -> None:
        """Record a method's decision for people to read; this has no other effect."""
        self._fleet.record_event(event, fields)


__getattr__ = alias_names(__name__, Seen="AcceptedUpdate")
