"""Methods: one paper, one file that reads like its pseudocode.

A method is an explicit state and a function from one round to the next, over the steps of `fedge.steps`. The state is a
frozen struct of plain values, arrays and references to stored tensors; `dump` and `load` turn it into bytes and back.
All random numbers of a round come from (seed, round), so a round that is run again after a crash writes equal orders.
"""

from __future__ import annotations

import asyncio
import difflib
import logging
import math
from collections import Counter
from collections.abc import Collection, Container, Mapping, Sequence
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from typing import Annotated, Any, ClassVar, Final, Generic, Literal, NamedTuple, TypeVar, cast, get_args, get_origin

import msgspec
import numpy as np
from msgspec import Meta, Struct
from numpy.typing import NDArray

from coordinator.aggregation.protection import SUMMABLE, Guard, Protection, without_noise
from coordinator.aggregation.protection import check as check_protection
from coordinator.fleet.accounted import AccountedFleet
from coordinator.fleet.fleet import Answer, Fleet
from coordinator.fleet.masked import MaskedFleet, Weights
from coordinator.fleet.problems import Problem, reasons_of, told
from coordinator.fleet.versions import Descent, leading_to
from coordinator.methods.promises import Shared, Watched, require_heeded, require_method, require_next
from coordinator.methods.server.assembling import bundle_in_subprocess
from coordinator.selection.select import Selection, cohort_size, uniform
from coordinator.store.records import Device
from fedge.data.task import TaskSpec
from fedge.errors import ConfigError, FruitlessError, failing_as
from fedge.privacy.masked_sums import Sums
from fedge.settings import CODE
from fedge.steps.contract import Action, Declined, Reveals
from fedge.steps.mixture.install import FineTune, Install, Installed
from fedge.steps.mixture.install_bundle import InstallBundle
from fedge.steps.sgd import Sgd
from fedge.steps.training.train import Train, Trained
from fedge.steps.training.train_dp import require_no_statistics
from fedge.system.hardware import Processor
from fedge.system.loading import FINE_TUNED, load_object
from fedge.system.text import Heading
from fedge.tensors.layout import Codec, Layout, Selector, from_bytes, to_bytes
from fedge.wire.messages import BlobRef, Share, blobs_of

log = logging.getLogger("fedge.method")

Option = int | float | str | bool


class MethodSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of every method.

    `rounds`: how many a method plans for. `last`: the last round of training, if a run continues after its end; None:
    `rounds`. `train_on`: of the server's own networks.
    """

    rounds: Rounds = 30
    last: Rounds | None = None
    participation: Participation = 1.0
    min_reports: MinReports = 1
    seed: Annotated[int, Meta(ge=0)] = 0
    sgd: Sgd = Sgd()
    codec: Encoding = Codec.INT8
    down: Down = "int8"
    train_on: Processor = Processor.CPU
    protection: Protection = Protection()
    fine_tune: bool = False  # "+ft": every device fine-tunes its model before installing it
    options: dict[str, Option] = {}  # the method's own, by the names of its `Options`

    def shared(self) -> dict[Shared, tuple[object, object]]:
        """The settings that a method may not heed, each with its default; of masked updates only the mean is known."""
        average = "mean" if self.protection.masking else DEFAULT.protection.average
        return {
            "participation": (self.participation, DEFAULT.participation),
            "min_reports": (self.min_reports, DEFAULT.min_reports),
            "average": (self.protection.average, average),
        }


DEFAULT: Final = MethodSettings()
"""Its values are the defaults of the commands."""
ROUNDS_HELP: Final = "Training takes this many rounds."
Rounds = Annotated[int, Meta(ge=0), Heading.TRAINING, ROUNDS_HELP]
Participation = Annotated[float, Meta(gt=0, le=1), Heading.TRAINING, "This share of the devices is asked in a round."]
MinReports = Annotated[int, Meta(ge=1), Heading.TRAINING, "A round with fewer updates than this changes nothing."]
Encoding = Annotated[Codec, Heading.UPDATES, "Updates are sent in this encoding."]
LocalSteps = Annotated[
    int, Meta(ge=1, le=10**7), Heading.TRAINING, "A device takes this many SGD steps per participation."
]
LocalEpochs = Annotated[
    Annotated[int, Meta(ge=1, le=10**5)] | None,
    Heading.TRAINING,
    "A device makes this many passes over its own samples per participation, instead of the steps.",
]
BatchSize = Annotated[int, Meta(ge=1, le=2**20), Heading.TRAINING, "A step uses this many samples."]
LearningRate = Annotated[float, Meta(gt=0, le=100), Heading.TRAINING, "The devices' SGD has this learning rate."]
Momentum = Annotated[float, Meta(ge=0, lt=1), Heading.TRAINING, "The devices' SGD has this momentum."]
Down = Annotated[
    Literal["int8", "float32"],
    Heading.UPDATES,
    "Models reach devices that have an earlier one as a difference in int8, or whole.",
]
WeightDecay = Annotated[Share, Heading.TRAINING, "The devices' SGD has this weight decay, a factor of the weights."]
MethodName = Annotated[
    str, CODE, Heading.METHOD, "The method is one of `fedge methods`; NAME+ft fine-tunes at the end."
]
"""Settings of all methods that the commands share; those of local training have the bounds of `Sgd`."""


def settings_of(given: Struct, seed: int, options: Mapping[str, Option]) -> MethodSettings:
    """A method's settings from those of a command: rounds, learning and codec have equal names.

    Raises:
        ConfigError: both steps and epochs are given.
    """
    found = msgspec.structs.asdict(given)
    learning = {name: found[name] for name in ("batch_size", "learning_rate", "momentum", "weight_decay")}
    own = {n: found[n] for n in ("rounds", "participation", "min_reports", "codec", "down", "train_on") if n in found}
    if found["local_epochs"] and found["local_steps"] != Sgd().steps:
        raise ConfigError("--local-steps changes nothing with --local-epochs: give one of them")
    sgd = Sgd(steps=found["local_steps"], epochs=found["local_epochs"] or 0, **learning)
    guards = {n: found[n] for n in Protection.__struct_fields__ if n in found}
    return MethodSettings(seed=seed, sgd=sgd, options=dict(options), protection=Protection(**guards), **own)


class RoundSummary(Struct, frozen=True, kw_only=True):
    """One line of a run's history. `accuracy`: mean over the cohort, own validation samples, received model.

    `loss`: on the samples they train on; None if the method does not ask for it.
    """

    round: int
    asked: int
    answered: int
    accuracy: float | None
    loss: float | None


class State(Struct, frozen=True, kw_only=True):
    """The state of every method: the rounds done, the layout, how often each device trained, the history.

    `sums`: the masked sums so far. `descents`: how devices derive the models (`put_after`).
    """

    round: int
    layout: Layout
    participations: dict[str, int] = {}
    history: tuple[RoundSummary, ...] = ()
    installed: dict[str, Installed] = {}
    sums: Sums = Sums()
    descents: dict[str, Descent] = {}


class ModelState(State, frozen=True, kw_only=True):
    """State of a method with one model, `model`."""

    model: BlobRef


S = TypeVar("S", bound=State)
R = TypeVar("R")


class NoOptions(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """No options."""


Samples = tuple[NDArray[np.float32], NDArray[np.int64]]


class Server(NamedTuple):
    """The server's own data: the task, and labelled samples x (n, *input_shape), y (n,), or None."""

    task: TaskSpec | None = None
    samples: Samples | None = None


NO_DATA: Final = Server()


class Method(Generic[S]):
    """One way to learn: the server half, over the steps that it composes.

    A method defines its `name`, its `Options`, if any, and `round`. By default it has one model, and after R rounds of
    training every device installs the model it is served. A method with more models defines `State`, `init` and
    `serves`, too. A variant of a method is a subclass that overrides what differs.
    """

    name: ClassVar[str]
    Options: ClassVar[type[Struct]] = NoOptions
    State: ClassVar[type[Any]] = ModelState
    SELECTIONS: ClassVar[tuple[Selection, ...]] = ()
    """Possible selections of cohorts (`coordinator.selection`), the default first; empty: there is no choice."""
    REFUSED: ClassVar[Mapping[str, str]] = {}
    """Why there is no such option (by NAME) or word (by NAME=VALUE), or what replaces it."""
    UNPROTECTED: ClassVar[Mapping[Guard, str]] = {}
    """Guards that do not fit the method (`coordinator.aggregation.protection`), and why."""
    SUMS: ClassVar[Weights | None] = None
    """The devices' weights, if the server needs only the mean of each cluster and each device is in one: then training
    can be masked (`coordinator.fleet.masked`)."""
    NO_RELAYS: ClassVar[Mapping[str, str]] = {}
    """Why devices cannot be behind relays (`coordinator.fleet.relayed`), by option: NAME=VALUE, NAME (if not 0), or ""
    for the method itself; empty: they can."""
    NO_FINE_TUNING: ClassVar[str] = ""
    """Why "+ft" is refused; empty: it is not."""
    steps: ClassVar[tuple[type[Action], ...]] = ()
    """Its own steps, which no entry point names."""
    HEEDS: ClassVar[frozenset[Shared]] = frozenset()
    """Which of these settings it heeds; the others are refused. A method says so once it does (`promises.HOW`)."""
    SERVER_DATA: ClassVar[frozenset[str]] = frozenset()
    """Options, as NAME=VALUE, with which it learns from the server's labelled samples; "": it always does."""
    REVEALS: ClassVar[frozenset[Reveals]] = frozenset()
    """What a device's owner must let out for it, beyond the default rules."""
    WITHOUT_PROFILE: ClassVar[str] = ""
    """What becomes of rounds that wait for their devices if the network has no ReLU for a profile; empty: such a method
    takes profiles for its `clustering` alone, if at all."""
    SERVES_LATE_JOINERS: ClassVar[bool] = False
    """Whether `serve_late_joiners` equips devices that come after the end."""

    def __init__(self, settings: MethodSettings, server: Server = NO_DATA) -> None:
        self.settings = settings
        self.server = server
        self.options: Any
        self.options, self.selection = options_of(type(self), settings.options)
        if settings.fine_tune and self.NO_FINE_TUNING:
            raise ConfigError(f"{self.NO_FINE_TUNING}: leave out +ft")
        unmasked: dict[Guard, str] = {} if self.SUMS else {"masking": "its server needs more of updates than their sum"}
        check_protection(settings.protection, {**unmasked, **self.UNPROTECTED}, self.name, settings.codec)
        require_heeded(self.name, self.HEEDS, settings.shared())
        if settings.protection.dp and (why := UNACCOUNTED.get(self.selection or "")):
            raise ConfigError(f"selection={self.selection} and dp do not combine: {why}")
        self.set_up()

    def set_up(self) -> None:
        """Prepare the method; its settings and options are set.

        Raises:
            ConfigError: some of them do not combine, or something is missing.
        """

    def no_relays(self) -> str:
        """Why devices cannot be behind relays; empty: they can."""
        protection = self.settings.protection
        if protection.masking:
            return "the server itself sums the masked updates"
        if protection.average not in SUMMABLE:
            return f"--average {protection.average} needs each device's update; norm-clipped, clipped and mean do not"
        chosen = msgspec.structs.asdict(self.options)
        given = {"", *(f"{name}={value}" for name, value in chosen.items()), *(name for name in chosen if chosen[name])}
        return next((why for which, why in self.NO_RELAYS.items() if which in given), "")

    def init(self, layout: Layout, model: BlobRef) -> S:
        """The state before round 1; `model` is the common initial model."""
        state: S = self.State(round=0, layout=layout, model=model)
        return state

    async def round(self, state: S, fleet: Fleet) -> S:
        """Train: do round `state.round + 1`."""
        raise NotImplementedError

    def cohort(self, state: S, fleet: Fleet) -> list[str]:
        """The devices that train in the next round, drawn by lot, as many as `--participation` says; ascending ids."""
        ids = [device.id for device in fleet.devices()]
        n = cohort_size(len(ids), self.settings.participation)
        return uniform(ids, n, round_rng(self.settings, state.round + 1))

    def serves(self, state: S, device_id: str) -> BlobRef:  # noqa: ARG002 - all the same
        """The shared model that the device would get now, without what it keeps itself."""
        model: BlobRef = state.model  # type: ignore[attr-defined] # as in a `ModelState`
        return model

    def for_anybody(self, state: S) -> BlobRef:
        """The shared model for an unknown device."""
        return self.serves(state, "")

    async def finish(self, state: S, fleet: Fleet) -> S:
        """The last round: leave a bundle on each device."""
        return await install(self, state, fleet)

    def recluster(self, _state: S) -> S | None:
        """The state from which the next round remakes all clusters; None: it cannot, or not now."""
        return None

    async def serve_late_joiners(self, state: S, fleet: Fleet) -> S:
        """A bundle for each device that comes after the end."""
        raise NotImplementedError

    def begin(self, layout: Layout, model: BlobRef) -> S:
        """As `init`, but refuses a network that a guard cannot protect.

        Raises:
            ConfigError: the network does not suit the method or a guard.
        """
        if self.settings.protection.dp:
            require_no_statistics(layout)
        return self.init(layout, model)

    async def advance(self, state: S, fleet: Fleet) -> S:
        """Do the next round, and record how devices derive the models of the new state.

        Raises:
            ConfigError: the method breaks a promise (`coordinator.methods.promises`).
        """
        fleet.descents = dict(state.descents) if self.settings.down == "int8" else None
        before, state = state, await self._advance(state, Watched(fleet, self.name, self.steps, state.layout))
        require_next(self.name, before, state)
        models = blobs_of(msgspec.structs.replace(state, descents={}))
        return msgspec.structs.replace(state, descents=leading_to(models, fleet.descents or {}))

    async def _advance(self, state: S, fleet: Fleet) -> S:
        """The next round; under differential privacy every answer has noise."""
        if (privacy := self.settings.protection.privacy(self.settings.rounds)) is not None:
            fleet = AccountedFleet(fleet, privacy)
        if state.round == self.last:
            return await self.finish(state, fleet)
        if not self.settings.protection.masking:
            return await self.round(state, fleet)
        assert self.SUMS is not None  # `check_protection` has refused it
        masked = MaskedFleet(
            fleet,
            state.layout,
            weights=self.SUMS,
            min_cohort=self.settings.protection.min_cohort,
            sums=state.sums,
            seed=(self.settings.seed, state.round + 1),
        )
        state = await self.round(state, masked)
        return msgspec.structs.replace(state, sums=masked.sums)

    def done(self, state: S) -> bool:
        """Whether the rounds of training and the final one are done."""
        return state.round > self.last

    @property
    def last(self) -> int:
        """Number of the last round of training."""
        return self.settings.rounds if self.settings.last is None else self.settings.last

    def summary(self, state: S) -> dict[str, Any]:
        """The figures for people and plots, as JSON values."""
        return {
            "method": self.name + (FINE_TUNED if self.settings.fine_tune else ""),
            "round": min(state.round, self.last),
            "rounds": self.last,
            "done": self.done(state),
            "history": msgspec.to_builtins(state.history),
            "selection": state.participations,
            "installed": msgspec.to_builtins(state.installed),
            "split": False,
            "clusters": {},
        }


UNACCOUNTED: Final[Mapping[str, str]] = {
    "ccmab": without_noise((Train, "loss_before"), (Train, "gradient_norm")),
    "fastest": "it needs how long each training took (seconds of the report), which depends on samples; use uniform",
}
"""Selections that need what differential privacy withholds, and why."""
GROUP: Final = "fedge.methods"
"""Entry points of installed packages, ours among them, that name a `Method` each."""


@cache
def installed_methods() -> Mapping[str, EntryPoint]:
    """The methods of all installed packages, by name; not imported yet."""
    return {point.name: point for point in sorted(entry_points(group=GROUP))}


def method_class(name: str) -> type[Method[Any]]:
    """The method of that name or path (`package.module:Class`); a trailing "+ft" is ignored.

    Raises:
        ConfigError: there is none; the text lists the installed ones.
    """
    base = name.removesuffix(FINE_TUNED)
    known = installed_methods()
    if ":" not in base and base not in known:
        raise ConfigError(f"there is no method {name!r}; {nearest(base, list(known), 'choose one of')}")
    kind = load_object(base) if ":" in base else known[base].load()
    if not (isinstance(kind, type) and issubclass(kind, Method)):
        raise ConfigError(f"{base} is no method: it must be a subclass of coordinator.methods.method.Method")
    if kind.round is Method.round:
        raise ConfigError(f"{base} lacks round, which every method needs")
    require_method(base, kind, State)
    return kind


def make(name: str, settings: MethodSettings, server: Server = NO_DATA) -> Method[Any]:
    """The method of that name or path; "fedavg+ft" is "fedavg" with fine-tuning at the end.

    Raises:
        ConfigError: there is none, it has no such option, or the server lacks something it needs.
    """
    kind = method_class(name)
    return kind(msgspec.structs.replace(settings, fine_tune=settings.fine_tune or name.endswith(FINE_TUNED)), server)


def options_of(kind: type[Method[Any]], given: Mapping[str, Option]) -> tuple[Struct, Selection | None]:
    """The method's own options, checked, and its selection, which all methods with cohorts share.

    Raises:
        ConfigError: an unknown name or word (the nearest right one is named), a refused one (with the reason), or a
            value out of range.
    """
    hints = {field.name: field.type for field in msgspec.structs.fields(kind.Options)}
    known = {name: words_of(hint) for name, hint in hints.items()}
    if kind.SELECTIONS:
        known["selection"] = list(kind.SELECTIONS)
    for name, value in given.items():
        if name not in known:
            why = kind.REFUSED.get(name) or nearest(name, list(known), "it has")
            raise ConfigError(f"the method has no option {name!r}; {why}")
        if (isinstance(value, str) or name == "selection") and known[name] and value not in known[name]:
            why = kind.REFUSED.get(f"{name}={value}", "")
            why = f"{why}; it is one of {', '.join(known[name])}" if why else nearest(str(value), known[name])
            raise ConfigError(f"option of the method: {name} cannot be {value!r}; {why}")
        if isinstance(value, float) and not math.isfinite(value):  # no message holds one
            raise ConfigError(f"option {name} of the method must be a finite number, not {value}")
        if name in hints:
            with failing_as(ConfigError, f"option of the method: {name}", on=msgspec.ValidationError):
                msgspec.convert(value, type=hints[name], strict=False)
    own = {name: value for name, value in given.items() if name != "selection"}
    with failing_as(ConfigError, "option of the method", on=msgspec.ValidationError):
        options = msgspec.convert(own, type=kind.Options, strict=False)
    selection = given.get("selection", kind.SELECTIONS[0] if kind.SELECTIONS else None)
    return options, cast("Selection | None", selection)


def words_of(hint: object) -> list[str]:
    """The words that an option accepts; none if it takes text, numbers or booleans."""
    if get_origin(hint) is Literal:
        return [value for value in get_args(hint) if isinstance(value, str)]
    return [word for part in get_args(hint) for word in words_of(part)]


def nearest(given: str, known: Sequence[str], otherwise: str = "it is one of") -> str:
    """The hint for an unknown name."""
    near = difflib.get_close_matches(given, known, n=1)
    return f"did you mean {near[0]!r}?" if near else f"{otherwise} {', '.join(known) or 'none'}"


CHECKPOINTS: Final = (0, 10, 20, 40, 80)
"""Steps of fine-tuning that compete on validation samples (baselines.md section 11); 0 is the model as it is."""
WITHOUT_VALIDATION: Final = 40
"""Steps of fine-tuning on a device without validation samples (fedge.md section 6)."""


ATTEMPTS: Final = 3
"""How often a device is asked for the steps that end in its bundle: without it, all of its work is lost."""


async def insist(fleet: Fleet, label: str, actions: Mapping[str, Action]) -> dict[str, Answer]:
    """`fleet.run`, repeated for devices without an acceptable answer, `ATTEMPTS` times in all."""
    answers = await fleet.run(label, actions)
    for attempt in range(2, ATTEMPTS + 1):
        missing = {i: action for i, action in actions.items() if answers[i].result is None}
        if not missing:
            break
        log.warning("event=asked_again label=%s attempt=%d devices=%s", label, attempt, sorted(missing))
        answers |= await fleet.run(f"{label}-{attempt}", missing)
    return answers


async def install(
    method: Method[Any],
    state: S,
    fleet: Fleet,
    *,
    among: Container[str] | None = None,
    model: BlobRef | None = None,
    personal: Selector = (),
    kept_by: str | None = None,
    initial: BlobRef | None = None,
) -> S:
    """The last round of a method whose devices run one model: each installs the one it is served, or `model`.

    `among`: the devices that install; None: all. Then, unless some layers are personal, devices that do not train get a
    finished bundle. `personal`, `kept_by`, `initial`: as in `Install`.
    """
    settings = method.settings
    tuning = FineTune(sgd=settings.sgd, checkpoints=CHECKPOINTS, otherwise=WITHOUT_VALIDATION)
    orders = {
        device.id: Install(
            model=model or method.serves(state, device.id),
            method=method.name,
            personal=personal,
            kept_by=kept_by,
            initial=initial,
            fine_tune=tuning if settings.fine_tune else None,
        )
        for device in fleet.devices()
        if among is None or device.id in among
    }
    installed = results(await insist(fleet, "install", orders), Installed)
    state = msgspec.structs.replace(state, round=state.round + 1, installed=installed)
    if among is not None or personal:
        return state
    return await equip(
        method, state, fleet, {device.id: model or method.serves(state, device.id) for device in fleet.inference_only()}
    )


async def equip(method: Method[Any], state: S, fleet: Fleet, models: Mapping[str, BlobRef]) -> S:
    """A finished bundle of its model, with kappa = 0 (fedge.md 12), for each device that does not train and has none.

    `models`: by device id; each becomes a bundle once.
    """
    new = {i: model for i, model in models.items() if i not in state.installed}
    release = next_release(fleet)
    finished = {model: await _finished(method, state, fleet, model, release) for model in dict.fromkeys(new.values())}
    orders = {i: order for i, model in new.items() if (order := finished[model]) is not None}
    if not orders:
        return state
    installed = state.installed | results(await insist(fleet, "equip", orders), Installed)
    return msgspec.structs.replace(state, installed=dict(sorted(installed.items())))


def next_release(fleet: Fleet) -> int:
    """The number of a bundle made by the server: higher than any that a device of the fleet has had."""
    return 1 + max((device.release for device in (*fleet.devices(), *fleet.inference_only())), default=0)


async def _finished(
    method: Method[Any], state: State, fleet: Fleet, model: BlobRef, release: int
) -> InstallBundle | None:
    """The model as a bundle; None if the network cannot be exported, which must not end the federation."""
    own = fleet.get(model, state.layout)
    try:
        files = await asyncio.to_thread(
            bundle_in_subprocess, fleet.task, state.layout, own, release=release, method=method.name
        )
    except ConfigError as error:
        log.error("event=no_bundle reason=%r", str(error))  # noqa: TRY400 - the child's text says it all
        return None
    return InstallBundle(files={name: fleet.put_bytes(data) for name, data in files.items()}, release=release)


def results(answers: Mapping[str, Answer], kind: type[R]) -> dict[str, R]:
    """The results of one kind, by ascending device id."""
    return {i: a.result for i, a in answers.items() if isinstance(a.result, kind)}


def round_rng(settings: MethodSettings, round_number: int) -> np.random.Generator:
    """The random numbers of one round, the same whenever it runs."""
    return np.random.default_rng((settings.seed, round_number))


def steps_alone(device: Device, sgd: Sgd) -> int:
    """Steps of a participation in which a device learns alone from all of its samples, including sensitive ones.

    A device reports only how many are not sensitive; if there are none, a pass counts as one batch.
    """
    return sgd.steps_for(device.n_samples or sgd.batch_size)


def accepted(answers: Mapping[str, Answer]) -> dict[str, Trained]:
    """The updates among the answers that may be averaged, by ascending device id."""
    return {i: a.result for i, a in answers.items() if isinstance(a.result, Trained) and a.result.n_samples > 0}


def owner(key: str) -> str:
    """The device of an update. Keys are device ids, or ID/NUMBER where a device may send several."""
    return key.partition("/")[0]


def declined(answer: Answer) -> bool:
    """Whether the device declined, which is no fault."""
    return isinstance(answer.result, Declined)


def round_done(state: S, n_asked: int, updates: Mapping[str, Trained], **changes: Any) -> S:
    """The state after a round of training, with further changes. `updates`: keys as in `owner`."""
    accuracies = [u.val_accuracy for u in updates.values() if u.val_accuracy is not None]
    line = RoundSummary(
        round=state.round + 1,
        asked=n_asked,
        answered=len(updates),
        accuracy=float(np.mean(accuracies)) if accuracies else None,
        loss=mean_loss(updates.values()),
    )
    return msgspec.structs.replace(
        state,
        round=line.round,
        participations=dict(Counter(state.participations) + Counter(map(owner, updates))),
        history=(*state.history, line),
        **changes,
    )


def require_learned(method: Method[S], state: S, first: BlobRef, problems: Mapping[str, Problem]) -> None:
    """Refuse to install what nobody has learned, once the rounds of training are over.

    first: the initial model. problems: of the devices, for the text.

    Raises:
        FruitlessError: no update ever came, or never as many as `--min-reports` wants, so that devices would be given
            the initial model.
    """
    asked, answered = ([getattr(line, name) for line in state.history] for name in ("asked", "answered"))
    fewest = method.settings.min_reports
    served = {method.serves(state, i).digest for i in state.participations}
    if not state.history or (state.participations and (max(answered) >= fewest or served != {first.digest})):
        return
    if state.participations:
        what = f"no round brought the {fewest} updates that --min-reports wants, only {max(answered)} at most"
    elif sum(asked):
        what = f"none of {sum(asked)} orders to train brought an update"
    else:
        what = "no device was asked to train"
    why = told(reasons_of(problems))
    rounds = "1 round" if len(asked) == 1 else f"{len(asked)} rounds"
    raise FruitlessError(f"nothing was learned in {rounds}: {what}" + (f". {why}" if why else ""))


def mean_loss(updates: Collection[Trained]) -> float | None:
    """n_i-weighted mean of loss_before; None without updates, or if one of them lacks it."""
    n = sum(u.n_samples for u in updates)
    losses = [u.n_samples / n * u.loss_before for u in updates if u.loss_before is not None]
    return sum(losses) if losses and len(losses) == len(updates) else None


# ------------------------------------------------------------------------------------------------ states as bytes


def dump(state: State) -> bytes:
    """A state as bytes: equal states give equal bytes.

    Raises:
        ConfigError: it holds what cannot be stored; the text names the field.
    """
    try:
        return _dumped(state)
    except (TypeError, ValueError, OverflowError, NotImplementedError) as error:
        raise ConfigError(
            f"the state of the method cannot be stored: {_culprit(state)} ({error}); numbers, texts, tuples, "
            "dictionaries, numpy arrays, references and frozen structs of these can"
        ) from error


def _dumped(value: object) -> bytes:
    arrays: dict[str, NDArray[np.generic]] = {}

    def hold(value: object) -> object:
        if isinstance(value, np.ndarray):
            arrays[str(len(arrays))] = value
            return str(len(arrays) - 1)
        raise NotImplementedError(f"{type(value).__module__}.{type(value).__qualname__}")

    plain = msgspec.msgpack.encode(value, enc_hook=hold, order="deterministic")
    return msgspec.msgpack.encode((plain, to_bytes(arrays) if arrays else b""))


def _culprit(state: State) -> str:
    """The field of a state that cannot be stored."""
    for field in state.__struct_fields__:
        try:
            _dumped(getattr(state, field))
        except (TypeError, ValueError, OverflowError, NotImplementedError):
            return f"field {field}"
    return "a field"


def load(data: bytes, kind: type[S]) -> S:
    """The state that `dump` wrote.

    Raises:
        msgspec.DecodeError: the bytes are no state of this kind.
    """
    plain, packed = msgspec.msgpack.decode(data, type=tuple[bytes, bytes])
    arrays = from_bytes(packed) if packed else {}

    def give_back(_: type, key: object) -> object:
        if str(key) not in arrays:
            raise msgspec.DecodeError(f"{key!r} is no array")
        return arrays[str(key)]

    return msgspec.msgpack.decode(plain, type=kind, dec_hook=give_back)
