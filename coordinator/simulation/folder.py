"""The folder of a run's results, always new, so that old results are never mistaken for new ones."""

from __future__ import annotations

import time
from pathlib import Path

from fedge.errors import ConfigError
from fedge.files import make_folder


def named_by_time(command: str) -> Path:
    """A folder here for a command's results if the user names none."""
    return Path(time.strftime(f"fedge-{command}-%Y%m%d-%H%M%S"))


def new_folder(out: Path | None, command: str) -> Path:
    """Create the folder and its parents. None: one named by the time.

    Raises:
        ConfigError: it is not empty.
        StoreError: it cannot be made.
    """
    folder = out or named_by_time(command)
    make_folder(folder)
    if any(folder.iterdir()):
        raise ConfigError(f"{folder} is not empty: choose a new folder with --out, or remove it")
    return folder
