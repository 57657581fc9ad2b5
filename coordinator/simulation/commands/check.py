"""`fedge check`: finds problems with a task and a network before anything is started."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Final

import click
import msgspec
from msgspec import Meta, Struct

from coordinator.methods.catalogue import load_method_class
from coordinator.methods.options import method_options, parse_method, resolve_options
from coordinator.service import samples
from coordinator.service.checks import Examination, examine, explain_no_profile, make_samples, prepare_few, select_few
from coordinator.service.findings import Samples
from fedge.data.augmentation import Augment
from fedge.data.task import TaskSpec
from fedge.errors import ConfigError
from fedge.models.choice import with_network
from fedge.models.weights import Adapt, Allow, ModelName, TaskName, Weights
from fedge.settings import CODE, resolve, settings_options
from fedge.system.help import Command, json_option
from fedge.system.text import Heading, escape_controls
from fedge.tasks.problems import ProblemName

MANY: Final = 2000
"""Most images of a folder that are read; other data are read completely."""


class CheckSettings(Struct, frozen=True, kw_only=True):
    """Section [check] of the configuration."""

    task: TaskName
    data: Annotated[Path | None, Heading.TASK, "These are samples, as a simulation or a device would read them."] = None
    problem: ProblemName = None
    model: ModelName = None
    weights: Weights = None
    adapt: Adapt = None
    augment: Augment = None
    method: Annotated[
        str,
        CODE,
        Heading.METHOD,
        "The method is one of `fedge methods`; some ask more of a network than others.",
    ] = "fedge"
    ram_gb: Annotated[
        Annotated[float, Meta(gt=0)] | None,
        Heading.LOAD,
        "This much memory is free on your devices; by default usual boards are compared.",
    ] = None
    allow: Allow = ""


@click.command(cls=Command)
@settings_options(CheckSettings, "check")
@method_options
@click.argument("devices", nargs=-1, type=click.Path(path_type=Path))
@json_option()
def check(
    config: Path | None, options: tuple[str, ...], devices: tuple[Path, ...], as_json: bool, **flags: object
) -> int:
    """Find out what would not work with a task and a network, before anything is started.

    The command builds the network, asks it about a few samples, trains it on them and exports it as devices do. It says
    how much memory a device needs to train, and for each problem what to do. `simulate`, `compare` and `coordinator` do
    the same before they begin.

    With --data the command also reads and counts samples. DEVICES are further sources, each what one device would read;
    folders of images above the class folders count as devices. Without either, inputs are made up. Remarks are about a
    last softmax, devices with few samples, empty class folders and class names with a typo. A method of your own is run
    on four devices, over all that methods promise (docs/extending.md).

    Examples:
      fedge check --task my_task:MyTask --data samples/all.npz --model my_task:network
      fedge check --task engines.toml --data all.csv --method fedepc
      fedge check --task engines.toml cam1.csv cam2.csv cam3.csv
      fedge check --task image-folder --data photos --model resnet-18 --ram-gb 0.5
      fedge check --task digits --method my_methods.median:FedMedian

    Exit codes: 0 it works, perhaps with a remark, 2 wrong usage, or it would not work.
    """
    settings = resolve(CheckSettings, "check", config, flags)
    name, own = parse_method(settings.method)
    chosen = resolve_options(config, options) | own
    lacking = explain_no_profile(name, chosen)
    from coordinator.simulation.rehearsal import rehearse
    from fedge.models.build import make_initial_model
    from fedge.tasks import load_task

    task = load_task(settings.task, settings.data, problem=settings.problem, allow=settings.allow.split(","))
    task = with_network(task, settings.model, settings.weights, settings.adapt, settings.augment)
    task = task.with_head_class(load_method_class(name).HEAD_CLASS)

    def print_step(step: str) -> None:
        click.echo(step, err=True)

    if settings.data is not None or devices:
        print_step("read the samples")
    few, sizes, counts = _read_samples(settings, task, devices)
    layout, _ = make_initial_model(task, 0)
    examined = examine(task, layout, lacking, settings.ram_gb, few, print_step)
    learns = not any(finding.stops for finding in examined.findings)
    rehearsed = rehearse(name, chosen, task, layout, few or make_samples(task)) if learns else []
    folders = [path for path in (settings.data, *devices) if path is not None]
    remarks = (*rehearsed, *samples.find_oddities(counts, sizes), *samples.find_empty_folders(folders))
    examined = msgspec.structs.replace(examined, findings=examined.findings + remarks)
    if as_json:
        click.echo(msgspec.json.encode(msgspec.structs.asdict(examined) | {"samples": counts}).decode())
    else:
        click.echo("\n".join(map(escape_controls, _format_examination(task, examined, sizes, counts))))
    return ConfigError.exit_code if any(finding.stops for finding in examined.findings) else 0


def _read_samples(
    settings: CheckSettings, task: TaskSpec, devices: tuple[Path, ...]
) -> tuple[Samples | None, dict[str, int], samples.Counts]:
    """Read the samples; return a few, the number of samples by device, and the numbers by device and class.

    Raises:
        ConfigError: the samples cannot be read, or do not fit the task.
    """
    from fedge.tasks import load_pool, read_device_data

    if settings.data is not None and settings.task.endswith(".json"):
        devices = devices or (settings.data,)
    if devices:
        each = {str(at): read_device_data(task, at, seed=0).labelled for at in devices}
        counts = {at: samples.count_by_class(task, y) for at, (_, y) in each.items()}
        return select_few(each.values()), {at: len(y) for at, (_, y) in each.items()}, counts
    if settings.data is None and settings.task != "digits":
        return None, {}, {}
    of_images = settings.task == "image-folder"
    limit = MANY if of_images else None
    read = load_pool(settings.task, settings.data, problem=settings.problem, limit=limit)
    in_all = {"": samples.count_by_class(task, read.y)}
    if of_images and settings.data is not None and task.problem.FOLDER == "classes":
        in_all = samples.count_in_folder(settings.data)
        return prepare_few(read, task), {device: sum(each.values()) for device, each in in_all.items()}, in_all
    return prepare_few(read, task), {"": len(read.y)}, in_all


def _format_examination(
    task: TaskSpec, examined: Examination, sizes: dict[str, int], counts: samples.Counts
) -> Iterator[str]:
    what = f"{task.n_classes} classes" if task.n_classes else task.problem.describe_outputs()
    yield f"task      {task.name}, inputs {task.input_shape}, {what}"
    yield f"network   {task.model}, {examined.parameters:,} trained weights, {examined.size_bytes / 1e6:.2f} MB whole"
    yield f"memory    about {examined.ram_gb:.2f} GB on a device that trains"
    yield f"samples   {sum(sizes.values()) or 'none'} read"
    yield from (f"          {line}" for line in samples.format_counts(counts, sizes))
    for finding in examined.findings:
        yield f"{'WRONG' if finding.stops else 'remark'}    {finding.what}"
        yield f"          {finding.do}"
