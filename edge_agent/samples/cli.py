"""`fedge samples` and `fedge collect`: what a device's store of samples holds, and what comes into it."""

from __future__ import annotations

import io
import json
import logging
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
import msgspec
import numpy as np

from edge_agent.samples.collecting import Collected, add_arriving, collect_samples
from edge_agent.samples.reading import find_class, list_images, read_image, read_rows
from edge_agent.samples.store import Sample, SampleStore
from fedge.data.task import TEST, TRAIN, VALIDATION, TaskSpec
from fedge.errors import ConfigError
from fedge.system.files import write_atomically
from fedge.system.help import Command, CommandGroup, json_lines_option, json_option, last_option, option
from fedge.system.text import Heading, escape_controls, format_time

log = logging.getLogger("fedge.agent")

MAX_TOLD = 64
"""Most numbers of a target that JSON has; of a larger one, such as a mask, it has a description."""
PLACES = {TRAIN: "training", VALIDATION: "validation", TEST: "test"}
_json = json_option()
_home = click.argument("home", type=click.Path(path_type=Path))
_numbers = click.argument("numbers", nargs=-1, metavar="NUMBER...", type=click.IntRange(1))


def open_store(home: Path) -> SampleStore:
    """Open the store of a device's home.

    Raises:
        ConfigError: there is no such home, or the owner's rules are wrong.
        StoreError: the store cannot be read.
    """
    if not home.is_dir():
        raise ConfigError(f"there is no {home}: name the folder that `fedge agent` or `fedge serve` has as --home")
    return SampleStore(home)


@click.group(cls=CommandGroup)
def samples() -> None:
    """Show, mark, export, delete and add the samples that a device has gathered.

    HOME is the folder of `fedge agent` and `fedge serve`. Its file samples.toml has the owner's rules: how much is
    kept, and what is sensitive (docs/samples.md).

    Examples:
      fedge samples list cam1
      fedge samples delete cam1 17 18

    Exit codes: 2 no such HOME or sample, 4 the store cannot be read or written.
    """


@samples.command(name="list")
@_home
@option("--class", "name", heading=Heading.SELECTION, help="The command lists samples of this class.")
@option("--unlabelled", is_flag=True, heading=Heading.SELECTION, help="The command lists inputs without a label.")
@last_option(20)
@_json
def list_(home: Path, name: str | None, *, unlabelled: bool, last: int, as_json: bool) -> None:
    """List the newest samples with their targets, and how many there are of each class.

    Examples:
      fedge samples list cam1
      fedge samples list cam1 --class cat --last 100 --json

    Exit codes: 2 no such HOME or class, 4 the store cannot be read.
    """
    with open_store(home) as store:
        label = None if name is None else find_class(store.require_task(), name)
        found = store.list_samples(label=label, labelled=False if unlabelled else None, limit=last)
        totals = store.count_samples()
        if as_json:
            told = {"totals": totals, "samples": [make_record(store, one) for one in found], "arrived": store.n_arrived}
            click.echo(msgspec.json.encode(told | {"version": store.data_version}).decode())
            return
        for sample in reversed(found):
            click.echo(describe_sample(store, sample))
        for total in totals:
            marked = ", sensitive" if total.sensitive else ""
            click.echo(f"{get_name(store.task, total.label)}{marked}: {total.n} samples, {total.size / 1e6:.1f} MB")
        click.echo(f"{store.n_arrived} samples came that are not sensitive; data version {store.data_version}")


@samples.command()
@_home
@click.argument("number", type=click.IntRange(1))
@option("--image", heading=Heading.OUTPUT, type=click.Path(path_type=Path), help="The picture goes into this PNG file.")
@_json
def show(home: Path, number: int, image: Path | None, *, as_json: bool) -> None:
    """Show one sample.

    Examples:
      fedge samples show cam1 17 --image 17.png

    Exit codes: 2 no such HOME or sample, or it is no picture, 4 the store cannot be read.
    """
    with open_store(home) as store:
        sample, x = store.read_sample(number), store.read_input(number)
        if image is not None:
            write_atomically(image, encode_picture(store.require_task(), x))
        facts = {"shape": x.shape, "min": float(x.min()), "mean": float(x.mean()), "max": float(x.max())}
        if as_json:
            click.echo(json.dumps(msgspec.to_builtins(make_record(store, sample)) | facts))
        else:
            click.echo(describe_sample(store, sample))
            click.echo(", ".join(f"{name} {value}" for name, value in facts.items()))


@samples.command()
@_home
@_numbers
@option("--not-sensitive", is_flag=True, heading=Heading.PRIVACY, help="The marks are taken away.")
@option(
    "--rules", is_flag=True, heading=Heading.PRIVACY, help="All samples that samples.toml calls sensitive are marked."
)
@_json
def mark(home: Path, numbers: tuple[int, ...], *, not_sensitive: bool, rules: bool, as_json: bool) -> None:
    """Mark samples as sensitive: from the next order on, nothing that leaves the device learns from them.

    Examples:
      fedge samples mark cam1 17 18
      fedge samples mark cam1 --rules

    Exit codes: 2 no such HOME, or neither a sample nor --rules, 4 the store cannot be written.
    """
    if not numbers and not rules:
        raise ConfigError("name the samples, or give --rules")
    with open_store(home) as store:
        n = store.mark(numbers, sensitive=not not_sensitive) + (store.apply_rules() if rules else 0)
    _print({"changed": n}, f"{n} samples changed", as_json=as_json)


@samples.command()
@_home
@_numbers
@option("--class", "name", heading=Heading.SELECTION, help="The command deletes all samples of this class.")
@option("--origin", heading=Heading.SELECTION, help="The command deletes all samples whose origin begins so.")
@_json
def delete(home: Path, numbers: tuple[int, ...], name: str | None, origin: str | None, *, as_json: bool) -> None:
    """Delete samples for good: they train nothing from the next order on, and do not come back.

    Equal samples in the agent's --data do not count any more either. Models that learned from them stay as they are
    until they learn again.

    Examples:
      fedge samples delete cam1 17 18
      fedge samples delete cam1 --origin folder:porch

    Exit codes: 2 no such HOME or class, or nothing is named, 4 the store cannot be written.
    """
    if not numbers and name is None and origin is None:
        raise ConfigError("name the samples, a --class or an --origin")
    with open_store(home) as store:
        chosen = list(numbers)
        if name is not None or origin is not None:
            label = None if name is None else find_class(store.require_task(), name)
            every = store.list_samples(label=label, limit=-1)
            chosen += [sample.number for sample in every if sample.origin.startswith(origin or "")]
        n = store.delete(chosen)
    _print({"deleted": n}, f"{n} samples deleted", as_json=as_json)


@samples.command()
@_home
@click.argument("file", type=click.Path(path_type=Path))
@option(
    "--with-sensitive", is_flag=True, heading=Heading.PRIVACY, help="Sensitive samples are exported, too, with marks."
)
@_json
def export(home: Path, file: Path, *, with_sensitive: bool, as_json: bool) -> None:
    """Write the labelled samples into an .npz file, which can be the --data of an agent.

    Examples:
      fedge samples export cam1 cam1.npz

    Exit codes: 2 no such HOME, or it has no samples, 4 the file cannot be written.
    """
    with open_store(home) as store:
        found, task = store.read_labelled(), store.task
    kept = np.ones(len(found.y), np.bool_) if with_sensitive else ~found.sensitive
    if task is None or not kept.any():
        raise ConfigError(f"{home} has no labelled samples to export")
    buffer = io.BytesIO()
    y, names = task.problem.restore_targets(found.y[kept]), {"classes": np.array(task.classes)} if task.classes else {}
    arrays = {"x": found.x[kept], "y": y, "split": found.place[kept], "sensitive": found.sensitive[kept]}
    np.savez(buffer, **names, **arrays)  # type: ignore[arg-type]  # allow_pickle is not an array
    write_atomically(file, buffer.getvalue())
    _print({"exported": int(kept.sum()), "file": str(file)}, f"{kept.sum()} samples in {file}", as_json=as_json)


@samples.command()
@_home
@click.argument("sources", nargs=-1, required=True, metavar="SOURCE...", type=click.Path(path_type=Path))
@option(
    "--class", "name", heading=Heading.TASK, help="The samples have this class, if the source does not say another."
)
@option("--sensitive", is_flag=True, heading=Heading.PRIVACY, help="The samples are sensitive.")
@_json
def add(home: Path, sources: tuple[Path, ...], name: str | None, *, sensitive: bool, as_json: bool) -> None:
    """Add samples: pictures, folders of pictures in one folder per class, .npz, .csv or .parquet.

    Examples:
      fedge samples add cam1 new-photos
      fedge samples add cam1 photo.png --class cat --sensitive

    Exit codes: 2 no such HOME, or a source that cannot be read, 4 the store cannot be written.
    """
    found = Collected()
    with open_store(home) as store:
        task = store.require_task()
        label = None if name is None else find_class(task, name)
        for source in sources:
            if source.is_dir():
                names, marked = list_images(source)
                rows = (
                    read_image(task, source, each, label=label, marked=sensitive or each in marked) for each in names
                )
            elif source.suffix.lower() in {".png", ".jpg", ".jpeg"}:
                rows = (read_image(task, source.parent, source.name, label=label, marked=sensitive) for _ in "1")
            else:
                own = read_rows(task, source, label=label)
                rows = (replace(row, sensitive=row.sensitive or sensitive) for row in own)
            add_arriving(store, rows, found)
    _print({"added": found.n_added}, f"{found.n_added} samples are new", as_json=as_json)


@click.command(cls=Command)
@_home
@click.argument("sources", nargs=-1, required=True, metavar="SOURCE...", type=click.Path(path_type=Path))
@option("--once", is_flag=True, heading=Heading.RUNS, help="The command looks once and ends.")
@option("--every", heading=Heading.RUNS, type=click.FloatRange(0.1), default=5.0, show_default=True,
        help="The command looks in these intervals, in seconds.")  # fmt: skip
@json_lines_option("look that brought something")
def collect(home: Path, sources: tuple[Path, ...], *, once: bool, every: float, as_json: bool) -> None:
    """Watch folders and files, and take what is new in them into the device's store, until Ctrl-C or SIGTERM.

    SOURCE is a folder with a folder of pictures per class, or an .npz, .csv or .parquet to which rows are appended.
    Pictures that lie in no class's folder have no label; they are kept only if samples.toml says so. A list
    sensitive.txt in the folder marks pictures.

    Examples:
      fedge collect cam1 /var/camera
      fedge collect cam1 rows.csv --once --json

    Exit codes: 2 no such HOME or SOURCE, 4 the store cannot be written, 130 stopped.
    """
    known: dict[str, str] = {}
    with open_store(home) as store:
        while True:
            for source in sources:
                found = collect_samples(store, source)
                for name in [name for name, reason in found.problems.items() if known.get(name) != reason]:
                    log.warning("event=not_collected file=%s reason=%r", name, found.problems[name])
                known |= found.problems
                if found.n_added or once:
                    text = f"{source}: {found.n_added} samples are new"
                    _print({"source": str(source), "added": found.n_added}, text, as_json=as_json)
            if once:
                return
            time.sleep(every)


def get_name(task: TaskSpec | None, label: int | None) -> str:
    """Return the name of a class or group in words."""
    if label is None or task is None:
        return "without a label" if label is None else str(label)
    names = task.problem.name_groups()
    return names[label] if names else "with a target"


def describe_sample(store: SampleStore, sample: Sample) -> str:
    """Describe a sample in one line."""
    marked = ", sensitive" if sample.sensitive else ""
    name, place = get_name(store.task, sample.label), PLACES[sample.place]
    if store.task is not None and (target := store.read_target(sample.number)) is not None:
        name = store.task.problem.describe_target(target)
    what = f"{name}, {place}{marked}, from {sample.origin}, {sample.size} bytes"
    return escape_controls(f"{sample.number:>8}  {format_time(sample.at)}  {what}")


def make_record(store: SampleStore, sample: Sample) -> Any:
    """Return what is known of a sample as JSON has it, with a target that is more than its class or group."""
    task = store.task
    if task is None or task.problem.GROUPED or (target := store.read_target(sample.number)) is None:
        return sample
    own = task.problem.restore_targets(target)
    told = own.tolist() if own.size <= MAX_TOLD else task.problem.describe_target(target)
    return msgspec.to_builtins(sample) | {"target": told}


def encode_picture(task: TaskSpec, x: np.ndarray[Any, Any]) -> bytes:
    """Return a picture as a PNG file.

    Raises:
        ConfigError: the task has no pictures.
    """
    from PIL import Image

    if task.preprocessing.image_mode is None and (x.ndim != 3 or x.shape[0] not in {1, 3}):
        raise ConfigError(f"the samples of task {task.name} are no pictures")
    low, high = float(x.min()), float(x.max())
    pixels = x if x.dtype == np.uint8 else (255 * (x - low) / ((high - low) or 1.0)).astype(np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(pixels[0] if len(pixels) == 1 else np.moveaxis(pixels, 0, -1)).save(buffer, "PNG")
    return buffer.getvalue()


def _print(told: dict[str, object], text: str, *, as_json: bool) -> None:
    click.echo(json.dumps(told) if as_json else text)
