"""`fedge check`: finds problems with a task and a network before anything is started."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Final

import click
import msgspec
from msgspec import Meta, Struct

from coordinator.checks import Examined, Finding, classes_without_samples, examine, without_profile
from coordinator.options import method_and_options, method_options, resolve_options
from fedge.config import resolve, settings_options
from fedge.errors import ConfigError
from fedge.task import TaskSpec
from fedge.weights import Adapt, ModelName, Weights, with_network

MANY: Final = 2000
"""Images of a folder that are read; of other data all."""


class CheckSettings(Struct, frozen=True, kw_only=True):
    """Section [check] of the configuration."""

    task: Annotated[str, Meta(description="As of `fedge simulate` and `fedge coordinator`; also a .json.")]
    data: Annotated[Path | None, Meta(description="Samples, as a simulation or a device would read them.")] = None
    model: ModelName = None
    weights: Weights = None
    adapt: Adapt = None
    method: Annotated[str, Meta(description="Some methods ask more of a network than others.")] = "fedge"
    allow: Annotated[str, Meta(description="Code that a .json may name, with commas: package.module:name.")] = ""


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@settings_options(CheckSettings, "check")
@method_options
@click.option("--json", "as_json", is_flag=True, help="All that was found, as JSON.")
def check(config: Path | None, options: tuple[str, ...], as_json: bool, **flags: object) -> int:
    """Tell what would not work with a task and a network, before anything is started.

    Builds the network, gives it inputs of the task's shape, exports it as devices do, and says how much memory a device
    needs to train it. With --data it reads the samples, too. `simulate` and `coordinator` do the same before they
    begin.

    \b
    Examples:
      fedge check --task image-folder --data photos
      fedge check --task my_task:MyTask --data samples/all.npz --model my_task:network
      fedge check --task engines.toml --data all.csv --method fedepc
      fedge check --task image-folder --data photos --model resnet-18 --json

    \b
    Exit codes: 0 it works, perhaps with a remark, 2 wrong usage, or it would not work.
    """  # noqa: D301 - click wants the backspace character itself
    settings = resolve(CheckSettings, "check", config, flags)
    name, own = method_and_options(settings.method)
    lacking = without_profile(name, resolve_options(config, options) | own)
    from fedge.models import initial
    from fedge.tasks import task_spec

    task = task_spec(settings.task, settings.data, allow=settings.allow.split(","))
    task = with_network(task, settings.model, settings.weights, settings.adapt)
    layout, _ = initial(task, 0)
    examined = examine(task, layout, lacking)
    n_samples, missing = _samples(settings, task)
    examined = msgspec.structs.replace(examined, findings=(*examined.findings, *missing))
    click.echo(msgspec.json.encode(examined).decode() if as_json else "\n".join(_lines(task, examined, n_samples)))
    return ConfigError.exit_code if any(finding.stops for finding in examined.findings) else 0


def _samples(settings: CheckSettings, task: TaskSpec) -> tuple[int, list[Finding]]:
    """The number of samples, and what is wrong with them.

    Raises:
        ConfigError: they cannot be read, or do not fit the task.
    """
    from fedge.preprocess import apply
    from fedge.tasks import device_data, pool

    if settings.data is None and settings.task != "digits":
        return 0, []
    if settings.task.endswith(".json"):
        assert settings.data is not None
        _, y = device_data(task, settings.data, seed=0).labelled
        return len(y), classes_without_samples(task, y)
    few = MANY if settings.task == "image-folder" else None
    samples = pool(settings.task, settings.data, limit=few)
    apply(task, samples.x[:1])
    return len(samples.y), [] if few else classes_without_samples(task, samples.y)


def _lines(task: TaskSpec, examined: Examined, n_samples: int) -> Iterator[str]:
    yield f"task      {task.name}, inputs {task.input_shape}, {task.n_classes} classes"
    yield f"network   {task.model}, {examined.parameters:,} trained weights, {examined.size_bytes / 1e6:.2f} MB whole"
    yield f"memory    about {examined.ram_gb:.2f} GB on a device that trains"
    yield f"samples   {n_samples or 'none'} read"
    for finding in examined.findings:
        yield f"{'WRONG' if finding.stops else 'remark'}    {finding.what}"
        yield f"          {finding.do}"
