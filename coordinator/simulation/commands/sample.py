"""`fedge sample`: samples of a task as files, to try the other commands with."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import click
import numpy as np

from coordinator.simulation.settings import SampleSettings
from coordinator.watch.runs import make_new_folder
from fedge.errors import StoreError, raise_as
from fedge.settings import resolve, settings_options
from fedge.system.help import Command, json_option
from fedge.tasks import partition_pool, write_share, write_task
from fedge.tasks.partition import load_samples
from fedge.tasks.shares import check_partitioning


@click.command(cls=Command)
@settings_options(SampleSettings, "sample")
@json_option()
def sample(config: Path | None, as_json: bool, **flags: object) -> None:
    """Write samples of a task as the data of devices, to try the other commands with.

    OUT/cam1.npz is what an agent takes as --data. OUT/cam1-test.npz holds unseen samples of the same device, for `fedge
    infer`. OUT/task.json describes the task.

    Examples:
      fedge sample
      fedge sample --task digits --devices 2 --partition groups --n-groups 2 --out samples
      fedge sample --task mnist --data ~/mnist --samples 4000 --alpha 0.3

    Exit codes: 0 done, 2 wrong usage, no such data, OUT is not empty, 4 a file cannot be written.
    """
    settings = resolve(SampleSettings, "sample", config, flags)
    check_partitioning(settings)
    samples, _ = load_samples(settings, settings.seed, 0.0)
    shares = partition_pool(samples, settings.devices, settings, seed=settings.seed)
    folder = make_new_folder(settings.out, "sample")
    with raise_as(StoreError, f"cannot write into {folder}"):
        write_task(samples.spec, folder / "task.json")
        files = []
        for number, share in enumerate(shares, 1):
            known = dataclasses.replace(share, x_test=share.x_test[:0], y_test=share.y_test[:0])
            files.append(folder / f"cam{number}.npz")
            write_share(known, files[-1])
            np.savez(folder / f"cam{number}-test.npz", x=share.x_test, y=share.y_test)
    if as_json:
        click.echo(json.dumps([str(file) for file in files]))
        return
    for file, share in zip(files, shares, strict=True):
        held = f"{len(share.y_train)} to train on, {len(share.y_val)} for validation"
        click.echo(f"{file}: {held}; {len(share.y_test)} for testing in {file.stem}-test.npz")
