"""Checks of updates in processes, against checks in one thread, in the same minutes.

Updates of noise lie in files, as they do when they have come in. Both sides check the same ones, in turns, as a
coordinator does: all that wait at once, in one thread one after the other, or in a process for each processor
(`coordinator.fleet.mqtt.checking`).

    reports/s   updates checked in a second, median of the repetitions
    stall ms    the longest time for which the event loop could do nothing else, median of the repetitions

Run: python benchmarks/checks.py [--numbers 65537 1000000 11250000] [--updates 40] [--json FILE]
"""

from __future__ import annotations

import asyncio
import itertools
import statistics
import tempfile
import time
from contextlib import closing
from pathlib import Path

import numpy as np
from script import finish, parser_of, show

from coordinator.fleet.mqtt import checking
from fedge.tensors import codecs
from fedge.tensors.layout import Codec, Layout, TensorInfo

PULSE_S = 0.001


async def longest_stall_ms(end: asyncio.Event) -> float:
    """Of the loop until `end` is set."""
    longest = 0.0
    while not end.is_set():
        began = time.monotonic()
        await asyncio.sleep(PULSE_S)
        longest = max(longest, time.monotonic() - began - PULSE_S)
    return 1000 * longest


async def checked(pool: checking.CheckPool, files: list[Path], how: Codec, layout: Layout) -> tuple[float, float]:
    """Updates a second, and the longest stall in ms."""
    end = asyncio.Event()
    pulse = asyncio.create_task(longest_stall_ms(end))
    await asyncio.sleep(0)
    began = time.monotonic()
    await asyncio.gather(*(pool.compute_norms(file, how, layout) for file in files))
    seconds = time.monotonic() - began
    end.set()
    return len(files) / seconds, await pulse


async def measure(numbers: int, how: Codec, updates: int, repetitions: int) -> dict[str, object]:
    layout = Layout(tensors=(TensorInfo(name="w", shape=(numbers,)),))
    rng = np.random.default_rng(0)
    found: dict[str, list[tuple[float, float]]] = {"thread": [], "processes": []}
    with tempfile.TemporaryDirectory() as folder, closing(checking.CheckPool()) as pool:
        files = [Path(folder, str(i)) for i in range(updates)]
        for file in files:
            file.write_bytes(codecs.encode({"w": 1e-3 * rng.standard_normal(numbers, np.float32)}, how))
        for repetition in range(repetitions + 1):
            for side, small in (("thread", numbers), ("processes", 0)):
                checking.SMALL = small  # type: ignore[misc]
                figures = await checked(pool, files, how, layout)
                if repetition:  # the first one starts the processes
                    found[side].append(figures)
    medians = {
        side: {"reports_s": statistics.median(r for r, _ in rows), "stall_ms": statistics.median(s for _, s in rows)}
        for side, rows in found.items()
    }
    return {"numbers": numbers, "codec": str(how), "updates": updates, **medians}


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--numbers", type=int, nargs="+", default=[65_537, 1_000_000, 11_250_000], help="of an update")
    parser.add_argument("--codec", type=Codec, nargs="+", default=[Codec.INT8, Codec.FLOAT32], help="of the updates")
    parser.add_argument("--updates", type=int, default=40, help="that wait at once (default 40)")
    parser.add_argument("--repetitions", type=int, default=5, help="of each side (default 5)")
    args = parser.parse_args()
    cases = itertools.product(args.numbers, args.codec)
    rows = [asyncio.run(measure(numbers, how, args.updates, args.repetitions)) for numbers, how in cases]
    show(rows)
    finish(args, rows)


if __name__ == "__main__":
    main()
