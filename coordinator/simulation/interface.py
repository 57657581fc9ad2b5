"""`fedge.simulate`, `fedge.compare` and `fedge.tune`: the commands as functions, in a script and in a notebook.

Arguments are the commands' settings, with the same names, defaults and checks (`coordinator.simulation.settings`). In
addition, `task` may be a `fedge.Task`, `model` anything that a task takes, `method` a class, and `methods` and `seeds`
lists. Ctrl-C or a notebook's stop button ends a run and its processes.
"""

from __future__ import annotations

import inspect
import shutil
import sys
import tempfile
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

from msgspec import Struct

from coordinator.methods.catalogue import load_method_class
from coordinator.methods.options import parse_method, require_method_options
from coordinator.methods.settings import Option
from coordinator.simulation import compare as comparing
from coordinator.simulation import run as running
from coordinator.simulation.compare import make_scenario
from coordinator.simulation.measured import MeasuredDevice, add_tests, drop_training
from coordinator.simulation.reports.comparison import Comparison
from coordinator.simulation.reports.markup import render_table
from coordinator.simulation.reports.outcome import Cost, RunOutcome, compute_cost
from coordinator.simulation.reports.report import (
    make_comparison_report,
    make_run_report,
    render_notebook,
    write_results,
)
from coordinator.simulation.reports.terminal import list_figures
from coordinator.simulation.reports.words import describe_run
from coordinator.simulation.run import Watch
from coordinator.simulation.settings import CompareSettings, Scenario, SimulationSettings, TuneSettings
from coordinator.watch import runs
from coordinator.watch.tracking import open_tracking
from edge_agent.learning import batched
from fedge.errors import ConfigError
from fedge.settings import describe_settings, resolve_given
from fedge.system.loading import is_registered, load_role, register_object
from fedge.system.moved import alias_members
from fedge.tasks import Share, Task
from fedge.tasks.own import get_network_name
from fedge.tasks.shares import check_partitioning

if TYPE_CHECKING:
    from coordinator.simulation.tune import Tuning

SEVERAL: Final = {
    "methods": 'methods=["fedavg", Mine]',
    "seeds": "seeds=[3] for this one, seeds=range(3) for three",
}
"""Settings that may be lists, each with an example."""
S = TypeVar("S", bound=Scenario)
F = TypeVar("F", bound=Callable[..., Any])


@alias_members(bundle="get_bundle")
class Simulation(RunOutcome, frozen=True, kw_only=True, weakref=True):
    """The result of `simulate`.

    `home` holds the devices' folders; without `out`, only while this object lives. Each of `devices` has its test
    samples and its predictions for them.
    """

    devices: tuple[MeasuredDevice, ...]

    scenario: Scenario
    home: Path
    target: float | None = None

    @property
    def cost(self) -> Cost | None:
        """The cost of reaching `target`; None if there is no target, or it was not reached."""
        return None if self.target is None else compute_cost(self.curve, self.target)

    def get_bundle(self, device_id: str) -> Path:
        """Return the folder of a device's installed bundle, for `fedge.load`.

        Raises:
            ConfigError: there is no such device, or it has no bundle.
        """
        device = next((device for device in self.devices if device.id == device_id), None)
        if device is None or device.release is None:
            there = ", ".join(device.id for device in self.devices if device.release is not None)
            raise ConfigError(f"no bundle of {device_id!r}: there are {there}")
        return self.home / device_id / "bundles" / device.release

    def __str__(self) -> str:
        """Return what `fedge simulate` prints."""
        lines = list_figures(self, self.target)
        width = max(len(name) for name, _ in lines)
        return "\n".join(f"{name:{width}}  {figure}" for name, figure in lines)

    __repr__ = __str__

    def _repr_html_(self) -> str:
        shown = render_table(("", self.method), list_figures(self, self.target))
        return render_notebook(describe_run(self, self.scenario), shown, [self])


def _add_settings(settings: type[Struct]) -> Callable[[F], F]:
    """Add the settings and their defaults to a function's signature and docstring."""

    def decorate(function: F) -> F:
        own = inspect.signature(function)
        fixed = [p for p in own.parameters.values() if p.kind is not p.VAR_KEYWORD]
        named = [
            inspect.Parameter(each.name, inspect.Parameter.KEYWORD_ONLY, default=each.default, annotation=each.base)
            for each in describe_settings(settings, "")
        ]
        lines = [f"    {each.name}: {each.help}" for each in describe_settings(settings, "")]
        function.__signature__ = own.replace(parameters=[*named, *fixed])  # type: ignore[attr-defined]
        function.__doc__ = "\n".join([inspect.cleandoc(function.__doc__ or ""), "", "Settings:", *lines])
        return function

    return decorate


def print_progress(text: str) -> None:
    """Print progress as the commands do."""
    print(text, file=sys.stderr, flush=True)  # noqa: T201 - that is what was asked for


@_add_settings(SimulationSettings)
def simulate(
    *,
    options: Mapping[str, Option | Callable[..., Any]] | None = None,
    progress: Watch | None = print_progress,
    **settings: Any,
) -> Simulation:
    """Run one method on simulated devices and measure it. Equal arguments give equal figures, except for times.

        result = fedge.simulate(method="fedavg+ft", task="digits", devices=20, rounds=30, alpha=0.3)
        result.score, result.devices[0].score.value, result.devices[0].score.macro_f1
        fedge.load(result.get_bundle("device-00")).predict(x)
        result.devices[0].predictions.class_index == result.devices[0].y_test

    Args:
        options: of the method, like `--option` of the command; `selection` and `clustering` may be your own function.
        progress: called with lines of progress; silent if None.
        **settings: those of `fedge simulate`, under the same names; `task` may be a `fedge.Task`, `method` a subclass
            of `coordinator.methods.method.Method`, `model` a class, a function or a module, as in `Task.from_arrays`,
            and `metric` a function (`coordinator.simulation.own_metric`).

    Raises:
        ConfigError: a setting is unknown or out of range, or the data or the method does not exist.
        FruitlessError: nothing was learned, or no device has a bundle.
        StoreError: `out` cannot be made.
    """
    found = _make_settings(SimulationSettings, settings, "options")
    name, own = parse_method(found.method)
    given_options = {key: register_object(each) if callable(each) else each for key, each in (options or {}).items()}
    return run_simulation(found, name, given_options | own, progress or (lambda _: None))


def run_simulation(
    settings: SimulationSettings,
    method: str,
    options: dict[str, Option],
    progress: Watch,
    json_file: Path | None = None,
) -> Simulation:
    """Run a simulation. `method`: name without options, which are in `options`. `json_file`: gets the figures, too."""
    require_method_options(method, options)
    check_partitioning(settings)
    scenario, out = make_scenario(settings), settings.out
    label = load_method_class(method).name if is_registered(method) else settings.method
    shares: list[Mapping[str, Share]] = []
    home = Path(tempfile.mkdtemp(prefix="fedge-simulate-")) if out is None else runs.make_new_folder(out, "simulate")
    try:
        with (
            use_one_thread(),
            runs.record_accepted_run(out, "simulate", settings, options),
            open_tracking(settings.tensorboard, settings.mlflow, f"{settings.method}-{settings.seed}") as track,
        ):
            outcome = running.simulate(
                *(scenario, method, options, settings.seed, home, progress, label, settings),
                track=track,
                keep=lambda federation: shares.append(drop_training(federation.shares)),
            )
    except BaseException:
        if out is None:
            shutil.rmtree(home, ignore_errors=True)
        raise
    if out is not None or json_file is not None:
        write_results(out, make_run_report(outcome, scenario, settings.target), json_file)
    figures = {name: getattr(outcome, name) for name in RunOutcome.__struct_fields__ if name != "devices"}
    result = Simulation(
        **figures,
        devices=tuple(add_tests(device, shares[0], home) for device in outcome.devices),
        scenario=scenario,
        home=home,
        target=settings.target,
    )
    if out is None:
        weakref.finalize(result, shutil.rmtree, home, ignore_errors=True)
    return result


@_add_settings(CompareSettings)
def compare(*, progress: Watch | None = print_progress, **settings: Any) -> Comparison:
    """Compare several methods on equal terms: for each seed the same partition, first model and budget.

        table = fedge.compare(methods=["local", "fedavg+ft", "fedge"], task="digits", alpha=0.3, seeds=range(3))
        table.to_pandas()

    Runs go side by side in separate processes (`jobs`), unless task or network exist only in this process. With `out`,
    results are kept there and a comparison can be resumed.

    Args:
        progress: called with each finished run; silent if None.
        **settings: those of `fedge compare`, under the same names; `methods` and `seeds` may be lists, a method a
            class, `task` a `fedge.Task`, `model` a class, a function or a module, `metric` a function.

    Raises:
        ConfigError: a setting is unknown or out of range, or the data or a method does not exist.
        StoreError: `out` cannot be made or read.
        FruitlessError: a run ended with nothing learned, or without a bundle.
        FedgeError: a run failed.
    """
    texts = {name: _format_list(name, settings[name], how) for name, how in SEVERAL.items() if name in settings}
    found = _make_settings(CompareSettings, settings | texts)  # `settings` keeps the classes until the end
    check_partitioning(found)

    watch = progress or (lambda _: None)
    if found.out is not None:
        return run_comparison(found, found.out, watch)
    with use_one_thread(), tempfile.TemporaryDirectory(prefix="fedge-compare-") as folder:
        return comparing.compare(found, Path(folder), watch)


def run_comparison(settings: CompareSettings, out: Path, watch: Watch, json_file: Path | None = None) -> Comparison:
    """Run a comparison, with the results in `out`. `json_file`: gets the figures, too."""
    with use_one_thread():
        comparison = comparing.compare(settings, out, watch)
    runs.record_run(out, "compare", settings)
    write_results(out, make_comparison_report(comparison), json_file)
    return comparison


@_add_settings(TuneSettings)
def tune(*, search: Iterable[str] = (), progress: Watch | None = print_progress, **settings: Any) -> Tuning:
    """Search a method's options and the settings of local training on validation samples, with Ray Tune.

        found = fedge.tune(method="fedprox", task="digits", search=["learning_rate", "proximal_mu=0.001..1"], trials=20)
        found.best.values, found.best.score

    Trials run side by side in separate processes. With `out` they are kept, and a search can be resumed.

    Args:
        search: NAME=LOW..HIGH, NAME=A,B,C, or NAME alone for its usual range, as `--search` of the command.
        progress: called with each trial; silent if None.
        **settings: those of `fedge tune`, under the same names.

    Raises:
        ConfigError: a setting is unknown or out of range, the data or the method does not exist, the task or network
            exists only in this process, Ray is not installed, or `out` holds another search.
        FruitlessError: no trial learned anything.
        FedgeError: Ray fails, or every trial failed.
    """
    found = _make_settings(TuneSettings, settings, "search")
    with tempfile.TemporaryDirectory(prefix="fedge-tune-") as folder:
        return run_tuning(found, search, found.out or Path(folder), progress or (lambda _: None))


def run_tuning(settings: TuneSettings, search: Iterable[str], out: Path, progress: Watch) -> Tuning:
    """Run a search, with the results in `out`."""
    require_method_options(*parse_method(settings.method))
    check_partitioning(settings)
    tuning = load_role("coordinator.simulation.tune", "fedge.tune", "ray")
    with use_one_thread():
        result: Tuning = tuning.tune(settings, search, out, progress)
    return result


def _make_settings(kind: type[S], arguments: Mapping[str, Any], *beside: str) -> S:
    """Make the settings, with objects of this process replaced by the names that hold them.

    `beside`: further arguments of the function, for suggestions.
    """
    named = dict(arguments)
    if "method" in named:
        named["method"] = _hold_class(named["method"])
    if isinstance(task := named.get("task"), Task):
        if task.pool.user is not None and "partition" not in named:
            raise ConfigError(
                'the task says whose each sample is (users): say partition="natural", a device per person, or another '
                "partition, which mixes the samples of all"
            )
        named["task"] = register_object(task)
    if (augment := named.get("augment")) is not None and not isinstance(augment, str):
        each = augment if isinstance(augment, Iterable) else [augment]
        named["augment"] = ",".join(register_object(own) if callable(own) else str(own) for own in each)
    if callable(metric := named.get("metric")):
        named["metric"] = register_object(metric)
    if isinstance(named.get("problem"), type):
        named["problem"] = register_object(named["problem"])
    if (model := named.get("model")) is not None:
        named["model"] = get_network_name(model)
    return resolve_given(kind, named, (*beside, "progress"))


def _format_list(name: str, given: Any, how: str) -> str:
    """Return a list of settings as text."""
    if isinstance(given, str):
        return given
    if not isinstance(given, Iterable):
        raise ConfigError(f"{name} must be a list, or a text with commas, not {given!r}: write {how}")
    return ",".join(str(_hold_class(each)) for each in given)


def _hold_class(method: object) -> Any:
    """Return the name that holds a class of a method."""
    return register_object(method) if isinstance(method, type) else method


@contextmanager
def use_one_thread() -> Iterator[None]:
    """Use one thread, since small networks gain nothing from more; restore the caller's number afterwards."""
    from threadpoolctl import threadpool_limits

    with threadpool_limits(1), batched.use_one_thread():
        yield
