"""The base class of methods: one paper, one file that reads like its pseudocode.

A method is an explicit state and a function from one round to the next, over the steps of `fedge.steps`. The state is a
frozen struct of plain values, arrays and references to stored tensors; `dump` and `load` turn it into bytes and back.
All random numbers of a round come from (seed, round), so a round that is run again after a crash writes equal orders.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any, ClassVar, Final, Generic, NamedTuple

import msgspec
import numpy as np
from msgspec import UNSET, Struct
from numpy.typing import NDArray

from coordinator.aggregation.protection import NO_ANSWERS, SUMMABLE, Answers, explain_no_noise
from coordinator.aggregation.protection import require_combinable as check_protection
from coordinator.fleet.accounted import AccountedFleet
from coordinator.fleet.fleet import Fleet
from coordinator.fleet.masked import MaskedFleet, Weights
from coordinator.fleet.scheduled import ScheduledFleet
from coordinator.fleet.versions import find_descents
from coordinator.methods.installation import install
from coordinator.methods.option_values import NoOptions, explain_no_privacy, parse_options
from coordinator.methods.promises import CheckedFleet, Shared, require_heeded, require_next
from coordinator.methods.rounds import compute_rate_factor, make_round_rng, stop_early
from coordinator.methods.settings import MethodSettings, Option, require_known_by, require_takeable
from coordinator.methods.state import GlobalModel, ModelState, S
from coordinator.selection.select import compute_cohort_size, draw_uniform
from fedge.data.augmentation import find_own
from fedge.data.problems.classification import Classification
from fedge.data.problems.problem import Problem
from fedge.data.task import TaskSpec
from fedge.errors import ConfigError
from fedge.steps.contract import Action, Reveals
from fedge.steps.training.train import Train
from fedge.steps.training.train_dp import require_no_statistics
from fedge.system.loading import FINE_TUNED
from fedge.system.moved import alias_members
from fedge.tensors.layout import Layout
from fedge.wire.messages import BlobRef, iterate_blobs

Samples = tuple[NDArray[np.float32], NDArray[np.int64]]


class Server(NamedTuple):
    """The data of the server: the task, and labelled samples x (n, *input_shape), y (n,), or None."""

    task: TaskSpec | None = None
    samples: Samples | None = None


class Reading(Server):
    """A server at which no round is done: a method's state is only read, which needs no samples."""


NO_DATA: Final = Server()
UNACCOUNTED: Final[Mapping[str, str]] = {
    "ccmab": explain_no_noise((Train, "loss_before"), (Train, "gradient_norm")),
    "fastest": "it needs how long each training took (seconds of the report), which depends on samples; use uniform",
}
"""Selections that need what differential privacy withholds, and why."""


@alias_members(
    cohort="draw_cohort", serves="get_model", for_anybody="get_default_model", done="is_done", summary="summarise"
)
class Method(Generic[S]):
    """A method of learning: its server half, which gives orders to do steps.

    A method defines its `name`, its `Options`, if any, and `round`; all else has a default. By default a method has one
    model, and after R rounds of training every device installs the model that `get_model` returns for it. A method with
    more models defines `State`, `init` and `get_model`, too. A variant of a method is a subclass that overrides what
    differs.
    """

    name: ClassVar[str]
    Options: ClassVar[type[Struct]] = NoOptions
    State: ClassVar[type[Any]] = ModelState
    steps: ClassVar[tuple[type[Action], ...]] = ()
    """The method's own steps, which no entry point names."""
    HEEDS: ClassVar[frozenset[Shared]] = frozenset()
    """The shared settings that the method heeds, each as `promises.HOW` says; others are refused if they are given."""
    SELECTIONS: ClassVar[tuple[str, ...]] = ()
    """Possible selections of cohorts (`coordinator.selection`), the default first; empty if there is no choice. With a
    choice, rules of other packages are possible, too (`coordinator.methods.option_values`)."""
    SUMS: ClassVar[Weights | None] = None
    """The devices' weights if training can be masked (`coordinator.fleet.masked`), which needs a server that uses only
    the mean of each cluster, and each device in one cluster. None otherwise."""
    REVEALS: ClassVar[frozenset[Reveals]] = frozenset()
    """What a device's owner must let out for this method, beyond the default rules."""
    REFUSED: ClassVar[Mapping[str, str]] = {}
    """What the method lacks although users may ask for it, each with the reason or what replaces it. Keys are an option
    (NAME) or a value of it (NAME=VALUE), a part of the recipe (a setting such as optimizer or class_weights), a guard
    (such as dp; `coordinator.aggregation.protection`), or +ft."""
    CLASSES: ClassVar[str] = ""
    """What the method does with the class of each sample, if it needs one, as a predicate. It then refuses all problems
    but single-label classification."""

    HEAD_CLASS: ClassVar[str] = ""
    """What the method puts in the place of the network's head, the same as its steps say; "" if nothing. It is a name
    in `fedge.models.build.HEADS` or package.module:Class. The layout that `init` gets is that of this network."""

    def __init__(self, settings: MethodSettings, server: Server = NO_DATA) -> None:
        self.settings = settings
        self.server = server
        self.options: Any
        self.options, self.selection = parse_options(type(self), settings.options)
        if settings.fine_tune and (why := self.REFUSED.get(FINE_TUNED)):
            raise ConfigError(f"{why}: leave out {FINE_TUNED}")
        unmasked = {} if self.SUMS else {"masking": "its server needs more of updates than their sum"}
        check_protection(settings.protection, {**unmasked, **self.REFUSED}, self.name, settings.codec)
        require_heeded(self.name, self.HEEDS, settings.get_shared())
        require_takeable(self.name, settings, self.REFUSED)
        if settings.protection.dp and "selection" not in settings.options and self.selection in UNACCOUNTED:
            self.selection = "uniform"
        if settings.protection.dp and (
            why := UNACCOUNTED.get(self.selection or "", explain_no_privacy(self.selection))
        ):
            raise ConfigError(f"selection={self.selection} and dp do not combine: {why}")
        if not self.problem.CLASSED and (why := self.explain_classes()):
            raise ConfigError(f"{self.name} is for classification, not for {self.problem.NAME}, since it {why}")
        if settings.protection.dp and server.task is not None and (own := find_own(server.task)):
            raise ConfigError(
                f"with differential privacy each sample is changed by itself, and what {own[0]} does is unknown: take "
                "flip, crop, rotate, noise or erase"
            )
        require_known_by(self.problem, settings.sgd)
        if settings.patience is not None and (why := self.explain_no_patience()):
            raise ConfigError(f"{self.name} takes no --patience: {why}")
        self.set_up()

    @property
    def problem(self) -> Problem:
        """What the task asks; single-label classification if the method was made without a task."""
        return Classification(classes=()) if self.server.task is None else self.server.task.problem

    def set_up(self) -> None:
        """Prepare the method, once its settings and options are set.

        Raises:
            ConfigError: some settings or options do not combine, or something is missing.
        """

    def explain_classes(self) -> str:
        """Explain what the method, with its options, does with the class of each sample, and what to take instead.

        Empty if it needs no classes.
        """
        if getattr(self.options, "clustering", "") == "labels":
            return (
                "clusters devices by the class that most of their samples have (clustering=labels): take another "
                "clustering, such as mctc"
            )
        return self.CLASSES and f"{self.CLASSES}: take another method, such as fedge"

    @classmethod
    def needs_server_data(cls, options: Mapping[str, Option]) -> bool:  # noqa: ARG003 - no method does by default
        """Return whether the method, with these options as given, learns from labelled samples of the server."""
        return False

    @classmethod
    def without_profile(cls, options: Any) -> str:
        """Explain what a run does if the network has no ReLU for profiles; empty if the method needs no profiles.

        `options`: the method's options.
        """
        if getattr(options, "clustering", "labels") in {"labels", "mctc"}:
            return ""
        return "all will share one model: end the hidden layers with torch.nn.ReLU(), or take --option clustering=mctc"

    def explain_no_relays(self) -> str:
        """Explain why devices cannot be behind relays (`coordinator.fleet.relayed`); empty if they can."""
        protection = self.settings.protection
        if protection.masking:
            return "the server itself sums the masked updates"
        if protection.average not in SUMMABLE:
            return f"--average {protection.average} needs each device's update; norm-clipped, clipped and mean do not"
        return ""

    def explain_no_patience(self) -> str:
        """Explain why training cannot stop early (`coordinator.methods.rounds.stop_early`); empty if it can."""
        return "with differential privacy no device tells its validation score" if self.settings.protection.dp else ""

    def count_answers(self) -> Answers:
        """Count the most noisy answers that a device gives in a campaign beside updates, with differential privacy."""
        return NO_ANSWERS

    def init(self, layout: Layout, model: BlobRef) -> S:
        """Return the state before round 1; `model` is the common initial model."""
        state: S = self.State(round=0, layout=layout, model=model)
        return state

    def begin_campaign(self, state: S, changed: Collection[str]) -> S:  # noqa: ARG002 - most methods describe nobody
        """Return the state before the first round of the next campaign, which goes on from what the last has learned.

        The next campaign's method has `settings.first` = `state.round`. By default the models stay, and what devices
        have described; a method that measures progress within a campaign, or describes devices, overrides this.
        `changed`: the devices whose samples have changed since the last campaign began.
        """
        afresh: dict[str, Any] = {"participations": {}, "history": (), "installed": {}, "best_state": UNSET}
        return msgspec.structs.replace(state, campaign=state.campaign + 1, **afresh)

    def add_classes(self, state: S, layout: Layout, grow: Callable[[BlobRef], BlobRef]) -> S:
        """Return the state, before the first round of a campaign, for a network with the outputs of further classes.

        `layout`: of that network. `grow`: returns a model with these outputs. A method that has more than models of the
        whole network, and does not define this, takes no further classes.
        """
        raise NotImplementedError

    async def round(self, state: S, fleet: Fleet) -> S:
        """Do round `state.round + 1` of training."""
        raise NotImplementedError

    def draw_cohort(self, state: S, fleet: Fleet) -> list[str]:
        """Draw the devices that train in the next round, as many as `--participation` says; ascending ids."""
        ids = [device.id for device in fleet.get_devices()]
        n = compute_cohort_size(len(ids), self.settings.participation)
        return draw_uniform(ids, n, make_round_rng(self.settings, state.round + 1))

    def get_model(self, state: S, device_id: str) -> BlobRef:  # noqa: ARG002 - all the same
        """Return the shared model that the device would get now, without what the device keeps itself."""
        model: BlobRef = state.model  # type: ignore[attr-defined] # as in a `ModelState`
        return model

    def get_default_model(self, state: S) -> BlobRef:
        """Return the shared model for an unknown device."""
        return self.get_model(state, "")

    def get_global_model(self, state: S) -> GlobalModel:
        """Return what a device that tells nothing of itself, or the server, can predict with."""
        return GlobalModel(models=(self.get_default_model(state),))

    async def finish(self, state: S, fleet: Fleet) -> S:
        """Do the last round: leave a bundle on each device."""
        return await install(self, state, fleet)

    def recluster(self, _state: S) -> S | None:
        """Return the state from which the next round remakes all clusters; None if it cannot now."""
        return None

    async def serve_late_joiners(self, state: S, fleet: Fleet) -> S:
        """Leave a bundle on each device that comes after the end; without this method they get none."""
        raise NotImplementedError

    def make_first_state(self, layout: Layout, model: BlobRef) -> S:
        """Return the state before round 1 as `init`, but refuse a network that a guard cannot protect.

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
        before, state = state, await self._advance(state, CheckedFleet(fleet, self.name, self.steps, state.layout))
        require_next(self.name, before, state)
        if self.settings.patience is not None and before.round < self.last:
            state = stop_early(before, state, self.last, self.settings.patience)
        models = iterate_blobs(msgspec.structs.replace(state, descents={}))
        return msgspec.structs.replace(state, descents=find_descents(models, fleet.descents or {}))

    async def _advance(self, state: S, fleet: Fleet) -> S:
        """Do the next round; under differential privacy every answer has noise."""
        if (privacy := self.settings.protection.make_privacy(self.settings.rounds, self.count_answers())) is not None:
            fleet = AccountedFleet(fleet, privacy)
        if state.round == self.last:
            return await self.finish(state, fleet)
        if not self.settings.protection.masking:
            return await self.round(state, self._schedule(state, fleet))
        assert self.SUMS is not None  # `check_protection` has refused it
        masked = MaskedFleet(
            fleet,
            state.layout,
            weights=self.SUMS,
            min_cohort=self.settings.protection.min_cohort,
            sums=state.sums,
            seed=(self.settings.seed, state.round + 1),
        )
        state = await self.round(state, self._schedule(state, masked))
        return msgspec.structs.replace(state, sums=masked.sums)

    def _schedule(self, state: S, fleet: Fleet) -> Fleet:
        """Return the fleet whose devices learn at the rate of the next round; after the last one it is the given rate.

        A campaign begins with the given rate, too.
        """
        first, settings = self.settings.first, self.settings
        factor = compute_rate_factor(settings.schedule, state.round + 1 - first, self.last - first)
        return fleet if factor == 1 else ScheduledFleet(fleet, factor)

    def is_done(self, state: S) -> bool:
        """Return whether the rounds of training and the final one are done."""
        return state.round > self.last

    @property
    def last(self) -> int:
        """The number of the last round of training."""
        settings = self.settings
        return settings.first + settings.rounds if settings.last is None else settings.last

    def summarise(self, state: S) -> dict[str, Any]:
        """Return the figures for people and plots, as JSON values."""
        best, served = state.best_state, self.get_global_model(state)
        return {
            "method": self.name + (FINE_TUNED if self.settings.fine_tune else ""),
            "round": min(state.round, self.last),
            "rounds": self.last,
            "first": self.settings.first,
            "done": self.is_done(state),
            "history": msgspec.to_builtins(state.history),
            "selection": state.participations,
            "installed": msgspec.to_builtins(state.installed),
            "experts": len(served.models),
            "top": served.top,
            "split": False,
            "clusters": {},
            **({"stopped": best.stopped, "best": best.round} if best and best.stopped else {}),
        }
