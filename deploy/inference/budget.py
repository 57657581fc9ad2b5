"""What a device can afford: engine and candidates within limits of time and memory, measured where they run.

With a budget, the first of these that fits is used:

1. the engine that `auto` takes without a budget, with all candidates;
2. all candidates by engine separate, which takes less memory (lazy, if the gate alone chooses the experts);
3. int8, if the bundle has its graph;
4. as many candidates as possible, those of the largest share first: in memory, else by engine lazy with some of them on
   the disk until they are wanted.

If nothing fits, the candidate of the largest share runs alone. A candidate that is left out counts as one whose output
is not finite: the others take its share, by the bundle's own formula (fedge.md section 9).
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Final, NamedTuple

import numpy as np
from msgspec import UnsetType

from deploy.inference.engines import (
    Engine,
    EngineChoice,
    EngineName,
    EngineOptions,
    SeparateEngine,
    can_run_apart,
    choose_engine,
    is_chosen_by_gate,
    make_engine,
)
from deploy.inference.networks import Networks
from deploy.inference.sessions import Provider
from fedge.bundle.manifest import Bundle, Manifest, Part
from fedge.errors import ConfigError
from fedge.system.malloc import release_freed_memory

RUNS: Final = 7
"""Number of warm runs whose median is the time of a sample."""
ENOUGH_MS: Final = 300.0
"""Total time of warm runs after which no more are made."""
LOADED: Final = 3.0
"""A graph of all candidates is only tried if so many times its weights fit in the memory: loaded, five ResNet-18 take
2.4 times theirs."""
GUARD_SHARE: Final = 0.5
"""Share of the output that a guard's candidate has (fedge.md section 11)."""


class Gauge:
    """Measures time and memory of this process."""

    def measure_ms(self, call: Callable[[], object]) -> float:
        """Return the wall time of a call in ms."""
        begin = time.perf_counter()
        call()
        return (time.perf_counter() - begin) * 1000

    def measure_warm_ms(self, call: Callable[[], object]) -> float:
        """Return the median time of up to `RUNS` calls, after a first one that does not count."""
        call()
        times: list[float] = []
        while len(times) < RUNS and sum(times) < ENOUGH_MS:
            times.append(self.measure_ms(call))
        return float(np.median(times))

    def read_mb(self) -> float:
        """Return the resident memory of this process in MB, without what it has freed."""
        import psutil  # only a budget needs it

        release_freed_memory()
        return float(psutil.Process().memory_info().rss / 1e6)


class Budget(NamedTuple):
    """The most that a sample may take in ms, and that a bundle may add to the process in MB; infinite without limit."""

    ms: float
    mb: float


class Cost(NamedTuple):
    """What candidate k takes: a run and the opening of its file in ms, and memory in MB."""

    k: int
    run_ms: float
    open_ms: float
    mb: float


@dataclass(frozen=True, slots=True)
class Plan:
    """The part of a bundle that runs, and what it takes.

    Attributes:
        engine: the engine that runs it.
        used: the candidates that are not left out, ascending.
        in_memory: those of them that are not on the disk, ascending.
        ms: usual time of a sample for which all that may run does, without its preprocessing.
        mb: memory that this adds to the process.
        fits: whether that is within the budget.
    """

    engine: EngineName
    used: tuple[int, ...]
    in_memory: tuple[int, ...]
    ms: float
    mb: float
    fits: bool

    def describe(self, manifest: Manifest) -> str:
        """Return what was picked, what it takes and what was left out, in a line."""
        names = [candidate.name for candidate in manifest.candidates]
        takes = f"about {self.ms:.3g} ms and {self.mb:.3g} MB"
        if not self.fits:
            those = f"even {names[self.used[0]]} alone" if len(self.used) == 1 else "all candidates together"
            return f"over budget, but used: {those} by engine {self.engine}, {takes}"
        on_disk = [names[k] for k in self.used if k not in self.in_memory]
        left_out = [name for k, name in enumerate(names) if k not in self.used]
        parts = [f"{len(self.used)} of {len(names)} candidates by engine {self.engine}, {takes}"]
        parts += [f"on the disk until wanted: {', '.join(on_disk)}"] if on_disk else []
        parts += [f"left out: {', '.join(left_out)}"] if left_out else []
        return "; ".join(parts)


def make_affordable_engine(
    bundle: Bundle, how: EngineOptions, providers: Sequence[Provider], gauge: Gauge | None = None
) -> tuple[Engine, Plan]:
    """Load a bundle as far as the budget of `how` allows, and say what was picked.

    A named engine is kept: fused and int8 then run all candidates, whatever they take.

    Raises:
        ConfigError: the bundle lacks what the engine or the mode needs.
    """
    gauge = gauge or Gauge()
    budget = Budget(how.budget_ms or math.inf, how.budget_mb or math.inf)
    manifest, first = bundle.manifest, choose_engine(bundle, how.engine)
    x = np.zeros((1, *manifest.task.input_shape), np.float32)
    whole = how.engine in {"fused", "int8"} or not can_run_apart(bundle)
    if first in {"fused", "int8"} and (whole or LOADED * _compute_weights_mb(manifest, first) <= budget.mb):
        engine, plan = _try_whole(bundle, first, how, providers, budget, gauge)
        if whole or plan.fits:
            return engine, plan
        del engine  # before the others are opened
    networks, costs, formula_ms = _measure_apart(bundle, how, providers, budget, gauge)
    top = manifest.fusion.top if is_chosen_by_gate(manifest) else None
    plan = choose_plan(costs, formula_ms, budget, how.engine, top)
    while plan.fits and plan.engine == "separate":
        networks.hold(plan.used)  # together they may displace each other from the processor's caches
        together = make_engine(bundle, "separate", how.threads, providers, how.mode, networks)
        ms = gauge.measure_warm_ms(partial(together.run_all, x))
        if ms <= budget.ms or len(plan.used) == 1:
            plan = replace(plan, ms=ms, fits=ms <= budget.ms)
            break
        plan = choose_plan(costs[: len(plan.used) - 1], formula_ms, budget, how.engine, top)
    if how.engine == "auto" and len(plan.in_memory) < len(costs) and isinstance(manifest.int8, Part):
        networks.hold([])
        with contextlib.suppress(ConfigError):  # some processors give wrong sums
            choose_engine(bundle, "int8")
            if LOADED * _compute_weights_mb(manifest, "int8") <= budget.mb:
                engine, other = _try_whole(bundle, "int8", how, providers, budget, gauge)
                if other.fits:
                    return engine, other
    networks.hold(plan.in_memory, plan.used)
    release_freed_memory()
    return make_engine(bundle, plan.engine, how.threads, providers, how.mode, networks), plan


def _compute_weights_mb(manifest: Manifest, engine: EngineName) -> float:
    """Return the size of the files with the weights that an engine loads, in MB."""
    if engine == "int8" and isinstance(manifest.int8, Part):
        return manifest.int8.size_bytes / 1e6
    return sum(part.size_bytes for part in set(manifest.parts)) / 1e6


def _try_whole(
    bundle: Bundle, engine: EngineName, how: EngineOptions, providers: Sequence[Provider], budget: Budget, gauge: Gauge
) -> tuple[Engine, Plan]:
    """Load all candidates into one graph, and measure it."""
    before, x = gauge.read_mb(), np.zeros((1, *bundle.manifest.task.input_shape), np.float32)
    made = make_engine(bundle, engine, how.threads, providers, how.mode)
    ms = gauge.measure_warm_ms(lambda: made.run_all(x))
    mb = max(gauge.read_mb() - before, _compute_weights_mb(bundle.manifest, engine))
    every = tuple(range(len(bundle.manifest.candidates)))
    return made, Plan(engine, every, every, ms, mb, fits=ms <= budget.ms and mb <= budget.mb)


def _measure_apart(
    bundle: Bundle, how: EngineOptions, providers: Sequence[Provider], budget: Budget, gauge: Gauge
) -> tuple[Networks, list[Cost], float]:
    """Open and run each candidate on a sample of zeros; return them, what each takes, and the formula's time in ms.

    Those of the largest share come first and stay open as long as they are within the budget, so memory is what each
    adds to those before.
    """
    manifest, x = bundle.manifest, np.zeros((1, *bundle.manifest.task.input_shape), np.float32)
    networks = Networks(bundle, how.threads, providers)
    networks.hold([], range(len(manifest.candidates)))
    engine = make_engine(bundle, "separate", how.threads, providers, how.mode, networks)
    assert isinstance(engine, SeparateEngine)
    formula_ms = gauge.measure_warm_ms(partial(engine.run_formula, x))
    costs: list[Cost] = []
    kept: list[int] = []
    digests: set[str] = set()
    for k in rank_candidates(manifest):
        networks.hold(kept, [k])
        part, before = manifest.candidates[k].part, gauge.read_mb()
        run = partial(networks.compute_logits, k, x)
        open_ms, run_ms = gauge.measure_ms(run), gauge.measure_warm_ms(run)
        mb = 0.0 if part.digest in digests else max(gauge.read_mb() - before, part.size_bytes / 1e6)
        digests.add(part.digest)
        costs.append(Cost(k, run_ms, open_ms, mb))
        if sum(cost.mb for cost in costs) <= budget.mb:
            kept.append(k)
    return networks, costs, formula_ms


def rank_candidates(manifest: Manifest) -> list[int]:
    """Return the candidates by falling share in the output, the mean over the device's validation samples.

    Without such samples their weights count. A guard's candidate has the guard's half, too. Of equal candidates the
    first is worth most.
    """
    worth = [c.weight if isinstance(c.share, UnsetType) else c.share for c in manifest.candidates]
    if manifest.fusion.guard is not None:
        worth = [(1 - GUARD_SHARE) * weight for weight in worth]
        worth[manifest.fusion.guard.candidate] += GUARD_SHARE
    return sorted(range(len(worth)), key=lambda k: (-worth[k], k))


def choose_plan(
    costs: Sequence[Cost], formula_ms: float, budget: Budget, engine: EngineChoice, top: int | None
) -> Plan:
    """Return the plan of most candidates that fits, else that of the first candidate alone.

    Args:
        costs: what each candidate takes, that of the largest share first.
        formula_ms: the time of gate and fusion.
        budget: the limits.
        engine: "auto", or "separate" or "lazy" to use no other.
        top: the most candidates that run for a sample if the gate alone chooses them, else None.
    """
    for m in range(len(costs), 0, -1):
        for plan in _list_plans(costs[:m], formula_ms, budget, engine, top):
            if plan.fits:
                return plan
    return next(_list_plans(costs[:1], formula_ms, budget, engine, top))


def _list_plans(
    costs: Sequence[Cost], formula_ms: float, budget: Budget, engine: EngineChoice, top: int | None
) -> Iterator[Plan]:
    """Yield plans that use all these candidates: all in memory, then ever fewer, beside one from the disk."""

    def make(name: EngineName, n_in_memory: int) -> Plan:
        held, others = costs[:n_in_memory], costs[n_in_memory:]
        n_run = len(costs) if top is None or name == "separate" else min(top, len(costs))
        runs = sorted((cost.run_ms for cost in costs), reverse=True)[:n_run]
        opened = sorted((cost.open_ms for cost in others), reverse=True)[:n_run]
        ms = formula_ms + sum(runs) + sum(opened)
        mb = sum(cost.mb for cost in held) + max((cost.mb for cost in others), default=0.0)
        used, in_memory = (tuple(sorted(cost.k for cost in each)) for each in (costs, held))
        return Plan(name, used, in_memory, ms, mb, fits=ms <= budget.ms and mb <= budget.mb)

    yield make("lazy" if engine == "lazy" or (engine == "auto" and top is not None) else "separate", len(costs))
    if engine != "separate":
        yield from (make("lazy", n) for n in range(len(costs) - 2, -1, -1))
