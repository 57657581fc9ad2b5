"""RUN/run.json describes a run beside its figures: command, settings, versions, seed and commit."""

from __future__ import annotations

import platform
import subprocess
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Final, Literal

import msgspec
from msgspec import Struct

import fedge
from coordinator.methods.settings import Option
from fedge.errors import MALFORMED, ConfigError
from fedge.settings import Secret
from fedge.system.files import make_folder, write_atomically

FILE: Final = "run.json"
PACKAGES: Final = ("numpy", "torch", "torchvision", "onnx", "onnxscript", "onnxruntime", "scikit-learn", "msgspec")

RESTARTS: Final = 100

Command = Literal["simulate", "compare", "demo", "coordinator"]


class Start(Struct, frozen=True, kw_only=True):
    """The start of a run. `settings`: resolved, with secrets masked. `commit`: of the folder in which the run began."""

    began: str
    settings: dict[str, Any]
    options: dict[str, Option]
    versions: dict[str, str]
    commit: str | None


class Run(Start, frozen=True, kw_only=True):
    """A run, with its first start. `restarts`: a coordinator's last `RESTARTS` restarts, the oldest first."""

    command: Command
    seed: int | None
    restarts: tuple[Start, ...] = ()


def record_run(folder: Path, command: Command, settings: Struct, options: Mapping[str, Option] | None = None) -> None:
    """Write RUN/run.json; if a coordinator was started before, add this start to its file.

    Raises:
        ConfigError: the record of the first start cannot be read.
        StoreError: the file cannot be written.
    """
    given = {
        name: "***" if isinstance(value, Secret) else value for name, value in msgspec.structs.asdict(settings).items()
    }
    now = Start(
        began=datetime.now(UTC).isoformat(timespec="seconds"),
        settings=msgspec.to_builtins(given, enc_hook=str),
        options=dict(options or {}),
        versions=list_versions(),
        commit=find_commit(),
    )
    if command == "coordinator" and (folder / FILE).exists():
        run = read_run(folder)
        run = msgspec.structs.replace(run, restarts=(*run.restarts, now)[-RESTARTS:])
    else:
        run = Run(command=command, seed=getattr(settings, "seed", None), **msgspec.structs.asdict(now))
    write_atomically(folder / FILE, msgspec.json.format(msgspec.json.encode(run), indent=1))


@contextmanager
def record_accepted_run(
    folder: Path | None, command: Command, settings: Struct, options: Mapping[str, Option] | None = None
) -> Iterator[None]:
    """Record a run in its folder, if it has one; a refused run leaves no record. Raise as `record_run` does."""
    if folder is not None:
        record_run(folder, command, settings, options)
    try:
        yield
    except ConfigError:
        if folder is not None:
            (folder / FILE).unlink(missing_ok=True)
        raise


def read_run(folder: Path) -> Run:
    """Read the description of a run.

    Raises:
        ConfigError: the folder is not that of a run, or is older than run.json.
    """
    try:
        return msgspec.json.decode((folder / FILE).read_bytes(), type=Run)
    except FileNotFoundError as error:
        raise ConfigError(
            f"{folder} has no {FILE}: name the folder of a simulation, a comparison, a demo or a coordinator"
        ) from error
    except (OSError, *MALFORMED) as error:
        raise ConfigError(f"{folder / FILE} cannot be read: {error}") from error


def list_versions() -> dict[str, str]:
    """List the versions of fedge, Python and the packages on which figures depend, if installed."""
    found = {"fedge": fedge.__version__, "python": platform.python_version(), "system": platform.platform()}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def find_commit() -> str | None:
    """Find the commit of the working folder, with "-dirty" if files differ; None without repository or git."""
    words = ["git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        said = subprocess.run(words, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return said.stdout.strip() or None


def name_by_time(command: str) -> Path:
    """Name a folder here for a command's results if the user names none."""
    return Path(time.strftime(f"fedge-{command}-%Y%m%d-%H%M%S"))


def make_new_folder(out: Path | None, command: str) -> Path:
    """Make the folder of a run's results, always new, so that old results are never mistaken for new ones.

    `out`: the folder; named by the time if None.

    Raises:
        ConfigError: the folder is not empty.
        StoreError: the folder cannot be made.
    """
    folder = out or name_by_time(command)
    make_folder(folder)
    if any(folder.iterdir()):
        raise ConfigError(f"{folder} is not empty: choose a new folder with --out, or remove it")
    return folder
