"""Durable files on a device, by run, name and round."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING

from fedge.errors import DamagedError, raise_as
from fedge.system.files import write_atomically

if TYPE_CHECKING:
    pass


class Files:
    """Durable files of one federation and method, by name and round.

    HOME/kept/{run}/{name}/{round}

    An order of a round may read files of earlier rounds and writes its own. A file that was read stays until a later
    round, so an order repeated after a kill -9 finds the same files and gives the same bytes. Runs never mix, because
    the first file of a new run deletes the files of older runs.
    """

    def __init__(self, home: Path, run: str, round_number: int) -> None:
        self._folder = home / "kept" / run
        self._round = round_number

    def read(self, name: str, *, before: int | None = None) -> bytes | None:
        """Return the newest file of that name up to this round, or before round `before`, or None.

        Raises:
            StoreError: it cannot be read.
        """
        limit = self._round if before is None else before - 1
        return read_newest(self._folder / name, limit)

    def write(self, name: str, data: bytes) -> None:
        """Write this round's file durably, then delete what no order will read any more.

        Raises:
            StoreError: the disk is full or broken.
        """
        folder = self._folder / name
        write_atomically(folder / str(self._round), data)
        for torn in folder.glob(".tmp-*"):  # left by a write that kill -9 interrupted
            torn.unlink(missing_ok=True)
        earlier = sorted(number for number in list_numbers(folder) if number < self._round)
        for number in earlier[:-1]:
            (folder / str(number)).unlink(missing_ok=True)
        for run in set(self._folder.parent.glob("*/")) - {self._folder}:
            shutil.rmtree(run, ignore_errors=True)


def read_newest(folder: Path, limit: int | None = None) -> bytes | None:
    """Read the file of the highest round in a folder, up to a limit, or return None.

    Raises:
        StoreError: it cannot be read.
    """
    rounds = [number for number in list_numbers(folder) if limit is None or number <= limit]
    if not rounds:
        return None
    with raise_as(DamagedError, f"{folder / str(max(rounds))} cannot be read"):
        return (folder / str(max(rounds))).read_bytes()


def list_numbers(folder: Path) -> list[int]:
    """Return the numbers that are names of a folder's entries."""
    return [int(path.name) for path in folder.glob("*") if path.name.isdecimal()]
