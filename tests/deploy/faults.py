"""Faults that no test can bring about by itself; here, since a device that predicts has these tests alone."""

from __future__ import annotations

import contextlib
import os
import resource
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest


@contextlib.contextmanager
def no_room() -> Iterator[None]:
    """No file of this process takes another byte, as on a full disk; folders take further names."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


class Forced:
    """What is forced to the disk: the inodes, in order. `before`: called each time, for example to take long."""

    def __init__(self) -> None:
        self.inodes: list[int] = []
        self.before: Callable[[], object] = lambda: None

    def has(self, *paths: Path) -> bool:
        return {path.stat().st_ino for path in paths} <= {*self.inodes}


@pytest.fixture
def forced(monkeypatch: pytest.MonkeyPatch) -> Forced:
    record, fsync = Forced(), os.fsync

    def noted(handle: int) -> None:
        record.before()
        record.inodes.append(os.fstat(handle).st_ino)
        fsync(handle)

    monkeypatch.setattr(os, "fsync", noted)
    return record


@pytest.fixture
def free_disk(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A disk on which `bytes` are free, at most as many as really are."""
    disk, real = SimpleNamespace(bytes=1 << 60), shutil.disk_usage

    def usage(path: str | Path) -> SimpleNamespace:
        true = real(path)
        return SimpleNamespace(total=true.total, used=true.used, free=min(true.free, disk.bytes))

    monkeypatch.setattr(shutil, "disk_usage", usage)
    return disk


@pytest.fixture
def not_installed(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Called with a package, and with our modules that import it: it is not here, and they have not been imported."""

    def missing(package: str, *importers: str) -> None:
        for name in [name for name in sys.modules if name.startswith(f"{package}.") or name in importers]:
            monkeypatch.delitem(sys.modules, name)
        monkeypatch.setitem(sys.modules, package, None)

    return missing


@pytest.fixture
def python_at(monkeypatch: pytest.MonkeyPatch) -> Callable[[Path], None]:
    """Called with the program that is to be this Python, as child processes are started."""
    return lambda path: monkeypatch.setattr("sys.executable", str(path))
