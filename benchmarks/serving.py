"""What does the server cost against calling the runtime in a loop? Requests a second and latency of tritonclient.

    python benchmarks/serving.py [BUNDLE] [--requests 600] [--rounds 5] [--json FILE]
    python benchmarks/serving.py --large    # a private model and eight experts of 3 x 32 x 32, 0.8 M parameters each

`fedge serve` runs in a process of its own, the clients are threads of this one, a tritonclient each, and send single
samples; the loop is one thread of this process with the same bundle and samples. Each round measures every variant
once, in turn; figures are medians over the rounds, ratios are taken within a round. `server ms` is the server's
processor time per request, which other load on the machine changes little; requests a second and the latencies hold
the clients' own work, which on a machine of few cores competes with the server's.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from statistics import median

import numpy as np
import psutil
import tritonclient.http as triton
from script import finish, parser_of, show

import deploy

GOLDEN = Path(__file__).parents[1] / "tests/deploy/golden/bundle"
CONCURRENT = (1, 4, 16)
OUTPUTS = ("class", "probabilities")


@contextmanager
def serving(bundle: Path) -> Iterator[tuple[str, psutil.Process]]:
    """Address and process of a server."""
    command = [sys.executable, "-m", "fedge", "--log-level", "warning", "serve", f"model={bundle}"]
    with subprocess.Popen([*command, "--port", "0", "--json"], stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            url = json.loads(process.stdout.readline())["url"]
            yield url.removeprefix("http://"), psutil.Process(process.pid)
        finally:
            process.terminate()


def cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return times.user + times.system


def loop(runtime: deploy.Runtime, x: np.ndarray, n: int) -> dict[str, float]:
    latencies = []
    cpu, begin = time.thread_time(), time.perf_counter()
    for i in range(n):
        start = time.perf_counter()
        runtime.predict(x[i % len(x)][np.newaxis])
        latencies.append(time.perf_counter() - start)
    return figures(n, begin, latencies, time.thread_time() - cpu)


def clients(url: str, process: psutil.Process, x: np.ndarray, n: int, concurrent: int, *, binary: bool) -> dict:
    """Figures of n requests by so many clients at once."""
    wanted = [triton.InferRequestedOutput(name, binary_data=binary) for name in OUTPUTS]

    def work(_: int) -> list[float]:
        latencies = []
        with triton.InferenceServerClient(url) as client:
            for i in range(n // concurrent):
                sample = x[i % len(x)][np.newaxis]
                start = time.perf_counter()
                tensor = triton.InferInput("x", sample.shape, "FP32").set_data_from_numpy(sample, binary_data=binary)
                client.infer("model", [tensor], outputs=wanted).as_numpy("class")
                latencies.append(time.perf_counter() - start)
        return latencies

    cpu, begin = cpu_s(process), time.perf_counter()
    with ThreadPoolExecutor(concurrent) as pool:
        latencies = [latency for part in pool.map(work, range(concurrent)) for latency in part]
    return figures(len(latencies), begin, latencies, cpu_s(process) - cpu)


def figures(n: int, begin: float, latencies: list[float], cpu: float) -> dict[str, float]:
    return {
        "per_s": n / (time.perf_counter() - begin),
        "median_ms": 1e3 * float(np.median(latencies)),
        "p99_ms": 1e3 * float(np.percentile(latencies, 99)),
        "server_ms": 1e3 * cpu / n,
    }


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("bundle", nargs="?", type=Path, default=GOLDEN)
    parser.add_argument("--large", action="store_true", help="nine cnn32, untrained, instead of BUNDLE")
    parser.add_argument("--requests", type=int, default=600)
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        bundle = arguments.bundle
        if arguments.large:
            from inference import Subject  # needs torch

            bundle = Path(folder) / "cnn32"
            Subject("cnn32", 8, bundle)
        finish(arguments, measure(bundle, arguments.requests, arguments.rounds))


def measure(bundle: Path, requests: int, rounds: int) -> dict[str, dict[str, float]]:
    runtime = deploy.load(bundle)
    shape, scale = runtime.task.input_shape, runtime.task.preprocessing.scale
    x = np.random.default_rng(0).uniform(0, scale, (64, *shape)).astype(np.float32)
    found: dict[str, list[dict[str, float]]] = {}
    with serving(bundle) as (url, process):
        for i in range(-1, rounds):  # the first warms up
            n = requests if i >= 0 else 32
            measured = {"loop": loop(runtime, x, n)}
            for concurrent in CONCURRENT:
                for kind in ("json", "binary"):
                    measured[f"{kind}, {concurrent}"] = clients(url, process, x, n, concurrent, binary=kind == "binary")
            for name, result in measured.items() if i >= 0 else ():
                found.setdefault(name, []).append(result)
    rows = {name: {key: median(one[key] for one in results) for key in results[0]} for name, results in found.items()}
    for name, results in found.items():
        for key in ("per_s", "p99_ms", "server_ms"):
            rows[name][f"{key}/loop"] = median(a[key] / b[key] for a, b in zip(results, found["loop"], strict=True))
    show({"variant": name} | row for name, row in rows.items())
    return rows


if __name__ == "__main__":
    main()
