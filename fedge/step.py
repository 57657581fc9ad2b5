"""Steps: what a device can be asked. This is the contract half; it needs no torch.

A step is an `Action` (what is asked, with bounds), its `Result` (what comes back), and a device half, a module with

    run(device, action) -> result                    what the device does (`edge_agent.device.Device`)
    many(devices, actions) -> [result or None]       optional: the same for several simulated devices at once
    overlay(model, kept, layout) -> model            optional: what the step keeps on the device, put over a model

The wire carries the step's name, its version and the action as MessagePack. A device runs the steps that its owner has
installed (`known_steps`); the network only ever names one. The contracts lie in `fedge/steps`, the device halves in
`edge_agent/steps`, under the same names.
"""

from __future__ import annotations

import importlib
from collections.abc import Collection, Iterable, Mapping
from enum import StrEnum
from functools import cache
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Any, ClassVar, Final, Self, TypeVar

import msgspec
from msgspec import UNSET, Struct, UnsetType

from fedge.errors import MALFORMED, ConfigError, ProtocolError
from fedge.loading import load_object
from fedge.messages import BlobRef, Order, Outcome, Report, Why, all_finite, blobs_of

if TYPE_CHECKING:
    from fedge.task import TaskSpec
    from fedge.tensors import Layout

T = TypeVar("T", bound=Struct)
fields_of = cache(msgspec.structs.fields)
"""The fields of a type of struct: finding them takes longer than most messages do."""

GROUP: Final = "fedge.steps"
"""Entry points of installed packages, ours among them, that name an `Action` each."""


class Reveals(StrEnum):
    """What a field of a result, or of another message, lets out of a device: its owner allows kinds (`fedge.egress`).

    docs/privacy.md says what can be learned from each.
    """

    NOTHING = "nothing"
    COUNT = "count"
    UPDATE = "update"
    ACCOUNTED = "accounted"
    MASKED = "masked"
    LOSS = "loss"
    WEIGHT = "weight"
    CHOICE = "choice"
    PROFILE = "profile"
    LABELS = "labels"
    FEATURES = "features"
    PRIVATE = "private"
    VERDICT = "verdict"
    ANSWERS = "answers"
    MACHINE = "machine"
    LOAD = "load"
    USE = "use"
    TEXT = "text"

    @property
    def words(self) -> str:
        """For people."""
        return _WORDS[self]


_WORDS: Final = {
    Reveals.NOTHING: "nothing of its data",
    Reveals.COUNT: "a number of samples",
    Reveals.UPDATE: "a model update",
    Reveals.ACCOUNTED: "a model update with noise, accounted for",
    Reveals.MASKED: "a model update under a mask: nothing but the sum of a cohort",
    Reveals.LOSS: "losses or accuracies",
    Reveals.WEIGHT: "weights or shares of models",
    Reveals.CHOICE: "which model suits its data",
    Reveals.PROFILE: "an activation profile",
    Reveals.LABELS: "what labels it has",
    Reveals.FEATURES: "mean features",
    Reveals.PRIVATE: "a module that was private",
    Reveals.VERDICT: "whether a new bundle suits it",
    Reveals.ANSWERS: "predictions for samples that sensors sent",
    Reveals.MACHINE: "what machine it is",
    Reveals.LOAD: "how busy it is, and how fast",
    Reveals.USE: "how its bundle is used, and whether its inputs have changed",
    Reveals.TEXT: "the text of an error",
}


HARMLESS: Final = frozenset({Reveals.NOTHING, Reveals.COUNT, Reveals.ACCOUNTED})
"""What differential privacy lets out: the number of samples is public (`fedge.steps.train_dp`)."""


class Result(Struct, frozen=True, kw_only=True):
    """What comes back. `REVEALS` says for each field what it lets out; one that it does not name counts as `PRIVATE`.

    A field with a default is left out where the device's owner does not allow it.
    """

    REVEALS: ClassVar[Mapping[str, Reveals]] = {}


class Refusal(Result, frozen=True, kw_only=True):
    """No result, and why. `reason`: for the device's own log; it does not travel."""

    why: Why = Why.OTHER
    reason: str = ""


class Declined(Refusal, frozen=True, kw_only=True):
    """The device will not do it now (RAM, temperature, battery, no data): no fault."""


class Failed(Refusal, frozen=True, kw_only=True):
    """The device tried and could not (a missing blob, a model that does not fit, an exception)."""


class Unsupported(Refusal, frozen=True, kw_only=True):
    """The device does not know the step, or not in this version."""

    why: Why = Why.UNKNOWN_STEP


REFUSALS: Final = {Outcome.DECLINED: Declined, Outcome.FAILED: Failed, Outcome.UNSUPPORTED: Unsupported}


class Action(Struct, frozen=True, kw_only=True):
    """What a device is asked to do; a subclass is the contract of one step.

    STEP, VERSION: its name on the wire; a version counts up when old devices would misunderstand the action.
    RESULT: the type of what comes back. DEVICE: module of the device half. TRAINS: whether it needs torch and labels.
    """

    STEP: ClassVar[str]
    VERSION: ClassVar[int] = 1
    RESULT: ClassVar[type[Result]]
    DEVICE: ClassVar[str]
    TRAINS: ClassVar[bool] = True
    weights: BlobRef | UnsetType = UNSET
    """What a frozen part of the network is (`fedge.weights`): set by the fleet, whatever the step."""
    TIMED: ClassVar[bool] = True
    """Whether the time of the work is told: not where sensitive samples shape it from the start, nor next to none."""

    def passes(self, n_shared: int, n_train: int, n_val: int) -> float:
        """Forward passes of one sample that the step costs, roughly: what the clock and deadlines go by.

        n_shared, n_train, n_val: samples of the device: not sensitive, all of its training samples, validation.
        """
        del n_shared
        return n_train + n_val

    def check(self, result: Any, task: TaskSpec) -> None:
        """Refuse a result of the right type that does not answer this action; call `require`.

        Raises:
            ProtocolError: `wrong-result`, or another name.
        """

    def uploads(self, result: Any, layout: Layout) -> Mapping[BlobRef, Layout | None]:
        """The blobs that a result brings, each with the tensors that it must hold. `layout`: of the task's network.

        None: plain bytes, of a size that this has checked.
        """
        del result, layout
        return {}

    def reveals(self) -> Mapping[str, Reveals]:
        """What each field of a result of this very action lets out."""
        fields = self.RESULT.__struct_fields__
        return {field: self.RESULT.REVEALS.get(field, Reveals.PRIVATE) for field in fields}

    def sparing(self, withheld: Collection[str]) -> Self | None:
        """The action for a device whose owner withholds these kinds; None: nothing would come of it.

        So it is where a field without default is withheld, or all that the result is about.
        """
        reveals = self.reveals()
        needed = {reveals[field.name] for field in fields_of(self.RESULT) if field.required}
        about = set(reveals.values()) - {Reveals.NOTHING}
        empty = bool(about) and about.issubset(withheld)
        return self if needed.isdisjoint(withheld) and not empty else None


def unaccounted(action: type[Action]) -> dict[str, Reveals]:
    """The fields of what comes back that depend on samples and that no noise protects, with what each lets out."""
    told = {field: action.RESULT.REVEALS.get(field, Reveals.PRIVATE) for field in action.RESULT.__struct_fields__}
    return {field: kind for field, kind in told.items() if kind not in HARMLESS}


def require(holds: bool, otherwise: str) -> None:
    """Refuse a result.

    Raises:
        ProtocolError: `wrong-result`, where it does not hold.
    """
    if not holds:
        raise ProtocolError("wrong-result", otherwise)


Steps = Mapping[str, type[Action]]


@cache
def installed_steps() -> Steps:
    """The steps of all installed packages, by name."""
    return {point.name: point.load() for point in entry_points(group=GROUP)}


def known_steps(paths: Iterable[str] = ()) -> Steps:
    """What this device can be asked: the installed steps, and those that its owner names as `package.module:Class`.

    Raises:
        ConfigError: a path names no step.
    """
    known = dict(installed_steps())
    for path in paths:
        own = load_object(path)
        if not (isinstance(own, type) and issubclass(own, Action) and hasattr(own, "STEP")):
            raise ConfigError(f"{path} is no step: it must be a subclass of fedge.step.Action, with a STEP")
        known[own.STEP] = own
    return known


def device_half(action: type[Action]) -> Any:
    """The module that carries a step out."""
    return importlib.import_module(action.DEVICE)


# ------------------------------------------------------------------------------------------------------ on the wire


def body_of(value: Action | Result) -> bytes:
    """An action or a result as it travels: made again in the same way, it gives the same bytes.

    Raises:
        ValueError: it holds a NaN or an infinity (a bug of ours: never sent).
    """
    if not all_finite(msgspec.to_builtins(value)):
        raise ValueError(f"{type(value).__name__} holds a number that is not finite")
    return msgspec.msgpack.encode(value)


def read_action(order: Order, known: Steps) -> Action | Unsupported:
    """The action of an order, as far as this device knows it.

    Raises:
        ProtocolError: `malformed` or `not-finite`.
    """
    kind = known.get(order.step)
    if kind is None or order.version != kind.VERSION:
        have = f"version {kind.VERSION}" if kind else "none of that name"
        return Unsupported(reason=f"step {order.step} version {order.version}: this device has {have}")
    return _read(order.body, kind)


def read_result(report: Report, action: Action) -> Result:
    """What a report says, checked by schema; `Action.check` and the blobs are left to the caller.

    Raises:
        ProtocolError: `malformed` or `not-finite`.
    """
    if report.outcome is not Outcome.DONE:
        return REFUSALS[report.outcome](why=report.why or Why.OTHER)
    return _read(report.body, action.RESULT)


def report_of(order: Order, result: Result, seconds: float) -> Report:
    """The report of an order."""
    refused = next((outcome for outcome, kind in REFUSALS.items() if isinstance(result, kind)), None)
    return Report(
        order_id=order.id,
        device_id=order.device_id,
        seconds=seconds,
        outcome=refused or Outcome.DONE,
        why=result.why if isinstance(result, Refusal) else None,
        body=b"" if refused else body_of(result),
        blobs=tuple(blobs_of(result)),
    )


def _read(body: bytes, kind: type[T]) -> T:
    try:
        value = msgspec.msgpack.decode(body, type=kind)
    except MALFORMED as error:
        raise ProtocolError("malformed", f"{kind.__name__}: {error}") from error
    if not all_finite(msgspec.to_builtins(value)):
        raise ProtocolError("not-finite", f"{kind.__name__} holds NaN or infinity")
    return value
