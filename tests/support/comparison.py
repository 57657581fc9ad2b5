"""Made-up outcomes of simulated runs."""

from __future__ import annotations

import math
from typing import Any

from coordinator.simulation.compare import compare_runs
from coordinator.simulation.reports.comparison import Comparison
from coordinator.simulation.reports.outcome import DeviceOutcome, Point, RunOutcome, Score
from coordinator.simulation.settings import Scenario


def a_score(accuracy: float = 0.5, n: int = 20) -> Score:
    return Score(n=n, value=accuracy, macro_f1=accuracy - 0.1, weighted_f1=accuracy - 0.05)


def a_run(method: str = "fedavg", seed: int = 0, accuracy: float = 0.8, **changes: Any) -> RunOutcome:
    """Thirty rounds; the curve rises from 0.1 in equal steps of ten rounds, a megabyte and two seconds."""
    curve = tuple(
        Point(
            round=10 * k,
            score=0.1 + (accuracy - 0.1) * k / 3,
            bytes_up=400_000 * k,
            bytes_down=600_000 * k,
            seconds=2.0 * k,
        )
        for k in range(4)
    )
    devices = tuple(
        DeviceOutcome(id=f"device-{i}", group=i % 2, n_train=40, score=a_score(accuracy), trained=30, bundle=True)
        for i in range(2)
    )
    values: dict[str, Any] = {
        "method": method, "seed": seed, "score": accuracy, "std": 0.05, "minimum": accuracy - 0.1,
        "percentile_10": accuracy - 0.08, "worst_decile": accuracy - 0.09, "sample_score": accuracy,
        "macro_f1": accuracy - 0.1, "weighted_f1": accuracy - 0.05, "global_score": 0.7, "rounds": 30,
        "bytes_up": 1_200_000, "bytes_down": 1_800_000, "seconds": 6.0, "bundles": 2, "max_abs_diff": 3e-7,
        "split": False, "clusters": {}, "curve": curve, "devices": devices, "wall_s": 4.5, "evaluation_s": 0.2,
    }  # fmt: skip
    return RunOutcome(**(values | changes))


def a_comparison(n_methods: int = 2) -> Comparison:
    """Methods m0, m1, ... with 80, 82, ... percent on seed 0 and one more on seed 1."""
    methods = [f"m{k}" for k in range(n_methods)]
    runs = [a_run(m, seed, 0.8 + 0.02 * k + 0.01 * seed) for seed in (0, 1) for k, m in enumerate(methods)]
    return compare_runs(Scenario(), runs, methods, (0, 1), "m0", None)


def a_regression(method: str = "fedavg", seed: int = 0, r2: float = 0.5) -> RunOutcome:
    """A run of `a_run` whose score is R^2; the first device has targets that do not vary."""
    undefined = Score(n=20, value=math.nan, metrics={"rmse": 3.0}, score_name="r2")
    known = Score(n=20, value=r2, metrics={"rmse": 1234.5}, score_name="r2")
    devices = tuple(
        DeviceOutcome(id=f"device-{i}", group=0, n_train=40, score=score, trained=30, bundle=True)
        for i, score in enumerate((undefined, known))
    )
    figures = {"macro_f1": None, "weighted_f1": None, "score_name": "r2", "metrics": {"rmse": 618.75}}
    return a_run(method, seed, r2, devices=devices, **figures)
