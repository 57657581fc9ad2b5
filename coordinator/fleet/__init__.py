"""Who is there, and how work gets done: a method writes actions for devices, a fleet brings their answers.

Methods see only this interface; it has two implementations: `coordinator.fleet.mqtt` (real devices) and
`coordinator.fleet.simulated` (workers in this process).
"""

from __future__ import annotations

import hashlib
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

import msgspec
import numpy as np
from numpy.typing import NDArray

from coordinator.fleet.versions import Descent, leading_to
from fedge.codec import Norms
from fedge.errors import ConfigError
from fedge.messages import BlobRef, Codec, Context, Difference, Order, Report, Why, blobs_of
from fedge.step import Action, Declined, Refusal, Result, Unsupported, body_of, read_result, require
from fedge.task import TaskSpec
from fedge.tensors import Layout, Model, Tensors
from fedge.weights import needed_on_devices

if TYPE_CHECKING:
    from coordinator.fleet.relayed import RelayFleet


@dataclass(frozen=True, slots=True)
class Device:
    """A device that can be asked in this round. `n_samples`: those not marked sensitive, |D_L|.

    `incarnation`: of its agent, new at each start of it, and of the bundle that drifts, if one does. Where it differs
    from before, the device may not be what it was; a connection that was lost and came back changes nothing.
    `trains`: False for an inference-only device. `drift`: its runtime says that what it sees has left its bundle's
    reference. `steps`: what it can be asked, by name the version; None: all there is. `release`: the highest of a
    bundle that it has had. `withholds`: kinds (`fedge.step.Reveals`) that its owner does not let out. `via`: the relay
    that it is behind.
    """

    id: str
    n_samples: int
    context: Context | None = None
    incarnation: str = ""
    trains: bool = True
    drift: bool = False
    steps: Mapping[str, int] | None = None
    release: int = 0
    withholds: tuple[str, ...] = ()
    via: str = ""

    def knows(self, action: Action) -> bool:
        """Whether the device can be asked this, and may."""
        return isinstance(self.asked(action), Action)

    def asked(self, action: Action) -> Action | Refusal:
        """The action as the device is asked it, without what its owner withholds; a refusal: it is not asked."""
        if self.steps is not None and self.steps.get(action.STEP) != action.VERSION:
            text = (
                f"it does not know step {action.STEP} version {action.VERSION}: update fedge there, or install the step"
            )
            return Unsupported(reason=text)
        spared = action.sparing(self.withholds)
        if spared is None:
            kinds = ", ".join(sorted({*self.withholds} & {*action.reveals().values()}))
            return Declined(why=Why.NOT_ALLOWED, reason=f"its owner withholds what {action.STEP} tells: {kinds}")
        return spared


def asked(
    devices: Mapping[str, Device], actions: Mapping[str, Action], task: TaskSpec
) -> tuple[dict[str, Action], dict[str, Refusal]]:
    """The actions as the devices are asked them, and in place of some an answer without asking; both by id."""
    if (frozen := needed_on_devices(task)) is not None:
        actions = {i: msgspec.structs.replace(a, weights=frozen) if a.TRAINS else a for i, a in actions.items()}
    found = {i: devices[i].asked(action) for i, action in actions.items()}
    refused = {i: each for i, each in found.items() if isinstance(each, Refusal)}
    return {i: each for i, each in found.items() if isinstance(each, Action)}, refused


@dataclass(frozen=True, slots=True)
class Answer:
    """What a device answered. `result` None: nothing acceptable came before the deadline. `seconds`: its own time.

    `round`: in which its order was written; where an answer is late by rounds (`Fleet.stream`), that is its staleness.
    """

    device_id: str
    result: Result | None
    seconds: float = 0.0
    round: int = field(default=0, compare=False)


class Seen(msgspec.Struct, frozen=True, kw_only=True):
    """An update that was believed, as a measure for those that come after it."""

    norms: Norms
    n_samples: int


def order_for(
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
) -> Order:
    """The order for one action: the same run, issue, round, label and device always give the same id and seed."""
    steps = leading_to(blobs_of(action), descents or {})
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
        version=action.VERSION,
        body=body_of(action),
        differences={digest: Difference(base=step.base, blob=step.blob) for digest, step in steps.items()},
    )


def checked(action: Action, report: Report, task: TaskSpec) -> Result:
    """What a report says, if it answers the action in this task; its tensors are checked when they are decoded.

    Raises:
        ProtocolError: `malformed`, `not-finite`, `wrong-result`, or what the step's own check says.
    """
    return answering(action, read_result(report, action), task)


def answering(action: Action, result: Result, task: TaskSpec) -> Result:
    """The result, if it answers the action in this task: the one check of both fleets.

    Raises:
        ProtocolError: `wrong-result`, or what the step's own check says.
    """
    if not isinstance(result, Refusal):
        require(isinstance(result, action.RESULT), f"{type(result).__name__} does not answer {action.STEP}")
        action.check(result, task)
    return result


def require_sendable(actions: Iterable[Action]) -> None:
    """Refuse, before anybody is asked, what every device would refuse: options that no message can hold.

    Raises:
        ConfigError: a value is out of the range that the protocol has for it; the text names the field.
    """
    for action in {id(action): action for action in actions}.values():  # most of a step share one
        try:
            msgspec.msgpack.decode(body_of(action), type=type(action))
        except (msgspec.ValidationError, OverflowError, ValueError) as error:
            raise ConfigError(
                f"no order can say this: {error}; change the option of the method that sets it"
            ) from error


class Fleet(Protocol):
    """The devices of one federation, as a method sees them during one round. `task`: what they learn.

    `descents`: of the models that were put to follow others (`coordinator.fleet.versions`); None: none is to.
    """

    task: TaskSpec
    descents: dict[str, Descent] | None

    @property
    def sites(self) -> RelayFleet | None:
        """Where the updates of devices behind relays are summed; None: there are no relays."""

    def devices(self) -> tuple[Device, ...]:
        """Those that can be asked to train, by ascending id; a snapshot taken and stored when the round began."""

    def inference_only(self) -> tuple[Device, ...]:
        """Those that cannot train, by ascending id, of the same snapshot: for steps that need no torch alone."""

    async def run(self, label: str, actions: Mapping[str, Action]) -> dict[str, Answer]:
        """Have each device do its action; answers by ascending device id, one for each action.

        `label` is unique within the round. A device that does not know a step is not asked: its answer is
        `Unsupported`. Nor is one whose owner withholds what the step tells: `Declined`. Returns when all have answered,
        or at the round's deadline. Called again after a crash with the same label and actions it repeats nothing that
        was already answered.
        """

    def stream(self, label: str, actions: Mapping[str, Action], seen: Sequence[Seen] = ()) -> AsyncIterator[Answer]:
        """Have each device do its action; answers one by one, as they come.

        `label` is unique within the round. A device has a day, whatever the deadline of a round: nobody waits for it.
        `seen`: updates from before that the norms of the new ones are measured against, beside each other.

        Answers of orders that earlier streams of this run have left open are among them. Who leaves the loop leaves
        the others open: they go on, and come in a later stream, also of a later round. The stream ends when no order
        is open any more; one that is never answered gives an answer without result.

        The order of the answers is recorded before each is handed out. After a crash the same calls give the same
        answers, as far as they were handed out in this round, and then go on.
        """

    def busy(self) -> frozenset[str]:
        """The devices whose answer to a streamed order has not been handed out yet: the same after a crash."""

    def put(self, tensors: Mapping[str, NDArray[np.generic]], codec_: Codec = Codec.FLOAT32) -> BlobRef:
        """Keep a model, so that actions may refer to it. Equal tensors give an equal reference."""

    def put_bytes(self, data: bytes) -> BlobRef:
        """Keep a file, so that actions may refer to it; the codec in the reference means nothing."""

    def get(self, ref: BlobRef, layout: Layout) -> Model:
        """A model or an accepted update; an update's `params` are the difference from its start."""

    def norms(self, ref: BlobRef, layout: Layout) -> Norms:
        """L2 norms of the parameters and of the buffers of what `get` gives; known of updates of the last step."""

    def get_bytes(self, ref: BlobRef) -> bytes:
        """The bytes of a blob that this side has `put` or a device has sent."""

    def get_tensors(self, ref: BlobRef) -> Tensors:
        """Tensors in FLOAT32 that this side has `put` or a device has sent, whatever their names and shapes."""

    def note(self, event: str, fields: Mapping[str, object]) -> None:
        """Say what a method decided, for people to look at; it changes nothing."""


class FleetAround:
    """A `Fleet` around another, which it hands everything on to: of whoever changes some of what is asked.

    What it knows of the devices, and the tensors, are the other's.
    """

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self.task = fleet.task
        self.sites: RelayFleet | None = fleet.sites

    @property
    def descents(self) -> dict[str, Descent] | None:
        """The other's, which writes the orders."""
        return self._fleet.descents

    @descents.setter
    def descents(self, descents: dict[str, Descent] | None) -> None:
        self._fleet.descents = descents

    def devices(self) -> tuple[Device, ...]:
        """The other's."""
        return self._fleet.devices()

    def inference_only(self) -> tuple[Device, ...]:
        """The other's."""
        return self._fleet.inference_only()

    async def run(self, label: str, actions: Mapping[str, Action]) -> dict[str, Answer]:
        """As the other."""
        return await self._fleet.run(label, actions)

    def stream(self, label: str, actions: Mapping[str, Action], seen: Sequence[Seen] = ()) -> AsyncIterator[Answer]:
        """As the other."""
        return self._fleet.stream(label, actions, seen)

    def busy(self) -> frozenset[str]:
        """The other's."""
        return self._fleet.busy()

    def put(self, tensors: Mapping[str, NDArray[np.generic]], codec_: Codec = Codec.FLOAT32) -> BlobRef:
        """Keep tensors in the other."""
        return self._fleet.put(tensors, codec_)

    def put_bytes(self, data: bytes) -> BlobRef:
        """Keep a file in the other."""
        return self._fleet.put_bytes(data)

    def get(self, ref: BlobRef, layout: Layout) -> Model:
        """A model of the other's."""
        return self._fleet.get(ref, layout)

    def norms(self, ref: BlobRef, layout: Layout) -> Norms:
        """Of an update of the other's."""
        return self._fleet.norms(ref, layout)

    def get_bytes(self, ref: BlobRef) -> bytes:
        """The bytes of a blob of the other's."""
        return self._fleet.get_bytes(ref)

    def get_tensors(self, ref: BlobRef) -> Tensors:
        """Tensors of the other's."""
        return self._fleet.get_tensors(ref)

    def note(self, event: str, fields: Mapping[str, object]) -> None:
        """Say it through the other."""
        self._fleet.note(event, fields)
