"""Search a method's options and the settings of local training on validation samples, with Ray Tune.

The first configuration is the given one; the others are drawn at random. After a ninth and a third of the rounds, all
that are not among the best third so far are stopped (ASHA: Li et al., "A System for Massively Parallel Hyperparameter
Tuning", MLSys 2020). The search uses no test samples; `fedge simulate` measures the result.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, get_args

import msgspec
import numpy as np
from msgspec import Meta, field

from coordinator.fleet.simulated.ray import connect, require_importable
from coordinator.methods.catalogue import load_method_class, make_method
from coordinator.methods.method import Server
from coordinator.methods.option_values import parse_options
from coordinator.methods.options import parse_method, parse_value, require_method_options
from coordinator.methods.settings import Option
from coordinator.simulation.compare import examine_methods, make_scenario
from coordinator.simulation.federation import Federation
from coordinator.simulation.reports.outcome import Accuracy, Scored, encode_figures, find_score_name
from coordinator.simulation.run import Watch, validate
from coordinator.simulation.settings import Scenario, Setup, TuneSettings
from fedge.data.problems.scores import Figure
from fedge.errors import ConfigError, FedgeError, ProtocolError, raise_as
from fedge.models.choice import with_network
from fedge.settings import get_annotations, resolve_given
from fedge.system.files import make_folder, write_atomically
from fedge.system.hardware import Processor
from fedge.system.text import suggest_nearest
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

USUAL: Final = {
    "learning_rate": "0.003..0.3",
    "batch_size": "8,16,32,64",
    "local_steps": "5..40",
    "optimizer": "sgd,adam",
    "schedule": "constant,cosine,steps",
    "clip_norm": "0.1..10",
    "label_smoothing": "0,0.05,0.1,0.2",
    "class_weights": "equal,balanced",
    "augment": "none,crop,flip+crop",
    "patience": "3,5,10",
}
"""Default ranges of the settings of local training."""
USUAL_ADAPTIVE: Final = "0.0001..0.01"
"""Default range of the learning rate with adam and adamw."""
USUAL_OF_ALL: Final = "0.0001..0.3"
"""Default range of the learning rate if sgd and another optimizer are tried."""
SETTINGS: Final = (*USUAL, "local_epochs", "momentum", "weight_decay")
REDUCTION: Final = 3
"""Of this many configurations, one continues."""
DECADE: Final = 10.0
"""Ratio of bounds from which a range of positive numbers is searched on a logarithmic scale."""
NOTHING: Final = "none"
"""The word for no change of samples among those that are searched."""
PLACES: Final = ("out", "ray_address")
TRIALS, FIGURES, CONFIG = "trials", "figures.json", "best.toml"


@dataclass(frozen=True, slots=True)
class Range:
    """The range of a setting or option: one of `words`, or a number from `low` to `high`."""

    words: tuple[Option, ...] = ()
    low: float = 0
    high: float = 0

    def make_domain(self) -> Any:
        """Make the range for Ray Tune."""
        if self.words:
            return ray_tune.choice(list(self.words))
        by_ratio = self.low > 0 and self.high / self.low >= DECADE
        if isinstance(self.low, int) and isinstance(self.high, int):
            return (ray_tune.lograndint if by_ratio else ray_tune.randint)(self.low, self.high + 1)
        return (ray_tune.loguniform if by_ratio else ray_tune.uniform)(self.low, self.high)

    def __str__(self) -> str:
        return ",".join(map(str, self.words)) or f"{self.low:g}..{self.high:g}"

    def get_ends(self) -> tuple[Option, ...]:
        """Return the values that are valid if and only if all values of the range are."""
        return self.words or (self.low, self.high)


class TriedConfiguration(Scored, frozen=True, kw_only=True):
    """A configuration: its searched values, and its last score on validation samples, after `rounds`."""

    values: dict[str, Option]
    score: float = field(name="accuracy")
    rounds: int

    accuracy = Accuracy[float]("score")


class Tuning(Scored, frozen=True, kw_only=True):
    """The result of a search: the JSON file of `fedge tune`.

    `trials`: sorted by rounds reached, then by score, the best first. `asked`: the given configuration.
    """

    scenario: Scenario
    method: str
    seed: int
    searched: dict[str, str]
    best: TriedConfiguration
    asked: TriedConfiguration | None
    trials: tuple[TriedConfiguration, ...]

    def __repr__(self) -> str:
        """Return the best configuration."""
        best = f"{format_values(self.best.values)}: {describe_score(self.best, self)}"
        return f"Tuning({best}, the best of {len(self.trials)})"


def parse_ranges(method: str, search: Iterable[str], optimizer: str = "sgd") -> dict[str, Range]:
    """Parse the ranges to search, by name.

    Args:
        method: the method whose options can be searched beside the settings of local training.
        search: NAME=LOW..HIGH, NAME=A,B,C (of augment: none,flip,flip+crop), or NAME for its usual range or the range
            that the method declares. If empty, the learning rate and all real options of the method that have a lowest
            and a highest value.
        optimizer: the optimizer unless it is searched; the usual range of the learning rate depends on it.

    Raises:
        ConfigError: there is no such setting or option, or it needs a range.
    """
    options = {field.name: field.type for field in msgspec.structs.fields(load_method_class(method).Options)}
    declared = {name: own for name, kind in options.items() if (own := _find_declared(kind)) is not None}
    texts = list(search) or ["learning_rate", *declared]
    found: dict[str, Range] = {}
    for text in texts:
        name, _, span = (part.strip() for part in text.partition("="))
        name = name.replace("-", "_")
        if name not in SETTINGS and name not in {*options, "selection"}:
            known = tuple(dict.fromkeys([*SETTINGS, *options]))
            hint = suggest_nearest(name, known) or f": {', '.join(known)}"
            raise ConfigError(f"{name!r} cannot be searched: it is no setting of local training and no option{hint}")
        if span := span or (_find_usual_rates(texts, optimizer) if name == "learning_rate" else USUAL.get(name, "")):
            found[name] = _parse_range(name, span)
        elif name in declared:
            found[name] = declared[name]
        else:
            raise ConfigError(f"{name} has no range of its own: say one, as in --search {name}=0.01..1 or {name}=1,2,5")
    return found


def _find_usual_rates(texts: Sequence[str], optimizer: str) -> str:
    """Return the usual range of the learning rate for the optimizers that are tried: for all if there are several."""
    asked = [text.partition("=") for text in texts]
    spans = [span.strip() or USUAL["optimizer"] for name, _, span in asked if name.strip() == "optimizer"]
    tried = {word.strip() for word in (spans or [optimizer])[0].split(",")}
    if "sgd" not in tried:
        return USUAL_ADAPTIVE
    return USUAL["learning_rate"] if tried == {"sgd"} else USUAL_OF_ALL


def _parse_range(name: str, text: str) -> Range:
    """Parse LOW..HIGH or A,B,C."""
    low, dots, high = text.partition("..")
    if not dots:
        return Range(words=tuple(dict.fromkeys(parse_value(word.strip()) for word in text.split(","))))
    ends = parse_value(low.strip()), parse_value(high.strip())
    if any(isinstance(end, bool | str) for end in ends) or not float(ends[0]) < float(ends[1]):
        raise ConfigError(f"{name} is searched from LOW..HIGH, two numbers, not {text!r}")
    return Range(low=float(ends[0]) if isinstance(ends[1], float) else ends[0], high=ends[1])  # type: ignore[arg-type]


def _find_declared(kind: Any) -> Range | None:
    """Find the range of a real option with a lowest and a highest value, at a distance from exclusive bounds."""
    if get_args(kind)[:1] == (int,):  # its bounds are what is possible, not what is sensible
        return None
    for meta in (meta for meta in get_annotations(kind) if isinstance(meta, Meta)):
        low, high = (meta.gt if meta.ge is None else meta.ge), (meta.lt if meta.le is None else meta.le)
        if low is not None and high is not None:
            margin = (high - low) / 100
            return Range(low=low + margin * (meta.ge is None), high=high - margin * (meta.le is None))
    return None


def apply_values(
    scenario: Scenario, options: Mapping[str, Option], values: Mapping[str, Option]
) -> tuple[Scenario, dict[str, Option]]:
    """Return scenario and options of the method with the searched values applied.

    Raises:
        ConfigError: a setting is out of range.
    """
    settings: dict[str, Option | None] = {name: value for name, value in values.items() if name in SETTINGS}
    if (augment := settings.get("augment")) is not None:
        settings["augment"] = None if augment == NOTHING else str(augment).replace("+", ",")
    own = {name: value for name, value in values.items() if name not in SETTINGS}
    return resolve_given(Scenario, msgspec.structs.asdict(scenario) | settings), {**options, **own}


def tune(settings: TuneSettings, search: Iterable[str], out: Path, watch: Watch) -> Tuning:
    """Try configurations, several at a time, and write the best one; resumes an interrupted search.

    Args:
        settings: of data, devices and budget; settings that are not searched stay unchanged.
        search: the ranges, as in `parse_ranges`.
        out: folder of the results.
        watch: called with each configuration.

    Raises:
        ConfigError: a setting is not available as requested, or `out` holds another search.
        FruitlessError: nothing was learned in any trial.
        FedgeError: Ray fails, or every trial failed.
        KeyboardInterrupt: Ctrl-C; finished trials are kept.
    """
    scenario = make_scenario(settings)
    if scenario.metric is not None:
        raise ConfigError("--metric changes nothing in a search, which goes by the accuracy: leave it out")
    name, fixed = parse_method(settings.method)
    ranges = parse_ranges(name, search, scenario.optimizer)
    require_importable(*scenario.code, settings.method)
    if scenario.train_on is not Processor.CPU or not scenario.rounds:
        raise ConfigError(
            "a search needs rounds, and shares out processors, no GPUs: leave out --train-on, give --rounds"
        )
    federation = examine_methods(scenario, {settings.method}, settings.seed, watch)
    for key, each in ranges.items():
        for end in each.get_ends():
            with raise_as(ConfigError, f"--search {key}", on=ConfigError):
                _require_possible(federation, *apply_values(scenario, fixed, {key: end}), name, settings.seed)
    figure = federation.task.problem.figure
    make_folder(out)
    record_search(out, settings, ranges)
    folder = (out / TRIALS).absolute()

    def run_trial(values: dict[str, Option]) -> None:
        def report_accuracy(rounds: int, accuracy: float) -> None:
            ray_tune.report({"accuracy": accuracy, "rounds": rounds})

        changed, own = apply_values(scenario, fixed, _to_plain(values))
        with tempfile.TemporaryDirectory(prefix="fedge-tune-") as home:
            validate(changed, name, own, settings.seed, Path(home), report_accuracy)

    options, selection = parse_options(load_method_class(name), fixed)
    given = scenario.make_method_settings(settings.seed, fixed).sgd
    rates = {"learning_rate": given.learning_rate, "weight_decay": given.weight_decay}
    own = rates | {"augment": (scenario.augment or NOTHING).replace(",", "+")}
    now = msgspec.structs.asdict(scenario) | own | msgspec.structs.asdict(options) | {"selection": selection}
    asked = {key: now[key] for key in ranges}
    with connect(settings.ray_address):
        trainable = ray_tune.with_resources(run_trial, {"cpu": 1})
        if ray_tune.Tuner.can_restore(folder):
            tuner = ray_tune.Tuner.restore(str(folder), trainable, resume_unfinished=True, restart_errored=True)
        else:
            tuner = ray_tune.Tuner(
                trainable,
                param_space={key: each.make_domain() for key, each in ranges.items()},
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
                    callbacks=[JsonLoggerCallback(), _TrialReporter(watch, settings.trials, figure)],  # type: ignore[no-untyped-call]
                ),
            )
        grid = tuner.fit()
    if not grid.num_terminated:
        raise make_failure_error(grid.errors[0])
    tried = [
        TriedConfiguration(
            values=_to_plain(one.config),
            score=one.metrics["accuracy"],
            rounds=one.metrics["rounds"],
            score_name=find_score_name(figure),
        )
        for one in map(grid.__getitem__, range(len(grid)))
        if one.error is None and one.metrics and one.config
    ]
    tried.sort(key=lambda one: (-one.rounds, -one.score))
    found = Tuning(
        scenario=scenario,
        method=settings.method,
        seed=settings.seed,
        searched={key: str(each) for key, each in ranges.items()},
        best=tried[0],
        asked=next((one for one in tried if one.values == _to_plain(asked)), None),
        trials=tuple(tried),
        score_name=find_score_name(figure),
    )
    write_atomically(out / FIGURES, encode_figures(found, figure, indent=2))
    write_atomically(out / CONFIG, format_configuration(found).encode())
    return found


def _require_possible(
    federation: Federation, scenario: Scenario, options: dict[str, Option], method: str, seed: int
) -> None:
    """Refuse, before the first trial, a configuration that the method or the samples cannot take.

    Raises:
        ConfigError: the text says why.
    """
    require_method_options(method, options)
    task = with_network(federation.task, augment=scenario.augment)
    make_method(method, scenario.make_method_settings(seed, options), Server(task, federation.server_data))


def make_failure_error(error: Exception) -> FedgeError:
    """Make the error of a search all of whose trials failed. `error`: the first trial's, as Ray gives it."""
    cause = getattr(error, "cause", error)
    last = str(error).strip().splitlines()[-1:]
    if isinstance(cause, FedgeError) and not isinstance(cause, ProtocolError):  # which takes a name, too
        return type(cause)(f"every trial failed: {cause}")
    return FedgeError(f"every trial failed: {''.join(last)}")


def format_configuration(found: Tuning) -> str:
    """Format the best configuration as a TOML file of `fedge simulate` and `fedge coordinator`."""
    name, fixed = parse_method(found.method)
    scenario, options = apply_values(found.scenario, fixed, found.best.values)
    default = Scenario()
    changed = {n: v for n in Scenario.__struct_fields__ if (v := getattr(scenario, n)) != getattr(default, n)}
    searched = {key: getattr(scenario, key) for key in found.best.values if key in SETTINGS}
    learning = {n: v for n, v in (changed | searched).items() if n in Setup.__struct_fields__}
    sections = {
        "simulate": {"method": name, "seed": found.seed, **changed, **searched},
        "coordinator": {"method": name}
        | {n: v for n, v in learning.items() if n == "augment" or n not in Partitioning.__struct_fields__},
        "method": options,
    }
    lines = [f"# Found by `fedge tune`: {describe_score(found.best, found)} on validation samples."]
    for section, values in sections.items():
        settings = [f"{key} = {json.dumps(value, default=str)}" for key, value in values.items() if value is not None]
        lines += ["", f"[{section}]", *settings]
    return "\n".join(lines) + "\n"


def describe_score(one: TriedConfiguration, of: Tuning) -> str:
    """Describe a configuration's score in words."""
    figure = of.figure
    return f"{figure.words} {figure.format(one.score)} after {one.rounds} of {of.scenario.rounds} rounds"


def format_values(values: Mapping[str, Option]) -> str:
    """Format the values of a configuration in a line."""
    return "  ".join(
        f"{name} {value:.4g}" if isinstance(value, float) else f"{name} {value}" for name, value in values.items()
    )


def _to_plain(values: Mapping[str, Any]) -> dict[str, Option]:
    """Return the values that were set, without numpy's types; what is None was left as it is by default."""
    set_ = {name: value for name, value in values.items() if value is not None}
    return {name: value.item() if isinstance(value, np.generic) else value for name, value in set_.items()}


def record_search(out: Path, settings: TuneSettings, ranges: Mapping[str, Range]) -> None:
    """Record the search in the folder.

    Raises:
        ConfigError: the folder holds another search.
    """
    changing = {name: getattr(settings, name) for name in TuneSettings.__struct_fields__ if name not in PLACES}
    wanted = json.dumps(changing | {"searched": {name: str(each) for name, each in ranges.items()}}, default=str)
    file = out / "search.json"
    if not file.exists():
        write_atomically(file, wanted.encode())
    elif file.read_text(encoding="utf-8") != wanted:
        raise ConfigError(f"{out} holds another search: choose another --out, or remove it")


class _TrialReporter(ray_tune.Callback):
    """A callback that reports each finished trial."""

    def __init__(self, watch: Watch, n_trials: int, figure: Figure) -> None:
        self._watch, self._n_trials, self._figure = watch, n_trials, figure

    def on_trial_complete(self, iteration: int, trials: list[Any], trial: Any, **_: Any) -> None:  # noqa: ARG002
        """Report that a trial has ended, by itself or because it was stopped."""
        done, last = {each.trial_id for each in trials if each.is_finished()} | {trial.trial_id}, trial.last_result
        reached = f"{self._figure.words} {self._figure.format(last['accuracy'])} after round {last['rounds']}"
        self._watch(f"{len(done)}/{self._n_trials}  {format_values(_to_plain(trial.config))}  {reached}")

    def on_trial_error(self, iteration: int, trials: list[Any], trial: Any, **_: Any) -> None:  # noqa: ARG002
        """Report that a trial has failed."""
        self._watch(f"failed  {format_values(_to_plain(trial.config))}  see {trial.error_file}")
