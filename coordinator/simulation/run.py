"""Simulates one method on one seed, from the samples to the figures."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Collection, Coroutine, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from itertools import islice
from pathlib import Path
from typing import Any, Final, TypeVar

import msgspec
import numpy as np
import torch

from coordinator.aggregation.protection import Protection
from coordinator.fleet.problems import describe_reasons, select_reasons
from coordinator.fleet.simulated.fleet import Execute, SimulatedFleet
from coordinator.methods.catalogue import make_method
from coordinator.methods.method import Method, Server
from coordinator.methods.settings import Option
from coordinator.methods.state import State
from coordinator.service.checks import N_SAMPLES, examine, explain_no_profile, require_sound, select_few
from coordinator.service.findings import Finding
from coordinator.service.samples import count_by_class, find_missing_classes
from coordinator.simulation import rounds
from coordinator.simulation.evaluation import Evaluation, compute_epsilon_spent, write_global_bundle
from coordinator.simulation.federation import Federation, make_fleet, partition_samples
from coordinator.simulation.own_metric import load_metric
from coordinator.simulation.reports.choices import Choices
from coordinator.simulation.reports.outcome import (
    DeviceOutcome,
    Point,
    RunOutcome,
    Score,
    find_score_name,
    find_without_bundle,
    make_outcome,
    name_figures,
)
from coordinator.simulation.settings import EngineScenario, Scenario
from coordinator.watch.tracking import Track
from edge_agent.learning import batched
from fedge.data.problems.scores import ACCURACY, Figure
from fedge.errors import ConfigError, FruitlessError
from fedge.models.training import get_torch_device
from fedge.steps.noise import explain_weak_delta
from fedge.system.hardware import Processor
from fedge.tasks.shares import convert_targets

T = TypeVar("T")
QUIET_S: Final = 10.0
"""Time without a line of progress after which a round without a point of the curve gets one."""
LOOK_S = 0.1
"""Pause between two looks at work in a thread."""
LARGE: Final = 500_000
"""Fewest weights of a network whose checks are reported step by step; checks of a smaller network are soon over."""
Watch = Callable[[str], None]
"""A function that is called with lines of progress."""


def simulate(
    scenario: Scenario,
    method: str,
    options: dict[str, Option],
    seed: int,
    home: Path,
    watch: Watch,
    label: str,
    on: EngineScenario | None = None,
    track: Track | None = None,
    keep: Callable[[Federation], None] | None = None,
) -> RunOutcome:
    """Run a method to its end and measure it; equal arguments give equal figures, except for times.

    Args:
        scenario: data, devices and budget.
        method: name of a registered method.
        options: the method's options.
        seed: the seed of partition, first model and training.
        home: folder in which the devices' folders are made.
        watch: called with progress.
        label: the run's name for the method.
        on: the engine that carries out the orders; this process if None.
        track: called with each round of the curve, and its figures by name.
        keep: called with the devices' data, before the run.

    Raises:
        ConfigError: the data, the partition, the method, its options or Ray is not available as requested, or the
            network cannot learn.
        FruitlessError: nothing was learned, or no device has a bundle.
        FedgeError: Ray fails.
    """
    began = time.perf_counter()
    load_metric(scenario.metric)
    watch("sharing out the samples, and checking the network")
    federation = partition_samples(scenario, seed)
    if keep is not None:
        keep(federation)
    made = make_method(
        method, scenario.make_method_settings(seed, options), Server(federation.task, federation.server_data)
    )
    _require_delta(federation, made.settings.protection)
    examine_network(federation, explain_no_profile(method, options), watch)
    for finding in _find_missing_classes(federation):
        watch(f"note: {finding}")
    outcome = run_on(federation, made, scenario, seed, home, label, watch, on, track)
    return msgspec.structs.replace(outcome, wall_s=round(time.perf_counter() - began, 3))


def run_on(
    federation: Federation,
    made: Method[Any],
    scenario: Scenario,
    seed: int,
    home: Path,
    label: str,
    watch: Watch = lambda _: None,
    on: EngineScenario | None = None,
    track: Track | None = None,
) -> RunOutcome:
    """Run a method instance to its end and measure it, as `simulate`, on devices whose samples are partitioned."""
    began, federation = time.perf_counter(), federation.with_head_class(made.HEAD_CLASS, seed)
    with _open_engine(on, scenario, federation, made, home) as execute:
        if (
            execute is not batched.execute_jobs and not torch.cuda.is_available()
        ):  # the GPUs may be elsewhere in the cluster
            scenario = msgspec.structs.replace(scenario, train_on=Processor.CPU)
        fleet, first, workers = make_fleet(federation, scenario, seed, home, execute)
        measured = federation.draw_measured(scenario.measured, seed)
        choices = Choices()
        fleet.on_event = choices.observe
        evaluation = Evaluation(
            *(federation, workers, measured, get_torch_device(scenario.train_on)), metric=load_metric(scenario.metric)
        )
        figure = federation.task.problem.figure
        curve: list[Point] = []

        def measure(state: State, number: int, score: float) -> None:
            point = Point(
                round=number,
                score=score,
                global_score=evaluation.evaluate_globally(made, state, fleet),
                bytes_up=fleet.bytes_up,
                bytes_down=fleet.bytes_down,
                seconds=fleet.seconds,
                score_name=find_score_name(figure),
            )
            curve.append(point)
            if track is not None:
                track(number, name_figures(point, figure))

        told_at = [time.monotonic()]

        def print_line(line: str) -> None:
            told_at[0] = time.monotonic()
            watch(line)

        def compute_privacy(state: State) -> dict[str, float]:
            at_work = federation.shares if isinstance(federation.shares, dict) else state.participations
            return compute_epsilon_spent((home / i for i in at_work), made.settings.protection)

        def on_round(state: State) -> None:
            """Skip rounds after training, which have no number of their own."""
            number = count_rounds(state)
            if state.round <= scenario.rounds and not made.is_done(state) and number % scenario.spacing == 0:
                measure(
                    state,
                    number,
                    _average_scores(evaluation.evaluate_now(made, state, fleet), federation.late_joiners),
                )
                reached = f"round {number}/{scenario.rounds}  {figure.words} {curve[-1].score:.3f}"
                spent = "".join(f"  {name} {value:.2f}" for name, value in compute_privacy(state).items())
                print_line(reached + spent + describe_missing(state, fleet))
            elif not made.is_done(state) and time.monotonic() - told_at[0] > QUIET_S:
                print_line(f"round {state.round}/{scenario.rounds}" + describe_missing(state, fleet))
            if state.round == made.last and number < made.last and state.best_state:
                print_line(
                    f"training stops after round {number}: the best state is that of round {state.best_state.round}"
                )
            if state.round == made.last:
                print_line("the devices write their bundles")

        begun = made.make_first_state(federation.layout, first)
        on_round(begun)
        state = run_to_end(rounds.run_rounds(made, begun, fleet, on_round))
        final = evaluation.evaluate_finally(made, state, fleet)
        watch(describe_bundles(final, figure))
        if evaluation.failure:
            watch(f"note: {evaluation.failure}")
        spent = compute_privacy(state)
        done = min(count_rounds(state), scenario.rounds) if state.best_state else scenario.rounds
        reached = _average_scores({i: end.score for i, end in final.items()}, federation.late_joiners)
        measure(state, done, reached)
    write_global_bundle(federation, made, state, fleet, home)
    summary = made.summarise(state)
    return make_outcome(
        tuple(final.values()),
        method=label,
        seed=seed,
        global_score=curve[-1].global_score,
        rounds=done,
        bytes_up=fleet.bytes_up,
        bytes_down=fleet.bytes_down,
        seconds=fleet.seconds,
        max_abs_diff=evaluation.max_abs_diff,
        split=bool(summary["split"]),
        clusters={str(k): tuple(members) for k, members in summary["clusters"].items()},
        curve=tuple(curve),
        wall_s=round(time.perf_counter() - began, 3),
        evaluation_s=round(evaluation.seconds, 3),
        validation={line.round: line.accuracy for line in state.history if line.accuracy is not None},
        details={name: value for name, value in summary.items() if isinstance(value, float)} | spent,
        experts=summary["experts"],
        diagnostics=tuple(summary.get("diagnostics", ())),
        draws=federation.milder.draws,
        moved=federation.milder.moved,
        counts=evaluation.counts,
        score_name=find_score_name(figure),
        choices=choices.list_choices(measured),
    )


def count_rounds(state: State) -> int:
    """Count the rounds of training that were done, fewer than planned if it stopped early."""
    return state.best_state.stopped if state.best_state and state.best_state.stopped else state.round


def describe_missing(state: State, fleet: SimulatedFleet) -> str:
    """Describe how many devices brought an update, and why others did not; empty if nobody failed to."""
    if not state.history or (last := state.history[-1]).answered >= last.asked:
        return ""
    why = describe_reasons(select_reasons(fleet.problems, last.round))
    if last.answered and not why:  # still at work (fedbuff)
        return ""
    return f"  answered {last.answered} of {last.asked}" + (f": {why}" if why else "")


def describe_bundles(final: Mapping[str, DeviceOutcome], figure: Figure = ACCURACY) -> str:
    """Describe the installed bundles in a line of progress.

    Raises:
        FruitlessError: no device has a bundle.
    """
    why = describe_reasons(find_without_bundle(final.values()))
    having = [device for device in final.values() if device.bundle]
    if not having:
        raise FruitlessError("no device has a bundle" + (f": {why}" if why else ""))
    score = _average_scores({d.id: d.score for d in having}, {device.id for device in having if device.late_joiner})
    whose = f"the bundles of {len(having)} of {len(final)} devices" if why else "the devices' bundles"
    nan = describe_reasons({d.id: "undefined (NaN) for its test samples" for d in having if np.isnan(d.score.value)})
    told = f"  {nan}" if nan else ""
    return f"{whose}  {figure.words} {score:.3f}" + told + (f"  without one: {why}" if why else "")


def examine_network(federation: Federation, lacking: str, watch: Watch) -> None:
    """Report what users should know about the network before training; `lacking`: see `explain_no_profile`.

    Raises:
        ConfigError: a run would be useless.
    """
    data = federation.data
    examined = examine(
        *(federation.task, federation.layout, lacking),
        samples=select_few(data[i].labelled for i in islice(data, N_SAMPLES)),
        tell=lambda step: watch(f"check: {step}") if federation.layout.n_params >= LARGE else None,
    )
    require_sound(examined.findings)
    for finding in examined.findings:
        watch(f"note: {finding}")


def _find_missing_classes(federation: Federation) -> list[Finding]:
    """Find classes missing on all devices; generated devices are not checked."""
    if not isinstance(federation.shares, dict):
        return []
    y = convert_targets(federation.task, np.concatenate([share.y_train for share in federation.shares.values()]))
    return [*find_missing_classes({"": count_by_class(federation.task, y)})]


def _require_delta(federation: Federation, guards: Protection) -> None:
    """Refuse a delta that is weak for some device, which would decline; generated devices are not checked."""
    if guards.dp and isinstance(federation.shares, dict):
        n = max(int(np.count_nonzero(~share.sensitive)) for share in federation.shares.values())
        if weak := explain_weak_delta(guards.dp_delta, n):
            raise ConfigError(f"of a device, --dp-{weak}")


def validate(
    scenario: Scenario,
    method: str,
    options: dict[str, Option],
    seed: int,
    home: Path,
    tell: Callable[[int, float], None],
) -> None:
    """Run only the rounds of training, and report the score on the devices' validation samples.

    Arguments as in `simulate`. `tell` is called at each point of the curve and after the last round, once a device has
    learned something. It gets the rounds done, and the mean score of the models that the measured devices would use.

    Raises:
        ConfigError: as `simulate`; or no device has validation samples.
        FruitlessError: nothing was learned.
    """
    federation = partition_samples(scenario, seed)
    made = make_method(
        method, scenario.make_method_settings(seed, options), Server(federation.task, federation.server_data)
    )
    federation = federation.with_head_class(made.HEAD_CLASS, seed)
    fleet, first, workers = make_fleet(federation, scenario, seed, home)
    measured = federation.draw_measured(scenario.measured, seed)
    evaluation = Evaluation(federation, workers, measured, get_torch_device(scenario.train_on), on_validation=True)

    def on_round(state: State) -> None:
        if not state.participations:  # what nobody has learned is no figure to choose by
            return
        if state.round % scenario.spacing == 0 or state.round == scenario.rounds:
            if not (scores := evaluation.evaluate_now(made, state, fleet)):
                raise ConfigError("no device has validation samples to choose by: give the devices more samples")
            tell(state.round, _average_scores(scores, federation.late_joiners))

    begun = made.make_first_state(federation.layout, first)
    run_to_end(rounds.run_rounds(made, begun, fleet, on_round, scenario.rounds))


@contextmanager
def _open_engine(
    on: EngineScenario | None, scenario: Scenario, federation: Federation, method: Method[Any], home: Path
) -> Iterator[Execute]:
    """Open the engine that carries out the devices' orders."""
    if on is None or on.engine == "local":
        yield batched.execute_jobs
        return
    from coordinator.fleet.simulated.on_ray import Shards, WorkerSpec
    from coordinator.fleet.simulated.ray import connect, require_importable

    require_importable(*scenario.code)
    recipe = WorkerSpec(
        task=federation.task,
        layout=federation.layout,
        home=home.absolute(),
        min_cohort=scenario.min_cohort,
        student=scenario.student,
        train_on=scenario.train_on,
    )
    with connect(on.ray_address) as n:
        yield Shards(recipe, federation.data, method.steps, n)


def run_to_end(work: Coroutine[Any, Any, T]) -> T:
    """Run work as `asyncio.run`; inside a running event loop (a notebook), run it in a thread and wait.

    Ctrl-C, or cancelling the waiting task, cancels the work. The work has ended when this returns.
    """
    if not is_in_loop():
        return asyncio.run(work)
    stopped = threading.Event()

    async def watch_work() -> T:
        task = asyncio.ensure_future(work)
        while not task.done():
            await asyncio.wait([task], timeout=LOOK_S)
            if stopped.is_set():
                task.cancel()
        return task.result()

    with ThreadPoolExecutor(1, "fedge-simulate") as thread:
        try:
            running = thread.submit(asyncio.run, watch_work())
            while not running.done():
                wait([running], LOOK_S)
                require_wanted()
            return running.result()
        finally:
            stopped.set()


def is_in_loop() -> bool:
    """Return whether an event loop is running in this thread."""
    with suppress(RuntimeError):
        asyncio.get_running_loop()
        return True
    return False


def require_wanted() -> None:
    """Raise if the waiting task was cancelled, as Ctrl-C does within a running event loop.

    Raises:
        CancelledError: the task was cancelled.
    """
    try:
        waiting = asyncio.current_task()
    except RuntimeError:
        return
    if waiting is not None and waiting.cancelling():
        raise asyncio.CancelledError


def _average_scores(scores: dict[str, Score], without: Collection[str]) -> float:
    known = [score.value for i, score in scores.items() if i not in without and not np.isnan(score.value)]
    return float(np.mean(known)) if known else float("nan")
