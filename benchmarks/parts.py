"""Parts of a bundle, as a budget picks them, and what they take in this process; imports nothing but the runtime."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Final

import numpy as np

import deploy
from deploy.inference.budget import Gauge
from deploy.inference.engines import EngineOptions
from deploy.inference.runtime import Runtime
from fedge.bundle.manifest import read_bundle

STEP: Final = 1000.0
"""What each candidate takes for `Even`, in ms and in MB."""


class Even(Gauge):
    """Every candidate takes the same, so that a budget says how many run."""

    def __init__(self) -> None:
        self._mb = 0.0

    def measure_warm_ms(self, call: Callable[[], object]) -> float:
        call()
        return STEP

    def read_mb(self) -> float:
        self._mb += STEP
        return self._mb


def load(folder: Path, n: int, n_in_memory: int | None = None) -> deploy.Runtime:
    """Load the n candidates of the largest share, in memory or all but some on the disk; of 0 all in one graph."""
    if not n:
        return deploy.load(folder, engine="fused")
    how = EngineOptions(engine="separate", budget_ms=(n + 1) * STEP)  # gate and fusion count as one more
    if n_in_memory is not None:
        how = EngineOptions(engine="lazy", budget_mb=(n_in_memory + 1) * STEP)
    return Runtime(read_bundle(folder), how, Even())


def take(folder: str, n: int | None = None, n_in_memory: int | None = None) -> dict[str, float]:
    """The median time in ms and the memory in MB of single samples; without n, what the runtime says of all."""
    if n is None:
        plan = deploy.load(folder, engine="separate", budget_ms=1e9).plan
        assert plan is not None
        return {"ms": plan.ms, "mb": plan.mb}
    gauge = Gauge()
    before = gauge.read_mb()
    runtime = load(Path(folder), n, n_in_memory)
    x, repeats = np.zeros((1, *runtime.task.input_shape), np.float32), 100 if n_in_memory is None else 10
    times = [gauge.measure_ms(lambda: runtime._engine.run_all(x)) for _ in range(2 * repeats)]  # noqa: SLF001 - all run
    return {"ms": median(times[repeats:]), "mb": gauge.read_mb() - before}
