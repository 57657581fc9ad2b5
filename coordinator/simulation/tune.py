"""Search a method's options and the settings of local training on validation samples, with Ray Tune.

The first configuration is the given one, the others are drawn at random. After a ninth and a third of the rounds, those
not among the best third so far are stopped (ASHA: Li et al., "A System for Massively Parallel Hyperparameter Tuning",
MLSys 2020). Test samples are not used: `fedge simulate` measures the result.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, get_args

import msgspec
import numpy as np
from msgspec import Meta, Struct

from coordinator.fleet.simulated.ray import connected, require_importable
from coordinator.methods.catalogue import method_class
from coordinator.methods.option_values import options_of
from coordinator.methods.options import check, method_and_options, value_of
from coordinator.methods.settings import Option
from coordinator.simulation.compare import begin, scenario_of
from coordinator.simulation.run import Watch, validate
from coordinator.simulation.settings import Scenario, Setup, TuneSettings
from fedge.errors import ConfigError, FedgeError, ProtocolError
from fedge.settings import given, metas_of
from fedge.system.files import make_folder, write_atomically
from fedge.system.hardware import Processor
from fedge.tasks import Partitioning

os.environ |= {
    "RAY_AIR_NEW_OUTPUT": "0",  # tables on standard output
    "TUNE_DISABLE_AUTO_CALLBACK_LOGGERS": "1",  # files for TensorBoard
    "TUNE_DISABLE_SIGINT_HANDLER": "1",  # Ctrl-C is ours
    "TUNE_GLOBAL_CHECKPOINT_S": "0",  # what is done is kept
}
from ray import tune as ray_tune  # noqa: TID251 - after `coordinator.fleet.simulated.ray`, which has it tell nobody
from ray.tune.logger import JsonLoggerCallback  # noqa: TID251
from ray.tune.schedulers import ASHAScheduler  # noqa: TID251
from ray.tune.search.basic_variant import BasicVariantGenerator  # noqa: TID251

USUAL: Final = {"learning_rate": "0.003..0.3", "batch_size": "8,16,32,64", "local_steps": "5..40"}
"""Default ranges of the settings of local training."""
SETTINGS: Final = (*USUAL, "local_epochs", "momentum", "weight_decay")
REDUCTION: Final = 3
"""One of this many configurations continues."""
DECADE: Final = 10.0
"""Wider ranges of positive numbers are searched by ratio."""
PLACES: Final = ("out", "ray_address")
TRIALS, FIGURES, CONFIG = "trials", "figures.json", "best.toml"


@dataclass(frozen=True, slots=True)
class Range:
    """The range of a setting or option: one of `words`, or a number from `low` to `high`."""

    words: tuple[Option, ...] = ()
    low: float = 0
    high: float = 0

    def domain(self) -> Any:
        """The range for Ray Tune."""
        if self.words:
            return ray_tune.choice(list(self.words))
        by_ratio = self.low > 0 and self.high / self.low >= DECADE
        if isinstance(self.low, int) and isinstance(self.high, int):
            return (ray_tune.lograndint if by_ratio else ray_tune.randint)(self.low, self.high + 1)
        return (ray_tune.loguniform if by_ratio else ray_tune.uniform)(self.low, self.high)

    def __str__(self) -> str:
        return ",".join(map(str, self.words)) or f"{self.low:g}..{self.high:g}"

    def ends(self) -> tuple[Option, ...]:
        """Values that are valid if and only if all others are."""
        return self.words or (self.low, self.high)


class Tried(Struct, frozen=True, kw_only=True):
    """A configuration: its searched values, and its last accuracy on validation samples, after `rounds`."""

    values: dict[str, Option]
    accuracy: float
    rounds: int


class Tuning(Struct, frozen=True, kw_only=True):
    """The result: the JSON file of `fedge tune`.

    `trials`: by rounds reached, then by accuracy, the best first. `asked`: the given configuration.
    """

    scenario: Scenario
    method: str
    seed: int
    searched: dict[str, str]
    best: Tried
    asked: Tried | None
    trials: tuple[Tried, ...]

    def __repr__(self) -> str:
        """The best configuration."""
        best = f"{told(self.best.values)}: {sentence(self.best, self.scenario)}"
        return f"Tuning({best}, the best of {len(self.trials)})"


def ranges_of(method: str, search: Iterable[str]) -> dict[str, Range]:
    """The ranges to search, by name.

    Args:
        method: its options can be searched beside the settings of local training.
        search: NAME=LOW..HIGH, NAME=A,B,C, or NAME: its usual range, or that which the method declares. Empty: the
            learning rate, and all real options of the method that have a lowest and a highest value.

    Raises:
        ConfigError: there is no such setting or option, or it needs a range.
    """
    options = {field.name: field.type for field in msgspec.structs.fields(method_class(method).Options)}
    declared = {name: own for name, kind in options.items() if (own := _declared(kind)) is not None}
    texts = list(search) or ["learning_rate", *declared]
    found: dict[str, Range] = {}
    for text in texts:
        name, _, span = (part.strip() for part in text.partition("="))
        name = name.replace("-", "_")
        if name not in SETTINGS and name not in {*options, "selection"}:
            known = ", ".join(dict.fromkeys([*SETTINGS, *options]))
            raise ConfigError(f"{name!r} cannot be searched: it is no setting of local training and no option: {known}")
        if span := span or USUAL.get(name, ""):
            found[name] = _range(name, span)
        elif name in declared:
            found[name] = declared[name]
        else:
            raise ConfigError(f"{name} has no range of its own: say one, as in --search {name}=0.01..1 or {name}=1,2,5")
    return found


def _range(name: str, text: str) -> Range:
    """LOW..HIGH or A,B,C."""
    low, dots, high = text.partition("..")
    if not dots:
        return Range(words=tuple(dict.fromkeys(value_of(word.strip()) for word in text.split(","))))
    ends = value_of(low.strip()), value_of(high.strip())
    if any(isinstance(end, bool | str) for end in ends) or not float(ends[0]) < float(ends[1]):
        raise ConfigError(f"{name} is searched from LOW..HIGH, two numbers, not {text!r}")
    return Range(low=float(ends[0]) if isinstance(ends[1], float) else ends[0], high=ends[1])  # type: ignore[arg-type]


def _declared(kind: Any) -> Range | None:
    """The range of a real option that has a lowest and a highest value; exclusive bounds are kept at a distance."""
    if get_args(kind)[:1] == (int,):  # its bounds are what is possible, not what is sensible
        return None
    for meta in (meta for meta in metas_of(kind) if isinstance(meta, Meta)):
        low, high = (meta.gt if meta.ge is None else meta.ge), (meta.lt if meta.le is None else meta.le)
        if low is not None and high is not None:
            margin = (high - low) / 100
            return Range(low=low + margin * (meta.ge is None), high=high - margin * (meta.le is None))
    return None


def applied(
    scenario: Scenario, options: Mapping[str, Option], values: Mapping[str, Option]
) -> tuple[Scenario, dict[str, Option]]:
    """Scenario and options of the method with the searched values applied.

    Raises:
        ConfigError: a setting is out of range.
    """
    settings = {name: value for name, value in values.items() if name in SETTINGS}
    own = {name: value for name, value in values.items() if name not in SETTINGS}
    return given(Scenario, msgspec.structs.asdict(scenario) | settings), {**options, **own}


def tune(settings: TuneSettings, search: Iterable[str], out: Path, watch: Watch) -> Tuning:
    """Try configurations, several at a time, and write the best one; resumes an interrupted search.

    Args:
        settings: of data, devices and budget; those not searched stay unchanged.
        search: as for `ranges_of`.
        out: folder of the results.
        watch: called with each configuration.

    Raises:
        ConfigError: a setting is not available as requested, or `out` holds another search.
        FruitlessError: nothing was learned in any trial.
        FedgeError: Ray fails, or every trial failed.
        KeyboardInterrupt: Ctrl-C; finished trials are kept.
    """
    scenario = scenario_of(settings)
    name, fixed = method_and_options(settings.method)
    ranges = ranges_of(name, search)
    require_importable(scenario.task, scenario.model, settings.method)
    if scenario.train_on is not Processor.CPU or not scenario.rounds:
        raise ConfigError(
            "a search needs rounds, and shares out processors, no GPUs: leave out --train-on, give --rounds"
        )
    for key, each in ranges.items():
        for end in each.ends():
            applied_scenario, own = applied(scenario, fixed, {key: end})
            check(name, own)
            applied_scenario.for_method(settings.seed, own)
    begin(scenario, {settings.method}, settings.seed, watch)
    make_folder(out)
    keep_search(out, settings, ranges)
    folder = (out / TRIALS).absolute()

    def trial(values: dict[str, Option]) -> None:
        def tell(rounds: int, accuracy: float) -> None:
            ray_tune.report({"accuracy": accuracy, "rounds": rounds})

        changed, own = applied(scenario, fixed, values)
        with tempfile.TemporaryDirectory(prefix="fedge-tune-") as home:
            validate(changed, name, own, settings.seed, Path(home), tell)

    options, selection = options_of(method_class(name), fixed)
    now = msgspec.structs.asdict(scenario) | msgspec.structs.asdict(options) | {"selection": selection}
    asked = {key: now[key] for key in ranges}
    with connected(settings.ray_address):
        trainable = ray_tune.with_resources(trial, {"cpu": 1})
        if ray_tune.Tuner.can_restore(folder):
            tuner = ray_tune.Tuner.restore(str(folder), trainable, resume_unfinished=True, restart_errored=True)
        else:
            tuner = ray_tune.Tuner(
                trainable,
                param_space={key: each.domain() for key, each in ranges.items()},
                tune_config=ray_tune.TuneConfig(
                    metric="accuracy",
                    mode="max",
                    num_samples=settings.trials,
                    search_alg=BasicVariantGenerator(points_to_evaluate=[asked], random_state=settings.seed),
                    scheduler=ASHAScheduler(
                        time_attr="rounds",
                        max_t=max(1, scenario.rounds),
                        grace_period=max(1, scenario.rounds // REDUCTION**2),
                        reduction_factor=REDUCTION,
                    ),
                ),
                run_config=ray_tune.RunConfig(
                    name=TRIALS,
                    storage_path=str(out.absolute()),
                    verbose=0,
                    callbacks=[JsonLoggerCallback(), _Watching(watch, settings.trials)],  # type: ignore[no-untyped-call]
                ),
            )
        grid = tuner.fit()
    if not grid.num_terminated:
        raise every_trial_failed(grid.errors[0])
    tried = [
        Tried(values=_plain(one.config), accuracy=one.metrics["accuracy"], rounds=one.metrics["rounds"])
        for one in map(grid.__getitem__, range(len(grid)))
        if one.error is None and one.metrics and one.config
    ]
    tried.sort(key=lambda one: (-one.rounds, -one.accuracy))
    found = Tuning(
        scenario=scenario,
        method=settings.method,
        seed=settings.seed,
        searched={key: str(each) for key, each in ranges.items()},
        best=tried[0],
        asked=next((one for one in tried if one.values == asked), None),
        trials=tuple(tried),
    )
    write_atomically(out / FIGURES, msgspec.json.format(msgspec.json.encode(found, enc_hook=str)))
    write_atomically(out / CONFIG, configuration(found).encode())
    return found


def every_trial_failed(error: Exception) -> FedgeError:
    """The error of a search all of whose trials failed; `error`: of the first, as Ray gives it."""
    cause = getattr(error, "cause", error)
    last = str(error).strip().splitlines()[-1:]
    if isinstance(cause, FedgeError) and not isinstance(cause, ProtocolError):  # which takes a name, too
        return type(cause)(f"every trial failed: {cause}")
    return FedgeError(f"every trial failed: {''.join(last)}")


def configuration(found: Tuning) -> str:
    """The best configuration as a TOML file of `fedge simulate` and `fedge coordinator`."""
    name, fixed = method_and_options(found.method)
    scenario, options = applied(found.scenario, fixed, found.best.values)
    default = Scenario()
    changed = {n: v for n in Scenario.__struct_fields__ if (v := getattr(scenario, n)) != getattr(default, n)}
    searched = {key: getattr(scenario, key) for key in found.best.values if key in SETTINGS}
    learning = {n: v for n, v in (changed | searched).items() if n in Setup.__struct_fields__}
    sections = {
        "simulate": {"method": name, "seed": found.seed, **changed, **searched},
        "coordinator": {"method": name}
        | {n: v for n, v in learning.items() if n not in Partitioning.__struct_fields__},
        "method": options,
    }
    lines = [f"# Found by `fedge tune`: {sentence(found.best, found.scenario)} on validation samples."]
    for section, values in sections.items():
        told = [f"{key} = {json.dumps(value, default=str)}" for key, value in values.items() if value is not None]
        lines += ["", f"[{section}]", *told]
    return "\n".join(lines) + "\n"


def sentence(one: Tried, scenario: Scenario) -> str:
    """A configuration's accuracy in words."""
    return f"accuracy {100 * one.accuracy:.1f} % after {one.rounds} of {scenario.rounds} rounds"


def told(values: Mapping[str, Option]) -> str:
    """The values of a configuration, in a line."""
    return "  ".join(
        f"{name} {value:.4g}" if isinstance(value, float) else f"{name} {value}" for name, value in values.items()
    )


def _plain(values: Mapping[str, Any]) -> dict[str, Option]:
    return {name: value.item() if isinstance(value, np.generic) else value for name, value in values.items()}


def keep_search(out: Path, settings: TuneSettings, ranges: Mapping[str, Range]) -> None:
    """Record the search in the folder.

    Raises:
        ConfigError: it holds another search.
    """
    changing = {name: getattr(settings, name) for name in TuneSettings.__struct_fields__ if name not in PLACES}
    wanted = json.dumps(changing | {"searched": {name: str(each) for name, each in ranges.items()}}, default=str)
    file = out / "search.json"
    if not file.exists():
        write_atomically(file, wanted.encode())
    elif file.read_text(encoding="utf-8") != wanted:
        raise ConfigError(f"{out} holds another search: choose another --out, or remove it")


class _Watching(ray_tune.Callback):
    """Reports each finished trial."""

    def __init__(self, watch: Watch, n_trials: int) -> None:
        self._watch, self._n_trials = watch, n_trials

    def on_trial_complete(self, iteration: int, trials: list[Any], trial: Any, **_: Any) -> None:  # noqa: ARG002
        """A trial has ended, by itself or because it was stopped."""
        done, last = {each.trial_id for each in trials if each.is_finished()} | {trial.trial_id}, trial.last_result
        reached = f"accuracy {100 * last['accuracy']:.1f} % after round {last['rounds']}"
        self._watch(f"{len(done)}/{self._n_trials}  {told(_plain(trial.config))}  {reached}")

    def on_trial_error(self, iteration: int, trials: list[Any], trial: Any, **_: Any) -> None:  # noqa: ARG002
        """A trial has failed."""
        self._watch(f"failed  {told(_plain(trial.config))}  see {trial.error_file}")
