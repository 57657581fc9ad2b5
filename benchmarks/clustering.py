"""What AIDC and MCTC cost as the federation grows: time and memory against N, the number of devices.

Synthetic devices in five planted groups: profiles (N, 64) of values in [0, 1] for AIDC, measured in the unit that their
groups' centres give, so that two groups are about 1 apart; update directions (N, 256) for MCTC, whose embedding is part
of the time. Each case runs in a process of its own, whose largest resident set, less that of the same process with
N = 50, is the memory. Promised: AIDC O(N^2 q) time and 8 N^2 bytes up
to 2,000 devices, above that O(N R q) time and O(R^2 + R) memory for R anchors; MCTC O(N^2 (m + log N)) time and
16 to 24 N^2 bytes, after an eigendecomposition, O(N^3), where there are fewer devices than parameters: below 256 here.
Times are the processor's, so that others on the machine count little. `growth` is the exponent between two neighbours
in the table, `rand` the adjusted Rand index of the clusters found (first cluster of each device) against the groups.

With --noise 0.1 the devices of a group are about as far apart as theta_split allows: where AIDC begins to fail.

Run: python benchmarks/clustering.py [--devices 250 500 1000 2000 5000 10000] [--noise SD] [--json FILE]
     [--plot FILE.png]
"""

from __future__ import annotations

import json
import math
import resource
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from script import finish, machine, parser_of, plot

ALGORITHMS = ("aidc", "mctc")
N_GROUPS = 5
SMALLEST = 50


def one(algorithm: str, n: int, noise: float) -> dict[str, float]:
    """Processor time and memory of one case, in this process."""
    from sklearn.metrics import adjusted_rand_score

    from coordinator.clustering.aidc import aidc, compute_class_unit
    from coordinator.clustering.geometry import compute_embedding
    from coordinator.clustering.mctc import mctc

    rng = np.random.default_rng(0)
    group = np.arange(n) % N_GROUPS
    if algorithm == "aidc":
        centres = rng.random((N_GROUPS, 64))
        data = np.clip(centres[group] + noise * rng.standard_normal((n, 64)), 0, 1)
    else:
        centres = rng.standard_normal((N_GROUPS, 256))
        data = centres[group] + 0.5 * rng.standard_normal((n, 256))
    aidc(np.eye(4), unit=1.0)  # imports
    start = time.process_time()
    clusters = (
        aidc(data, unit=compute_class_unit(centres), rng=rng)
        if algorithm == "aidc"
        else mctc(compute_embedding(data)).clusters
    )
    taken = time.process_time() - start
    labels = np.full(n, -1)
    for k, members in reversed(list(enumerate(clusters))):
        labels[list(members)] = k
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return {"seconds": taken, "peak_mb": peak, "rand": adjusted_rand_score(group, labels), "clusters": len(clusters)}


def in_child(algorithm: str, n: int, noise: float) -> dict[str, float]:
    command = [sys.executable, __file__, "--one", algorithm, str(n), "--noise", str(noise)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


def table(algorithm: str, sizes: list[int], noise: float) -> list[dict[str, Any]]:
    idle = in_child(algorithm, SMALLEST, noise)["peak_mb"]
    rows: list[dict[str, Any]] = []
    for n in sizes:
        found = in_child(algorithm, n, noise)
        row = {
            "devices": n,
            "seconds": round(found["seconds"], 3),
            "memory_mb": round(found["peak_mb"] - idle, 1),
            "matrix_mb": round(8 * n * n / 2**20, 1),
            "rand": round(found["rand"], 3),
            "clusters": found["clusters"],
        }
        if rows:
            row["growth"] = round(
                math.log(found["seconds"] / rows[-1]["seconds"]) / math.log(n / rows[-1]["devices"]), 2
            )
        rows.append(row)
        print(f"{algorithm}  " + "  ".join(f"{name} {value}" for name, value in row.items()), flush=True)
    return rows


def growth(figures: dict[str, Any], left: Any, right: Any) -> None:
    for algorithm in ALGORITHMS:
        rows = figures[algorithm]
        sizes = [row["devices"] for row in rows]
        left.loglog(sizes, [row["seconds"] for row in rows], "o-", label=algorithm.upper())
        right.loglog(sizes, [max(row["memory_mb"], 1) for row in rows], "o-", label=algorithm.upper())
    right.loglog(sizes, [row["matrix_mb"] for row in rows], "k:", label="8 N² bytes")
    for axes, label in ((left, "seconds"), (right, "MB")):
        axes.set(xlabel="devices", ylabel=label)
        axes.grid(visible=True, which="both", alpha=0.3)
        axes.legend()


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--devices", type=int, nargs="+", default=[250, 500, 1000, 2000, 3000, 5000, 10_000])
    parser.add_argument("--noise", type=float, default=0.05, help="sd of a channel of a profile (default 0.05)")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw them")
    parser.add_argument("--one", nargs=2, metavar=("ALGORITHM", "N"), help="one case, figures to standard output")
    args = parser.parse_args()
    if args.one:
        print(json.dumps(one(args.one[0], int(args.one[1]), args.noise)))
        return
    figures: dict[str, Any] = {"benchmark": "clustering", **machine()}
    figures |= {algorithm: table(algorithm, sorted(args.devices), args.noise) for algorithm in ALGORITHMS}
    finish(args, figures)
    if args.plot:
        plot(args.plot, partial(growth, figures), n=2, figsize=(9, 3.5))


if __name__ == "__main__":
    main()
