"""How fast the coordinator averages updates into K cluster experts.

Claim: streaming K = 5 cluster means over updates, each read once, run at no less than 0.7 times the rate of a plain
numpy streaming sum of the same updates into one float64 total (`total += update`, no weights, one cluster), and need
memory for the experts alone.

Rates are GB of float32 updates per second; medians of runs in turn (one of each rival in shuffled
order, then again). numpy has one thread, `average_clusters` one for each processor (`taskset -c 0` leaves it one).
Rivals:
  copy          np.copyto of each update: what memory gives
  sum32         total32 += update                  one cluster, float32, no weights
  sum64         total64 += update                  one cluster, float64, no weights: the claim's rival
  weighted64    total64 += n_i * update            one cluster, float64, weighted: what the paper's Eq. 5 asks for
  K1            cluster_averages, one cluster
  K5            cluster_averages, five clusters, each client in one
  K5-overlap    cluster_averages, five clusters, two clients of five in a second one
  K5-everybody  cluster_averages, five clusters, every client in every one (worst case: five times the additions)
Peak memory of K5 is measured apart (tracemalloc), as a multiple of K * d * 8 bytes.
"""

from __future__ import annotations

import os

os.environ |= dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")

import platform
import random
import statistics
import time
import tracemalloc
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from script import finish, machine, parser_of, show

from coordinator.aggregation import average_clusters
from fedge.tensors.layout import Layout, Model, TensorInfo

K = 5
CASES = ((400_000, 50), (11_250_000, 20))  # parameters (1.6 and 45 MB), updates
DISTINCT_BYTES = 300_000_000  # updates in memory; the rest are these again, long out of the CPU's cache
MIN_RATIO = 0.7


class Case:
    """Updates of one size, and everything that can be done with them."""

    def __init__(self, d: int, n_updates: int) -> None:
        rng = np.random.default_rng(0)
        distinct = [rng.standard_normal(d, dtype=np.float32) for _ in range(min(n_updates, DISTINCT_BYTES // (4 * d)))]
        self.updates = [distinct[i % len(distinct)] for i in range(n_updates)]
        self.sizes = [i % 7 + 1 for i in range(n_updates)]
        self.layout = Layout(tensors=(TensorInfo(name="w", shape=(d,)),))
        self.gigabytes = 4 * d * n_updates / 1e9
        clients = range(n_updates)
        self.memberships = {
            "K1": [clients],
            "K5": [clients[k::K] for k in range(K)],
            "K5-overlap": [
                [i for i in clients if i % K == k or (i // K % 5 < 2 and (i + 1) % K == k)] for k in range(K)
            ],
            "K5-everybody": [clients] * K,
        }

    def models(self) -> Iterator[Model]:
        for update in self.updates:
            yield Model(update, np.zeros(0, np.float32), np.zeros(0, np.int64))

    def average(self, name: str) -> None:
        average_clusters(self.models(), self.sizes, self.memberships[name], self.layout)

    def copy(self) -> None:
        target = np.empty_like(self.updates[0])
        for update in self.updates:
            np.copyto(target, update)

    def plain_sum(self, dtype: type) -> None:
        total = np.zeros(len(self.updates[0]), dtype)
        for update in self.updates:
            total += update

    def weighted_sum(self) -> None:
        total = np.zeros(len(self.updates[0]))
        for update, size in zip(self.updates, self.sizes, strict=True):
            total += np.float64(size) * update

    def rivals(self) -> dict[str, Callable[[], None]]:
        return {
            "copy": self.copy,
            "sum32": lambda: self.plain_sum(np.float32),
            "sum64": lambda: self.plain_sum(np.float64),
            "weighted64": self.weighted_sum,
        } | {name: lambda name=name: self.average(name) for name in self.memberships}  # type: ignore[misc]

    def peak_over_experts(self) -> float:
        tracemalloc.start()
        self.average("K5")
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return peak / (K * len(self.updates[0]) * 8)


def measure(case: Case, repeats: int) -> dict[str, float]:
    """Median GB/s of each rival."""
    seconds: dict[str, list[float]] = {name: [] for name in case.rivals()}
    rng = random.Random(0)
    for _ in range(repeats + 1):
        # In shuffled order: who comes after a rival that used little memory pays for fresh pages.
        for name, run in rng.sample(sorted(case.rivals().items()), len(seconds)):
            start = time.perf_counter()
            run()
            seconds[name].append(time.perf_counter() - start)
    return {
        name: case.gigabytes / statistics.median(times[1:]) for name, times in seconds.items()
    }  # the first warms up


def report(repeats: int) -> dict[str, Any]:
    results = []
    for d, n_updates in CASES:
        case = Case(d, n_updates)
        rates = measure(case, repeats)
        ratios = {name: rates[name] / rates["sum64"] for name in case.memberships}
        results.append(
            {
                "update_mb": 4 * d / 1e6,
                "updates": n_updates,
                "gb_per_s": {name: round(rate, 2) for name, rate in rates.items()},
                "ratio_to_sum64": {name: round(ratio, 2) for name, ratio in ratios.items()},
                "ratio_to_weighted64": {name: round(rates[name] / rates["weighted64"], 2) for name in case.memberships},
                "peak_over_experts": round(case.peak_over_experts(), 3),
                "claim_holds": ratios["K5"] >= MIN_RATIO,
            }
        )
    return {
        "benchmark": "aggregation",
        **machine(),
        "python": platform.python_version(),
        "numpy": np.__version__,
        "repeats": repeats,
        "results": results,
    }


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--repeats", type=int, default=9, help="runs of each rival (default 9)")
    arguments = parser.parse_args()
    figures = report(arguments.repeats)
    show(figures["results"])
    finish(arguments, figures)


if __name__ == "__main__":
    main()
