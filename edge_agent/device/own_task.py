"""The device's task: the one that it was started with, and the classes that have joined the federation since.

HOME/classes.json names these, so that a device that starts while the broker is away has them, too.
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Final

import msgspec

from fedge.data.classes import AddedClasses, find_grown_task
from fedge.data.task import TaskSpec, list_differences
from fedge.errors import MALFORMED, ConfigError, raise_as
from fedge.system.files import write_atomically

FILE: Final = "classes.json"
UNNAMED: Final = "the task is another one"


def read_own_task(given: TaskSpec, home: Path) -> TaskSpec:
    """Return the task with which a device works that was started with the task `given`.

    Raises:
        ConfigError: HOME/classes.json cannot be read.
    """
    file = home / FILE
    if not file.exists():
        return given
    text = f"{file} cannot be read; delete it, and the coordinator tells its content again"
    with raise_as(ConfigError, text, on=(OSError, *MALFORMED)):
        added = msgspec.json.decode(file.read_bytes(), type=AddedClasses)
    return find_grown_task(given, added) or given


def adopt_classes(given: TaskSpec, home: Path, added: AddedClasses) -> bool:
    """Take up the classes of the federation's task, durably; return whether the device's task is that one now.

    Raises:
        StoreError: they cannot be written.
    """
    if find_grown_task(given, added) is None:
        return False
    write_atomically(home / FILE, msgspec.json.format(msgspec.json.encode(added)))
    return True


def explain_other_task(own: TaskSpec, described: bytes) -> str:
    """Say in words what differs between a device's task and its federation's, which `described` is in JSON."""
    with suppress(*MALFORMED):
        differences = list_differences(msgspec.json.decode(described, type=TaskSpec), own)
        return "; ".join(f"the task is one {text}" if i == 0 else text for i, text in enumerate(differences)) or UNNAMED
    return UNNAMED
