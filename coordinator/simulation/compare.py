"""Compares methods on equal terms: for each seed the same partition, first model and budget; runs side by side."""

from __future__ import annotations

import hashlib
import logging
import os
import re
import tempfile
from collections.abc import Collection, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from pathlib import Path

import msgspec
import numpy as np
from msgspec import Struct

from coordinator.methods.catalogue import make_method
from coordinator.methods.method import Server
from coordinator.methods.options import parse_method, require_method_options
from coordinator.simulation.federation import Federation, partition_samples
from coordinator.simulation.own_metric import load_metric
from coordinator.simulation.reports.comparison import Comparison, MethodOutcome, Spread
from coordinator.simulation.reports.outcome import Cost, RunOutcome, compute_cost, decode_figures
from coordinator.simulation.run import LOOK_S, Watch, examine_network, require_wanted, simulate
from coordinator.simulation.settings import CompareSettings, Scenario
from fedge.data.problems.scores import Figure
from fedge.errors import ConfigError, FedgeError, FruitlessError, StoreError, raise_as
from fedge.models.training import get_torch_device
from fedge.system.child import Child, DiedError
from fedge.system.files import make_folder, write_atomically
from fedge.system.hardware import Processor
from fedge.system.loading import is_registered
from fedge.system.logs import set_level
from fedge.wire.messages import BlobRef

FIGURES = ("std", "worst_decile", "bytes_up", "bytes_down", "seconds", "wall_s", "evaluation_s")
"""Figures of each run whose spread over the seeds a comparison has."""
SHARE_OF_THE_BEST = 0.95
"""The default target, as a share of the best method's accuracy."""


class _Run(Struct, frozen=True, kw_only=True):
    """A run of a method on a seed, with all settings that determine its figures."""

    scenario: Scenario
    method: str
    seed: int

    @property
    def name(self) -> str:
        """The name of the run's file; runs with different settings never share a name."""
        digest = hashlib.sha256(msgspec.json.encode(self, enc_hook=str, order="sorted")).hexdigest()
        return f"{re.sub('[^A-Za-z0-9.+=-]', '_', self.method)}-{self.seed}-{digest[:8]}"


# -------------------------------------------------------------------------------------------------------- the runs


def compare(settings: CompareSettings, out: Path, watch: Watch) -> Comparison:
    """Do the runs that `out` lacks, several at a time, and aggregate them all.

    Raises:
        ConfigError: before any run, a method, an option, a seed or the data does not exist, or `out` holds a report
            that would be lost.
        StoreError: before any run, the folder cannot be made.
        FruitlessError: a run ended with nothing learned, or without a bundle.
        FedgeError: a run failed.
    """
    methods, seeds = parse_methods(settings), parse_seeds(settings)
    baseline = settings.baseline or methods[0]
    if baseline not in methods:
        raise ConfigError(f"the baseline {baseline} is not among the methods {', '.join(methods)}")
    scenario = make_scenario(settings)
    load_metric(scenario.metric)
    _require_same_report(out, scenario, methods, seeds)
    wanted = [_Run(scenario=scenario, method=method, seed=seed) for seed in seeds for method in methods]
    code = (*scenario.code, *methods)
    ours = any(map(is_registered, code))  # no other process has them, now or later
    found = {} if ours else {run: outcome for run in wanted if (outcome := _read(_get_file(out, run))) is not None}
    for number, outcome in enumerate(found.values(), 1):
        watch(_format_progress(number, len(wanted), outcome))
    missing = [run for run in wanted if run not in found]
    if missing:
        if settings.engine == "local":
            get_torch_device(scenario.train_on)
        examine_methods(scenario, {run.method for run in missing}, seeds[0], watch)
    make_folder(out / "runs")  # otherwise a failure would show only after the first run
    jobs = settings.jobs or (os.cpu_count() or 1 if scenario.train_on is Processor.CPU else 1)  # memory of the GPU
    on_ray = settings.engine == "ray"
    if missing:
        watch(f"{len(missing)} runs to do; each that is done gets a line")
    for run, outcome in (
        _iterate_on_ray(missing, settings) if on_ray else _iterate_outcomes(missing, 1 if ours else jobs)
    ):
        write_atomically(_get_file(out, run), msgspec.json.format(msgspec.json.encode(outcome)))
        found[run] = outcome
        watch(_format_progress(len(found), len(wanted), outcome))
    return compare_runs(scenario, [found[run] for run in wanted], methods, seeds, baseline, settings.target)


def _format_progress(done: int, wanted: int, outcome: RunOutcome) -> str:
    return (
        f"{done}/{wanted}  {outcome.method}  seed {outcome.seed}  {outcome.figure.words} "
        f"{outcome.figure.format(outcome.score)}  {outcome.wall_s:.1f} s"
    )


def parse_methods(settings: CompareSettings) -> tuple[str, ...]:
    """Parse the methods by name and options, checked and without duplicates.

    Raises:
        ConfigError: a method is not registered or lacks such an option.
    """
    methods = tuple(dict.fromkeys(text.strip() for text in settings.methods.split(",") if text.strip()))
    if not methods:
        raise ConfigError("there is no method to compare: give --methods a,b,...")
    for method in methods:
        require_method_options(*parse_method(method))
    return methods


def examine_methods(scenario: Scenario, methods: Collection[str], seed: int, watch: Watch) -> Federation:
    """Try the network and build each method once, so that a comparison with an impossible one fails before it begins.

    Returns: what the runs with this seed begin with.

    Raises:
        ConfigError: the data, an option or the network does not suit a method; the text names it.
    """
    federation = partition_samples(scenario, seed)
    for text in sorted(methods):
        name, options = parse_method(text)
        with raise_as(ConfigError, text, on=ConfigError):
            method = make_method(
                name, scenario.make_method_settings(seed, options), Server(federation.task, federation.server_data)
            )
            layout = federation.with_head_class(method.HEAD_CLASS, seed).layout
            method.make_first_state(layout, BlobRef(digest="0" * 64, size_bytes=1))
    examine_network(federation, "", watch)
    return federation


def parse_seeds(settings: CompareSettings) -> tuple[int, ...]:
    """Parse the seeds, without duplicates.

    Raises:
        ConfigError: a seed is not a whole number from 0, or there is none.
    """
    texts = [text.strip() for text in settings.seeds.split(",") if text.strip()]
    if not texts or not all(text.isdecimal() for text in texts):
        raise ConfigError(f"seeds are whole numbers with commas between them, not {settings.seeds!r}")
    return tuple(dict.fromkeys(map(int, texts)))


def make_scenario(settings: Scenario) -> Scenario:
    """Make the settings that determine a run's figures, apart from method and seed."""
    return Scenario(**{name: getattr(settings, name) for name in Scenario.__struct_fields__})


def _get_file(out: Path, run: _Run) -> Path:
    return out / "runs" / f"{run.name}.json"


def _require_same_report(out: Path, scenario: Scenario, methods: Sequence[str], seeds: Sequence[int]) -> None:
    """Allow resuming a comparison or adding methods and seeds; refuse to overwrite any other report.

    Raises:
        ConfigError: the report has other settings, or methods and seeds that are not requested now.
    """
    file = out / "figures.json"
    if not file.exists():
        return
    try:
        found = Comparison.read(file.read_bytes())
    except (OSError, msgspec.DecodeError) as error:
        raise ConfigError(f"{file} is not of a comparison, and would be lost: choose another --out") from error
    changed = [n for n in Scenario.__struct_fields__ if getattr(found.scenario, n) != getattr(scenario, n)]
    lost = [m.method for m in found.methods if m.method not in methods]
    lost += [f"seed {seed}" for seed in found.seeds if seed not in seeds]
    if changed or lost:
        why = f"with another {', '.join(changed)}" if changed else f"of {', '.join(lost)}, too"
        raise ConfigError(f"{out} has the report of a comparison {why}: choose another --out, or remove it")


def _read(file: Path) -> RunOutcome | None:
    if not file.exists():
        return None
    try:
        return decode_figures(file.read_bytes(), RunOutcome)
    except (OSError, msgspec.DecodeError) as error:
        raise StoreError(f"{file} cannot be read: {error}; remove it to have the run done again") from error


def _iterate_outcomes(runs: Sequence[_Run], jobs: int) -> Iterator[tuple[_Run, RunOutcome]]:
    """Yield outcomes as they finish; always clean up processes and folders. With one job, run in this process."""
    with tempfile.TemporaryDirectory(prefix="fedge-compare-") as work:
        homes = {run: Path(work) / run.name for run in runs}
        if min(jobs, len(runs)) <= 1:
            yield from ((run, _simulate(run, home)) for run, home in homes.items())
            return
        # one thread each; numpy and torch read this on import
        os.environ["OMP_NUM_THREADS"] = os.environ["OPENBLAS_NUM_THREADS"] = "1"
        children = [Child("coordinator.simulation.compare:_simulate") for _ in range(min(jobs, len(runs)))]
        idle, threads = list(children), ThreadPoolExecutor(len(children), "fedge-compare")

        def run_in_child(run: _Run, home: Path) -> RunOutcome:
            child = idle.pop()
            try:
                return child.call(run, home, returns=RunOutcome)
            finally:
                idle.append(child)

        try:
            waiting = {threads.submit(run_in_child, run, home): run for run, home in homes.items()}
            while waiting:
                wait(waiting, LOOK_S, FIRST_COMPLETED)
                # a run that fails ends its process, about which a later run may complain, too
                for future in [future for future in waiting if future.done()]:
                    yield waiting.pop(future), future.result()
                require_wanted()
        except DiedError as error:
            raise FedgeError(f"a process that simulated ended, perhaps for lack of memory: {error}") from error
        finally:
            for child in children:
                child.close()
            threads.shutdown(cancel_futures=True)


def _iterate_on_ray(runs: Sequence[_Run], settings: CompareSettings) -> Iterator[tuple[_Run, RunOutcome]]:
    """Yield outcomes as they finish on the Ray cluster; a run whose process died is repeated."""
    from coordinator.fleet.simulated.ray import connect, plan_actors, ray, require_importable

    require_importable(*settings.code, *parse_methods(settings))

    def run_remotely(run: _Run) -> RunOutcome:
        with tempfile.TemporaryDirectory(prefix="fedge-compare-") as home:
            return _simulate(run, Path(home))

    with connect(settings.ray_address) as n:
        _, resources = plan_actors(n, settings.train_on)
        on_processor = ray.remote(**resources, max_retries=-1)(run_remotely)
        waiting = {on_processor.remote(run): run for run in runs}
        while waiting:
            for done in ray.wait(list(waiting), timeout=LOOK_S)[0]:
                yield waiting.pop(done), ray.get(done)
            require_wanted()


def _simulate(run: _Run, home: Path) -> RunOutcome:
    import torch

    torch.set_num_threads(1)
    name, options = parse_method(run.method)
    # adjusted minimum sizes are told once per seed, below the table
    once = set_level("fedge.tasks", logging.ERROR)
    with once, raise_as(FruitlessError, f"{run.method}, seed {run.seed}", on=FruitlessError):
        return simulate(run.scenario, name, options, run.seed, home, lambda _: None, run.method)


# ----------------------------------------------------------------------------------------------------- the figures


def compare_runs(
    scenario: Scenario,
    runs: Sequence[RunOutcome],
    methods: Sequence[str],
    seeds: Sequence[int],
    baseline: str,
    target: float | None,
) -> Comparison:
    """Compute means over the seeds and paired differences; `runs` holds every method for every seed."""
    of = {method: [run for run in runs if run.method == method] for method in methods}
    score = {method: np.array([run.score for run in own]) for method, own in of.items()}
    goal = choose_target(runs[0].figure, [float(a.mean()) for a in score.values()]) if target is None else target
    outcomes = []
    for method, own in of.items():
        others = [other for other in methods if other != method]
        best = max(others, key=lambda other: float(score[other].mean()), default=None)
        reached = [run.global_score for run in own if run.global_score is not None]
        cold = [run.cold_start for run in own if run.cold_start is not None]
        common = set.intersection(*(set(run.details) for run in own))
        f1 = [run.macro_f1 for run in own if run.macro_f1 is not None]
        further = [name for name in own[0].metrics if all(name in run.metrics for run in own)]
        outcomes.append(
            MethodOutcome(
                method=method,
                score=compute_spread(score[method]),
                to_baseline=None if method == baseline else compute_spread(score[method] - score[baseline]),
                best_other=best,
                to_best_other=None if best is None else compute_spread(score[method] - score[best]),
                global_score=compute_spread(reached) if reached else None,
                cost=_average_costs([compute_cost(run.curve, goal) for run in own]),
                cold_start=compute_spread(cold) if cold else None,
                details={name: compute_spread([run.details[name] for run in own]) for name in sorted(common)},
                macro_f1=compute_spread(f1) if f1 else None,
                score_name=runs[0].score_name,
                metrics={name: compute_spread([run.metrics[name] for run in own]) for name in further},
                **{name: compute_spread([getattr(run, name) for run in own]) for name in FIGURES},
            )
        )
    return Comparison(
        scenario=scenario,
        seeds=tuple(seeds),
        baseline=baseline,
        target=goal,
        methods=tuple(outcomes),
        runs=tuple(runs),
    )


def choose_target(figure: Figure, means: Sequence[float]) -> float:
    """Choose the default target from the methods' means: `SHARE_OF_THE_BEST`, or as far below a score without bound."""
    best = max(means)
    return SHARE_OF_THE_BEST * best if figure.share else best - (1 - SHARE_OF_THE_BEST) * abs(best)


def compute_spread(values: Sequence[float] | np.ndarray) -> Spread:
    """Compute mean and sample standard deviation of one value per seed."""
    found = np.asarray(values, np.float64)
    std = float(found.std(ddof=1)) if len(found) > 1 else 0.0
    return Spread(mean=float(found.mean()), std=std, seeds=tuple(found.tolist()))


def _average_costs(costs: Sequence[Cost | None]) -> Cost | None:
    known = [cost for cost in costs if cost is not None]
    if len(known) < len(costs):
        return None
    return Cost(
        round=round(float(np.mean([cost.round for cost in known]))),
        bytes=round(float(np.mean([cost.bytes for cost in known]))),
        seconds=float(np.mean([cost.seconds for cost in known])),
    )
