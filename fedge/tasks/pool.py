"""Loading of all samples of a task, for the demo and the simulation. Nothing is ever downloaded."""

from __future__ import annotations

import gzip
import math
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from fedge.data import folders, images, tables
from fedge.data.npz import INPUT_BYTES, require_room
from fedge.data.task import Preprocessing, TaskSpec
from fedge.errors import ConfigError, raise_as
from fedge.system.loading import load_object
from fedge.tasks import arrays, har, speech
from fedge.tasks.device import read_device_data
from fedge.tasks.problems import require_problem
from fedge.tasks.specs import load_task

_IDX_FOLDERS: Final = {"mnist": ("mnist", "MNIST/raw"), "fashion-mnist": ("fashion-mnist", "FashionMNIST/raw")}
_READERS: Final[dict[str, Callable[[Path], arrays.Arrays]]] = {
    "uci-har": har.read_har,
    "spoken-digits": speech.read_speech,
}
_IDX_PARTS: Final = ("train", "t10k")
_IMAGES_MAGIC: Final = 0x00000803  # unsigned bytes, three dimensions
_LABELS_MAGIC: Final = 0x00000801


@dataclass(frozen=True, slots=True)
class Pool:
    """Raw samples x (n, ...), their targets y (n, ...) as a device's file would hold them, and their task.

    `user` (n,) int64 is the person behind each sample, 0, 1, ..., if known. Samples with the same number in `block`
    (n,) int64 are overlapping pieces of one recording and must stay together. `is_test` (n,) bool says which samples
    are for tests alone, if the user has said so; otherwise each device's test samples are drawn.
    """

    x: NDArray[Any]
    y: NDArray[Any]
    spec: TaskSpec
    user: NDArray[np.int64] | None = None
    block: NDArray[np.int64] | None = None
    grouped: NDArray[np.int64] | None = None
    is_test: NDArray[np.bool_] | None = None

    @property
    def groups(self) -> NDArray[np.int64]:
        """The group of each sample by its target, (n,), such as its class; as it was among all samples of the task."""
        if self.grouped is not None:
            return self.grouped
        problem = self.spec.problem
        return problem.group_targets(problem.convert_targets(self.y, len(self.y), self.spec.input_shape, "y"))

    @property
    def n_groups(self) -> int:
        """The number of groups."""
        return self.spec.n_classes or int(self.groups.max(initial=0)) + 1

    def select(self, chosen: NDArray[np.integer]) -> Pool:
        """Return the samples at these positions."""
        user, block = (None if known is None else known[chosen] for known in (self.user, self.block))
        is_test = None if self.is_test is None else self.is_test[chosen]
        return Pool(self.x[chosen], self.y[chosen], self.spec, user, block, self.groups[chosen], is_test)


def load_pool(
    task_name: str, data: Path | None = None, *, problem: str | None = None, seed: int = 0, limit: int | None = None
) -> Pool:
    """Load all samples of a task, training and test, in stored order.

    Args:
        task_name: digits (from scikit-learn), mnist or fashion-mnist (IDX files in `data`, `data/<task>` or
            torchvision's folder), uci-har, spoken-digits (see `har`, `speech`), image-folder (a folder or .zip of
            `<class>/*.jpg`), arrays (an .npz), SCHEMA.toml (a .csv or .parquet), package.module:Class, or the name of a
            `Task` of this process.
        data: location of the samples; not needed for digits. A user-defined class reads it as one device's data.
        problem: as for `fedge.tasks.specs.load_task`.
        seed: seed of the choice of `limit` samples.
        limit: number of samples to draw at random; None for all.

    Raises:
        ConfigError: there is no such task, or its data are missing or unreadable.
    """
    rng = np.random.default_rng(seed)
    if ":" in task_name:
        found = _load_user_pool(task_name, data, seed)
        require_problem(found.spec, problem)
        return found.select(_draw_positions(len(found.y), rng, limit))
    if task_name == "image-folder" and data is not None:
        return _read_images(data, problem, rng, limit)
    spec = load_task(task_name, data, problem=problem)  # refuses an unknown name
    if task_name == "digits":
        held = _read_digits()
    elif task_name in _IDX_FOLDERS:
        held = _read_idx_parts(task_name, data)
    elif data is not None and task_name == "arrays":
        held = arrays.read_arrays(data, labelled=spec.problem.LABELLED)
    elif data is not None and task_name in _READERS:
        held = _READERS[task_name](data)
    elif data is not None and task_name.endswith(".toml"):
        held = tables.read_table(tables.get_schema(spec), data)
    else:
        raise ConfigError(f"task {task_name} does not bring its samples: say where they are (--data)")
    y, n = held.get("y"), len(held["x"])
    if y is None:
        y = spec.problem.make_targets(n, spec.input_shape)
    spec.problem.convert_targets(y, n, spec.input_shape, f"{data or task_name}: y")
    found = Pool(held["x"], y, spec, held.get("user"), held.get("block"))
    return found.select(_draw_positions(len(found.y), rng, limit))


def _load_user_pool(path: str, data: Path | None, seed: int) -> Pool:
    """Load samples of a task made in Python, or of a user's class that reads one device's data.

    Such a class returns model inputs, with nothing left to preprocess. Devices that get a share of them read plain
    arrays, so the task's name loses its module.
    """
    made = load_object(path)
    if not isinstance(made, type):
        own: Pool = made.pool
        return own
    if data is None:
        raise ConfigError(f"task {path} reads its samples itself: say where they are (--data)")
    spec = load_task(path, data)
    samples = read_device_data(spec, data, seed=seed)
    x, y = samples.labelled
    name = path.rpartition(":")[2]
    return Pool(x, y, msgspec.structs.replace(spec, name=name, preprocessing=Preprocessing()))


def _draw_positions(n_samples: int, rng: np.random.Generator, limit: int | None) -> NDArray[np.int64]:
    return np.sort(rng.permutation(n_samples)[:limit])


def _read_digits() -> arrays.Arrays:
    """Read the file behind scikit-learn's `load_digits`, whose import is slower than most runs."""
    found = find_spec("sklearn")
    if found is None or found.origin is None:
        raise ModuleNotFoundError("No module named 'sklearn'", name="sklearn")
    rows = np.loadtxt(Path(found.origin).parent / "datasets/data/digits.csv.gz", delimiter=",")
    return {"x": rows[:, :-1].reshape(-1, 8, 8).astype(np.uint8), "y": rows[:, -1].astype(np.int64)}


def _read_images(data: Path, problem: str | None, rng: np.random.Generator, limit: int | None) -> Pool:
    """Choose images at random, and decode only those."""
    spec = load_task("image-folder", data, problem=problem)
    images.warn_of_unread(data)
    names = folders.list_samples(spec.problem, data)
    chosen = [names[i] for i in _draw_positions(len(names), rng, limit)]
    return Pool(images.load_images(spec, data, chosen), folders.read_targets(spec, data, chosen), spec)


def _read_idx_parts(task_name: str, data: Path | None) -> arrays.Arrays:
    """Read both parts of a data set in IDX format (big-endian header, then bytes)."""
    if data is None:
        raise ConfigError(f"task {task_name} needs its four IDX files: say where they are")
    folders = [data, *(data / name for name in _IDX_FOLDERS[task_name])]
    x = np.concatenate([_read_idx(folders, f"{part}-images-idx3-ubyte", _IMAGES_MAGIC) for part in _IDX_PARTS])
    y = np.concatenate([_read_idx(folders, f"{part}-labels-idx1-ubyte", _LABELS_MAGIC) for part in _IDX_PARTS])
    if len(x) != len(y):
        raise ConfigError(f"{data}: {len(x)} images, but {len(y)} labels")
    return {"x": x, "y": y.astype(np.int64)}


def _read_idx(folders: list[Path], name: str, magic: int) -> NDArray[np.uint8]:
    candidates = [folder / f"{name}{suffix}" for folder in folders for suffix in (".gz", "")]
    file = next((candidate for candidate in candidates if candidate.is_file()), None)
    if file is None:
        raise ConfigError(f"{name}.gz is not in {', '.join(str(folder) for folder in folders)}")
    broken = raise_as(ConfigError, f"{file} is not an IDX file", on=(OSError, EOFError, ValueError, zlib.error))
    with broken, gzip.open(file) if file.suffix == ".gz" else file.open("rb") as opened:
        header = np.frombuffer(opened.read(4 * (1 + (magic & 0xFF))), dtype=">u4", count=1 + (magic & 0xFF))
        claimed = math.prod(header[1:].tolist())
        require_room(file, INPUT_BYTES * claimed)
        values = np.frombuffer(opened.read(claimed + 1), dtype=np.uint8)  # few bytes may become very many
    if header[0] != magic or values.size != claimed:
        raise ConfigError(f"{file} is not an IDX file: header {header.tolist()} with {values.size} values")
    return values.reshape(header[1:].astype(np.int64))
