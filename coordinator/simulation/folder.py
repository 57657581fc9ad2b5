"""The folder of a run's results: a new one, so that nothing of an older run is taken for the new one's."""

from __future__ import annotations

import time
from pathlib import Path

from fedge.errors import ConfigError
from fedge.files import make_folder


def named_by_time(command: str) -> Path:
    """A folder here for the results of a command, where the user names none."""
    return Path(time.strftime(f"fedge-{command}-%Y%m%d-%H%M%S"))


def new_folder(out: Path | None, command: str) -> Path:
    """The folder, made; its parents, too. None: one that is named by the time.

    Raises:
        ConfigError: it holds something already.
        StoreError: it cannot be made.
    """
    folder = out or named_by_time(command)
    make_folder(folder)
    if any(folder.iterdir()):
        raise ConfigError(f"{folder} is not empty: choose a new folder with --out, or remove it")
    return folder
