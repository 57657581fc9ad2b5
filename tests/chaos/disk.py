"""A small disk of its own for a program's folder, that can be full or read-only. Needs root, and the right to mount."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Final

MEGABYTES: Final = 24


def mount(folder: Path) -> bool:
    """Put an empty disk at this folder; False where that is not allowed."""
    folder.mkdir(parents=True, exist_ok=True)
    options = ("-t", "tmpfs", "-o", f"size={MEGABYTES}m", "fedge-chaos", str(folder))
    return _done("mount", *options)


def unmount(folder: Path) -> None:
    """Take it away, with all that is on it."""
    _done("umount", "--lazy", str(folder))


@contextlib.contextmanager
def full(folder: Path) -> Iterator[None]:
    """Within it not a byte more can be written."""
    ballast = folder / "ballast"
    with contextlib.suppress(OSError), ballast.open("wb", buffering=0) as file:
        while file.write(bytes(1 << 16)):
            pass
    try:
        yield
    finally:
        ballast.unlink(missing_ok=True)


@contextlib.contextmanager
def read_only(folder: Path) -> Iterator[bool]:
    """Within it nothing can be written; False where somebody has a file open for writing, and nothing was done."""
    done = _done("mount", "-o", "remount,ro", str(folder))
    try:
        yield done
    finally:
        if done:
            _done("mount", "-o", "remount,rw", str(folder))


def _done(*command: str) -> bool:
    try:
        return subprocess.run(command, capture_output=True, check=False).returncode == 0
    except OSError:
        return False
