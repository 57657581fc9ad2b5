"""Run federations and devices in bad weather, and read their books afterwards: python -m tests.chaos --minutes 60

The seed decides what is done to them; when exactly it hits them no two runs have in common. A fault that is found is
printed with the folder that holds everything of it, and ends the run with code 1.
"""

from __future__ import annotations

import asyncio
import os
import random
import shutil
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = os.environ["OPENBLAS_NUM_THREADS"] = "1"

import click

from fedge.commands.broker import find_mosquitto
from tests.chaos.programs import preload
from tests.chaos.rounds import Weather
from tests.support.faketime import FAKETIME


@click.command()
@click.option("--minutes", default=60.0, show_default=True, help="No federation is begun after that.")
@click.option("--seed", default=1, show_default=True)
@click.option("--rounds", default=40, show_default=True, help="Of each federation.")
@click.option("--every-s", default=0.4, show_default=True, help="Mean time between two faults.")
def main(minutes: float, seed: int, rounds: int, every_s: float) -> None:
    """Kill, stop, cut, fill and repeat, for so many minutes."""
    sys.exit(asyncio.run(_run(minutes, seed, rounds, every_s)))


async def _run(minutes: float, seed: int, rounds: int, every_s: float) -> int:
    preload()
    if FAKETIME is None:
        click.echo("libfaketime is not installed (Debian: apt install faketime): clocks jump in Python alone")
    total: Counter[str] = Counter()
    began, rng = time.monotonic(), random.Random(seed)
    while time.monotonic() - began < 60 * minutes:
        folder = Path(tempfile.mkdtemp(prefix="fedge-chaos-"))
        rough, signed = rng.random() < 0.25, rng.random() < 0.33 and find_mosquitto() is not None
        weather = Weather(folder, rng, rounds=rounds, rough=rough, signed=signed, every_s=every_s)
        at = time.monotonic()
        await weather.run()
        total += weather.n
        click.echo(f"{weather}: {time.monotonic() - at:.0f} s, {dict(weather.n)}")
        if weather.wrong:
            click.echo("\n".join([f"FOUND in {folder}:", *weather.wrong]), err=True)
            return 1
        shutil.rmtree(folder, ignore_errors=True)
    click.echo(f"{(time.monotonic() - began) / 60:.1f} minutes without a loss: {dict(total.most_common())}")
    return 0


if __name__ == "__main__":
    main()
