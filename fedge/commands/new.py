"""`fedge new`: makes a small project of the user's own that runs at once."""

from __future__ import annotations

import io
import json
import keyword
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path
from string import Template
from typing import Final

import click
import numpy as np

from fedge.errors import ConfigError
from fedge.system.files import make_folder, write_atomically
from fedge.system.help import Command, json_option

FREQUENCIES: Final = (0.0, 2.0, 9.0)
"""Frequencies of the three kinds of windows, in turns per window."""
DEVICES: Final = 3
SAMPLES: Final = 120
"""Number of samples of each device."""


@click.command(cls=Command)
@click.argument("folder", type=click.Path(path_type=Path))
@json_option()
def new(folder: Path, *, as_json: bool) -> None:
    """Create a small project of your own: a task, its network, settings, a test and samples to begin with.

    FOLDER must be new; its name is that of the project: letters, digits and dashes. README.md in it has the commands.

    Examples:
      fedge new my-task
      fedge new ~/projects/press-states --json

    Exit codes: 0 done, 2 an impossible name, or a folder that is not empty, 4 a file cannot be written.
    """
    name = folder.absolute().name
    module = name.replace("-", "_")
    if not (name.isascii() and module.isidentifier()) or keyword.iskeyword(module):
        raise ConfigError(f"{name} cannot be a project: letters, digits and dashes, the first a letter, as in my-task")
    if find_spec(module) is not None:
        raise ConfigError(f"there is a module {module} already, which would be taken for it: use another name")
    make_folder(folder / "samples")
    if [*folder.iterdir()] != [folder / "samples"] or any((folder / "samples").iterdir()):
        raise ConfigError(f"{folder} is not empty: use another name, or remove it")
    words = {"name": name, "module": module, "class_name": "".join(part.title() for part in module.split("_"))}
    made = {}
    for template in ("task.py", "test_task.py", "settings.toml", "README.md"):
        text = files("fedge.commands").joinpath("project", f"{template}.txt").read_text(encoding="utf-8")
        made[folder / template.replace("task", module)] = Template(text).substitute(words).encode()
    made |= {folder / "samples" / file: content for file, content in make_samples().items()}
    for path, content in made.items():
        write_atomically(path, content)
    click.echo(json.dumps([*map(str, made)]) if as_json else f"made {folder}: README.md says how to run it")


def make_samples() -> dict[str, bytes]:
    """Generate windows (n, 3, 64) float32 of three classes, by file: one per device, and one of all."""
    rng = np.random.default_rng(0)
    y = rng.integers(0, len(FREQUENCIES), (DEVICES, SAMPLES))
    turns = np.array(FREQUENCIES)[y][:, :, np.newaxis, np.newaxis] * np.linspace(0, 1, 64)
    x = np.sin(2 * np.pi * (turns + rng.random((DEVICES, SAMPLES, 3, 1)))) + 0.5 * rng.standard_normal(
        (*y.shape, 3, 64)
    )
    shares = {f"dev{i + 1}": (x[i], y[i]) for i in range(DEVICES)} | {"all": (np.concatenate(x), np.concatenate(y))}
    return {f"{name}.npz": _encode_npz(own_x.astype(np.float32), own_y) for name, (own_x, own_y) in shares.items()}


def _encode_npz(x: np.ndarray, y: np.ndarray) -> bytes:
    buffer = io.BytesIO()
    np.savez(buffer, x=x, y=y)
    return buffer.getvalue()
