"""Steps, the work that a device can be asked to do. This is the contract half, which needs no torch.

A step consists of an `Action` (the request, with bounds), its `Result`, and a device half, which is a module with

    run(device, action) -> result                    what the device does (`edge_agent.device.device.Device`)
    many(devices, actions) -> [result or None]       optional: the same for several simulated devices at once
    overlay(model, kept, layout) -> model            optional: combines what the step keeps with a model

The wire carries the step's name, its version and the action as MessagePack. A device runs only steps that its owner has
installed (`load_known_steps`); the network can only name them. Contracts are in `fedge/steps`, device halves in
`edge_agent/steps`, under the same names.
"""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Collection, Iterable, Mapping
from functools import cache
from importlib.metadata import entry_points
from importlib.util import find_spec
from typing import Any, ClassVar, Final, Self, TypeVar, get_args, get_type_hints

import msgspec
from msgspec import UNSET, Struct, UnsetType

from fedge.data.task import TaskSpec
from fedge.errors import MALFORMED, ConfigError, ProtocolError
from fedge.settings import NAME
from fedge.steps.sgd import RECIPE, RECIPE_VERSION, VERSION_STEP, iterate_recipes
from fedge.system.loading import load_object
from fedge.system.moved import alias_members
from fedge.system.text import Worded
from fedge.tensors.layout import Layout
from fedge.wire.messages import BlobRef, Count, Order, Outcome, Report, Why, are_all_finite, iterate_blobs

T = TypeVar("T", bound=Struct)
fields_of = cache(msgspec.structs.fields)
"""Return the fields of a type of struct. Cached, since finding them takes longer than handling most messages."""

GROUP: Final = "fedge.steps"
"""Group of the entry points by which installed packages, ours among them, each name an `Action`."""


class Reveals(Worded):
    """Kinds of what message fields reveal about a device. The device's owner allows some (`fedge.privacy.egress`).

    docs/privacy.md says what can be learned from each kind.
    """

    NOTHING = "nothing", "nothing of its data"
    COUNT = "count", "a number of samples"
    UPDATE = "update", "a model update"
    ACCOUNTED = "accounted", "a model update or another answer with noise, accounted for"
    MASKED = "masked", "a model update under a mask: nothing but the sum of a cohort"
    LOSS = "loss", "losses or accuracies"
    WEIGHT = "weight", "weights or shares of models"
    CHOICE = "choice", "which model suits its data"
    PROFILE = "profile", "an activation profile"
    LABELS = "labels", "what labels it has"
    FEATURES = "features", "mean features"
    PRIVATE = "private", "a module that was private"
    PERSONAL = "personal", "how well its own bundles do"
    VERDICT = "verdict", "whether a new bundle suits it"
    ANSWERS = "answers", "predictions for samples that sensors sent"
    MACHINE = "machine", "what machine it is"
    LOAD = "load", "how busy it is, and how fast"
    USE = "use", "how its bundle is used, and whether its inputs have changed"
    TEXT = "text", "the text of an error"


HARMLESS: Final = frozenset({Reveals.NOTHING, Reveals.COUNT, Reveals.ACCOUNTED})
"""Kinds that differential privacy permits; the number of samples counts as public (docs/privacy.md)."""


class Result(Struct, frozen=True, kw_only=True):
    """The result of a step. `REVEALS` says for each field what it reveals; a field not listed counts as `PRIVATE`.

    A field with a default is left out if the device's owner does not allow it.
    """

    REVEALS: ClassVar[Mapping[str, Reveals]] = {}

    @classmethod
    def get_revealed(cls) -> dict[str, Reveals]:
        """Return what each field reveals."""
        return {field: cls.REVEALS.get(field, Reveals.PRIVATE) for field in cls.__struct_fields__}


class Refusal(Result, frozen=True, kw_only=True):
    """A reason why there is no result. `reason` goes into the device's own log and is never sent."""

    why: Why = Why.OTHER
    reason: str = ""


class Declined(Refusal, frozen=True, kw_only=True):
    """The device's refusal for now (RAM, temperature, battery, no data). This is not a failure."""


class Failed(Refusal, frozen=True, kw_only=True):
    """The result of work that went wrong (a missing blob, a model that does not fit, an exception)."""


class Unsupported(Refusal, frozen=True, kw_only=True):
    """The result of an order whose step, or version of it, the device does not know."""

    why: Why = Why.UNKNOWN_STEP


REFUSALS: Final = {Outcome.DECLINED: Declined, Outcome.FAILED: Failed, Outcome.UNSUPPORTED: Unsupported}


@alias_members(sparing="without")
class Action(Struct, frozen=True, kw_only=True):
    """A request to a device; each subclass is the contract of one step.

    STEP is the step's name on the wire. VERSION must be raised when old devices would misunderstand the action, unless
    only its recipe of training is new to them, which `order_version` says. RESULT is the type of the result. DEVICE is
    the module of the device half, by default `edge_agent.steps.{STEP}`. TRAINS is whether the step needs torch and
    labels.
    """

    STEP: ClassVar[str]
    VERSION: ClassVar[int] = 1
    RESULT: ClassVar[type[Result]]
    DEVICE: ClassVar[str] = ""
    TRAINS: ClassVar[bool] = True
    HEAD_CLASS: ClassVar[str] = ""
    """What is in the place of the network's head for this step (`fedge.models.build`); "" if nothing."""
    weights: BlobRef | UnsetType = UNSET
    """The weights of a frozen part of the network (`fedge.models.weights`), set by the fleet for any step."""
    campaign: Count | UnsetType = UNSET
    """The campaign whose introduction lets the bundle of this step into service, set by the fleet; at once if unset."""
    EXPORTS: ClassVar[bool] = False
    """Whether the device exports a network to ONNX and writes a bundle, which takes long however little it trains."""
    TIMED: ClassVar[bool] = True
    """Whether the report gives the time of the work. False if that time depends on sensitive samples, or if there is
    hardly any work."""

    @property
    def timed(self) -> bool:
        """Whether the report gives the time of the work, `TIMED` unless the action says otherwise."""
        return self.TIMED

    @property
    def recipe_version(self) -> int:
        """The version of the recipe that a device must know (`fedge.steps.sgd`); 0 if any device knows it."""
        return max((sgd.version for sgd in iterate_recipes(self)), default=0)

    @property
    def order_version(self) -> int:
        """The version that an order says. A device that does not know its recipe refuses it as an unknown step."""
        return self.VERSION + VERSION_STEP * self.recipe_version

    @property
    def exports(self) -> bool:
        """Whether the step exports a bundle; for an order to a relay, whether any of its actions does."""
        return self.EXPORTS

    def find_head_class(self, known: Steps) -> str:
        """Find what is in the place of the network's head for this order; `known`: the device's steps."""
        return self.HEAD_CLASS

    def passes(self, n_shared: int, n_train: int, n_val: int) -> float:
        """Estimate the cost in forward passes of one sample, for simulated time and deadlines.

        n_shared, n_train, n_val: numbers of the device's non-sensitive, of all training, and of validation samples.
        """
        return n_train + n_val

    def check(self, result: Any, task: TaskSpec) -> None:
        """Refuse a well-typed result that does not answer this action; see `require`.

        Raises:
            ProtocolError: `wrong-result`, or another name, if the result does not fit.
        """

    def uploads(self, result: Any, layout: Layout) -> Mapping[BlobRef, Layout | None]:
        """Return the blobs of a result with the layout of each; `layout` is that of the task's network.

        A blob's layout is None if it holds plain bytes, whose size this method has checked.
        """
        return {}

    def reveals(self) -> Mapping[str, Reveals]:
        """Return what each field of this action's result reveals."""
        return self.RESULT.get_revealed()

    def find_unaccounted(self) -> dict[str, Reveals]:
        """Return the result fields that depend on samples without noise, and what each reveals."""
        return {field: kind for field, kind in self.reveals().items() if kind not in HARMLESS}

    def without(self, withheld: Collection[str]) -> Self | None:
        """Return the action for a device that withholds these kinds, or None if the action would be useless.

        An action is useless if a result field without default is withheld, or all fields that reveal anything.
        """
        reveals = self.reveals()
        needed = {reveals[field.name] for field in fields_of(self.RESULT) if field.required}
        about = set(reveals.values()) - {Reveals.NOTHING}
        empty = bool(about) and about.issubset(withheld)
        return self if needed.isdisjoint(withheld) and not empty else None


def require(holds: bool, otherwise: str) -> None:
    """Refuse a result unless a condition holds; `otherwise` is the error text.

    Raises:
        ProtocolError: `wrong-result` if the condition does not hold.
    """
    if not holds:
        raise ProtocolError("wrong-result", otherwise)


Steps = Mapping[str, type[Action]]


def list_versions(known: Steps) -> dict[str, int]:
    """Return what a device with these steps announces: the version of each, and that of the recipe."""
    return {name: kind.VERSION for name, kind in known.items()} | {RECIPE: RECIPE_VERSION}


@cache
def load_installed_steps() -> Steps:
    """Return the steps of all installed packages, by name."""
    return {point.name: point.load() for point in entry_points(group=GROUP)}


def load_known_steps(paths: Iterable[str] = ()) -> Steps:
    """Return this device's steps by name: the installed ones, and its owner's, given as `package.module:Class`.

    Raises:
        ConfigError: a path names no step, or one that no device could carry out.
    """
    known = dict(load_installed_steps())
    for path in paths:
        own = load_object(path)
        if not (isinstance(own, type) and issubclass(own, Action)):
            raise ConfigError(f"{path} is not a step: it must be a subclass of fedge.steps.contract.Action")
        require_step(own)
        known[own.STEP] = own
    return known


@cache
def require_step(kind: type[Action]) -> None:
    """Refuse a step that devices could not carry out, or whose results could not be taken.

    Raises:
        ConfigError: the text says what to write.
    """
    name = kind.__name__
    if not re.fullmatch(NAME, str(vars(kind).get("STEP", ""))):
        inherited = getattr(kind, "STEP", None)
        instead = f", or devices carry out {inherited!r} instead" if inherited else ""
        raise ConfigError(f'{name} needs a name of its own on the wire: write STEP: ClassVar = "..."{instead}')
    result = getattr(kind, "RESULT", None)
    if not (isinstance(result, type) and issubclass(result, Result)):
        raise ConfigError(
            f"step {kind.STEP} has no RESULT: name the subclass of fedge.steps.contract.Result that answers it"
        )
    for own in (kind, result):
        if not own.__struct_config__.frozen:
            raise ConfigError(f"{own.__name__} of step {kind.STEP} can be changed: write frozen=True")
    if missing := [field for field in result.__struct_fields__ if field not in result.REVEALS]:
        raise ConfigError(
            f"{result.__name__}.REVEALS does not say what {', '.join(missing)} of step {kind.STEP} lets out of a "
            "device, so owners withhold it: name each field there, with a kind of fedge.steps.contract.Reveals"
        )
    if kind.uploads is Action.uploads and (
        files := [f for f, hint in get_type_hints(result).items() if _may_name_tensors(hint)]
    ):
        raise ConfigError(
            f"{', '.join(files)} of {result.__name__} refers to tensors that the coordinator would never fetch: let "
            f"{name}.uploads return each reference with the layout of its tensors"
        )
    _require_device_half(kind)


def _may_name_tensors(hint: object) -> bool:
    """Return whether values of a type may refer to tensors."""
    return hint is BlobRef or any(_may_name_tensors(each) for each in get_args(hint))


def _require_device_half(kind: type[Action]) -> None:
    """Refuse a step without a device half. A half that this machine cannot see passes, since only devices need it."""
    at = get_device_module(kind)
    if at in sys.modules:
        there = hasattr(sys.modules[at], "run")
    elif at.startswith("edge_agent.") and find_spec("edge_agent") is not None:
        there = find_spec(at) is not None
    else:
        return
    if not there:
        raise ConfigError(
            f"step {kind.STEP} has no device half: {at} needs a function run(device, action); if it is in another "
            f"module, write DEVICE: ClassVar = the module's name into {kind.__name__}"
        )


def get_device_module(action: type[Action]) -> str:
    """Return the module that carries out a step: `DEVICE`, or the contract's twin in `edge_agent.steps`."""
    _, ours, place = action.__module__.rpartition("fedge.steps.")
    return action.DEVICE or f"edge_agent.steps.{place if ours else action.STEP}"


def load_device_half(action: type[Action]) -> Any:
    """Import the module that carries out a step.

    Raises:
        ConfigError: there is no such module, or it lacks `run`.
    """
    name = get_device_module(action)
    try:
        half = importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not name.startswith(error.name):
            raise
        raise ConfigError(f"step {action.STEP} has no device half: there is no module {name}") from error
    if not hasattr(half, "run"):
        raise ConfigError(f"step {action.STEP} has no device half: {name} needs a function run(device, action)")
    return half


# ------------------------------------------------------------------------------------------------------ on the wire


def encode_body(value: Action | Result) -> bytes:
    """Encode an action or a result; equal values give equal bytes.

    Raises:
        ValueError: the value holds NaN or infinity. That is our own bug, so nothing is sent.
    """
    if not are_all_finite(msgspec.to_builtins(value)):
        raise ValueError(f"{type(value).__name__} holds a number that is not finite")
    return msgspec.msgpack.encode(value)


def decode_action(order: Order, known: Steps) -> Action | Unsupported:
    """Return the action of an order, or `Unsupported` if this device does not know it.

    Raises:
        ProtocolError: `malformed` or `not-finite`.
    """
    kind = known.get(order.step)
    recipe, version = divmod(order.version, VERSION_STEP)
    if kind is None or version != kind.VERSION or recipe > RECIPE_VERSION:
        have = f"version {kind.VERSION}" if kind else "none of that name"
        return Unsupported(reason=f"step {order.step} version {order.version}: this device has {have}")
    return _decode(order.body, kind)


def decode_result(report: Report, action: Action) -> Result:
    """Decode the result in a report by its schema; the caller runs `Action.check` and checks the blobs.

    Raises:
        ProtocolError: `malformed` or `not-finite`.
    """
    if report.outcome is not Outcome.DONE:
        return REFUSALS[report.outcome](why=report.why or Why.OTHER)
    return _decode(report.body, action.RESULT)


def get_outcome(result: Result) -> Outcome:
    """Return the outcome to report for this result."""
    return next((outcome for outcome, kind in REFUSALS.items() if isinstance(result, kind)), Outcome.DONE)


def make_report(order: Order, result: Result, seconds: float) -> Report:
    """Make the report of an order."""
    outcome = get_outcome(result)
    return Report(
        order_id=order.id,
        device_id=order.device_id,
        seconds=seconds,
        outcome=outcome,
        why=result.why if isinstance(result, Refusal) else None,
        body=encode_body(result) if outcome is Outcome.DONE else b"",
        blobs=tuple(iterate_blobs(result)),
    )


def _decode(body: bytes, kind: type[T]) -> T:
    try:
        value = msgspec.msgpack.decode(body, type=kind)
    except MALFORMED as error:
        raise ProtocolError("malformed", f"{kind.__name__}: {error}") from error
    if not are_all_finite(msgspec.to_builtins(value)):
        raise ProtocolError("not-finite", f"{kind.__name__} holds NaN or infinity")
    return value
