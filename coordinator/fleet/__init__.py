"""Who is there, and how work gets done: a method writes actions for devices, a fleet brings their answers.

Methods see only this interface; it has two implementations: `coordinator.fleet.mqtt` (real devices) and
`coordinator.fleet.simulated` (workers in this process).
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol

import msgspec
import numpy as np
from numpy.typing import NDArray

from fedge.errors import ConfigError
from fedge.messages import Action, BlobRef, Codec, Context, Order, Result
from fedge.task import TaskSpec
from fedge.tensors import Layout, Model, Tensors


@dataclass(frozen=True, slots=True)
class Device:
    """A device that can be asked in this round. `n_samples`: those not marked sensitive, |D_L|.

    `incarnation`: of its agent, new at each start of it, and of the bundle that drifts, if one does. Where it differs
    from before, the device may not be what it was; a connection that was lost and came back changes nothing.
    `trains`: False for an inference-only device. `drift`: its runtime says that what it sees has left its bundle's
    reference.
    """

    id: str
    n_samples: int
    context: Context | None = None
    incarnation: str = ""
    trains: bool = True
    drift: bool = False


@dataclass(frozen=True, slots=True)
class Answer:
    """What a device answered. `result` None: nothing acceptable came before the deadline. `seconds`: its own time."""

    device_id: str
    result: Result | None
    seconds: float = 0.0


def order_for(
    run: str,
    seed: int,
    round_number: int,
    step: str,
    device_id: str,
    task: TaskSpec,
    action: Action,
    *,
    deadline: float,
) -> Order:
    """The order for one action: the same run, round, step and device always give the same id and seed."""
    name = f"{run}.{round_number}.{step}.{device_id}"
    entropy = hashlib.sha256(f"{seed}.{round_number}.{step}.{device_id}".encode()).digest()
    return Order(
        id=name,
        device_id=device_id,
        round=round_number,
        step=step,
        seed=int.from_bytes(entropy[:6]),
        task_fingerprint=task.fingerprint(),
        deadline=deadline,
        action=action,
    )


def require_sendable(actions: Iterable[Action]) -> None:
    """Refuse, before anybody is asked, what every device would refuse: options that no message can hold.

    Raises:
        ConfigError: a value is out of the range that the protocol has for it; the text names the field.
    """
    for action in {id(action): action for action in actions}.values():  # most of a step share one
        try:
            msgspec.msgpack.decode(msgspec.msgpack.encode(action), type=Action)
        except (msgspec.ValidationError, OverflowError) as error:
            raise ConfigError(
                f"no order can say this: {error}; change the option of the method that sets it"
            ) from error


class Fleet(Protocol):
    """The devices of one federation, as a method sees them during one round. `task`: what they learn."""

    task: TaskSpec

    def devices(self) -> tuple[Device, ...]:
        """Those that can be asked to train, by ascending id; a snapshot taken and stored when the round began."""

    def inference_only(self) -> tuple[Device, ...]:
        """Those that cannot train, by ascending id, of the same snapshot: for `Route` and `InstallBundle` alone."""

    async def run(self, step: str, actions: Mapping[str, Action]) -> dict[str, Answer]:
        """Have each device do its action; answers by ascending device id, one for each action.

        `step` is unique within the round. Returns when all have answered, or at the round's deadline. Called again
        after a crash with the same step and actions it repeats nothing that was already answered.
        """

    def put(self, tensors: Mapping[str, NDArray[np.generic]], codec_: Codec = Codec.FLOAT32) -> BlobRef:
        """Keep a model, so that actions may refer to it. Equal tensors give an equal reference."""

    def put_bytes(self, data: bytes) -> BlobRef:
        """Keep a file, so that actions may refer to it; the codec in the reference means nothing."""

    def get(self, ref: BlobRef, layout: Layout) -> Model:
        """A model or an accepted update; an update's `params` are the difference from its start."""

    def get_tensors(self, ref: BlobRef) -> Tensors:
        """Tensors in FLOAT32 that this side has `put` or a device has sent, whatever their names and shapes."""
