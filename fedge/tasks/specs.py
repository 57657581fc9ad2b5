"""Task descriptions: built-in, derived from the user's data, read from a file, or from the user's code."""

from __future__ import annotations

from collections.abc import Container
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np
from msgspec import UNSET, UnsetType
from numpy.typing import NDArray

from fedge.data.scaling import describe_fault
from fedge.data.tables import read_schema
from fedge.data.task import Asked, Preprocessing, TaskSpec
from fedge.data.text import Text, is_text
from fedge.errors import MALFORMED, ConfigError, raise_as
from fedge.system.files import write_atomically
from fedge.system.loading import FAILURES, describe_error, require_allowed
from fedge.system.text import suggest_nearest
from fedge.tasks import arrays
from fedge.tasks.data import load_user_task
from fedge.tasks.problems import Stated, require_problem, state_folder, state_problem, state_table

_DIGITS: Final = tuple("0123456789")
_CLOTHES: Final = (
    "T-shirt/top", "trouser", "pullover", "dress", "coat", "sandal", "shirt", "sneaker", "bag", "ankle boot",
)  # fmt: skip
_ACTIVITIES: Final = ("walking", "walking upstairs", "walking downstairs", "sitting", "standing", "laying")
_DESCRIBED: Final = ("image-folder", "arrays")  # tasks that their data describe
_SIDE: Final = 32  # pixels; the user's images are resized to a square
MOST_SCALES: Final = 10_000
"""Most columns or channels that get a scale each. More of them share one scale, since a task must fit into a bundle's
manifest."""
LITTLE: Final = 0.01
"""Share of a standard deviation that counts as negligible: an error of a mean, or a channel's own deviation."""

BUILT_IN: Final = {
    "digits": TaskSpec(
        name="digits",
        classes=_DIGITS,
        input_shape=(1, 8, 8),
        model="mlp",
        model_options={"hidden": 32},
        preprocessing=Preprocessing(scale=16.0, mean=0.3053, std=0.3761),
    ),
    "mnist": TaskSpec(
        name="mnist",
        classes=_DIGITS,
        input_shape=(1, 28, 28),
        model="mlp",
        model_options={"hidden": 64},
        preprocessing=Preprocessing(scale=255.0, mean=0.1307, std=0.3081, image_mode="L"),
    ),
    "fashion-mnist": TaskSpec(
        name="fashion-mnist",
        classes=_CLOTHES,
        input_shape=(1, 28, 28),
        model="mlp",
        model_options={"hidden": 64},
        preprocessing=Preprocessing(scale=255.0, mean=0.2860, std=0.3530, image_mode="L"),
    ),
    "uci-har": TaskSpec(
        name="uci-har", classes=_ACTIVITIES, input_shape=(108,), model="mlp", model_options={"hidden": 32}
    ),
    "spoken-digits": TaskSpec(
        name="spoken-digits", classes=_DIGITS, input_shape=(1, 16, 12), model="mlp", model_options={"hidden": 32}
    ),
}


def load_task(
    name_or_file: str, data: Path | None = None, *, problem: str | None = None, allow: Container[str] = ()
) -> TaskSpec:
    """Return the task for a name, a .json file, a table's schema or a class.

    Args:
        name_or_file: digits, mnist, fashion-mnist, uci-har, spoken-digits, image-folder, arrays, FILE.json,
            SCHEMA.toml or package.module:Class.
        data: for image-folder a folder or .zip with all classes, or with masks; for arrays an .npz with x and y. These
            data describe the task; machines with only part of the data read the file written by `write_task` instead.
        problem: what is asked of arrays or images (`fedge.tasks.problems.KINDS`), by default classification; all other
            tasks say it themselves, and another one is refused.
        allow: code (package.module:name) that a .json file may name; such a file comes from elsewhere.

    Raises:
        ConfigError: there is no such task, the data do not describe a task, or the file names code that is not allowed.
    """
    if name_or_file in BUILT_IN:
        return require_problem(BUILT_IN[name_or_file], problem)
    if name_or_file.endswith(".json"):
        return require_problem(_read(Path(name_or_file), allow), problem)
    if name_or_file.endswith(".toml"):
        return require_problem(_read_table_task(Path(name_or_file)), problem)
    if ":" in name_or_file:
        return require_problem(_load_class_task(name_or_file, data), problem)
    if name_or_file not in _DESCRIBED:
        hint = suggest_nearest(name_or_file, (*BUILT_IN, *_DESCRIBED))
        raise ConfigError(
            f"unknown task {name_or_file}{hint}: use {', '.join((*BUILT_IN, *_DESCRIBED))}, a .json file that was "
            "written for a federation, a table's schema (.toml), or package.module:Class"
        )
    if data is None:
        raise ConfigError(
            f"task {name_or_file} describes itself by its data: say where they are (--data), or give its .json file"
        )
    if name_or_file == "image-folder":
        return _read_image_task(data, problem or "classification")
    return _read_array_task(data, problem or "classification")


def write_task(task: TaskSpec, path: Path) -> None:
    """Write a task for the other machines of the federation; `load_task` reads it.

    Raises:
        StoreError: the file cannot be written.
    """
    write_atomically(path, msgspec.json.format(msgspec.json.encode(task)))


def _read(path: Path, allow: Container[str]) -> TaskSpec:
    with raise_as(ConfigError, f"{path} is not a task", on=(OSError, *MALFORMED)):
        task = msgspec.json.decode(path.read_bytes(), type=TaskSpec)
    require_allowed(str(path), task.code, allow, "--allow")
    return task


def _load_class_task(path: str, data: Path | None) -> TaskSpec:
    own = load_user_task(path)
    try:
        task = own.spec(data)
    except ConfigError:
        raise
    except FAILURES as error:
        raise ConfigError(f"{path}.spec fails with {describe_error(error)}") from error
    if not isinstance(task, TaskSpec):
        raise ConfigError(f"{path}.spec returned {type(task).__name__}, not a fedge.data.task.TaskSpec")
    return msgspec.structs.replace(task, name=path)


def _read_table_task(file: Path) -> TaskSpec:
    schema = read_schema(file)
    shape, asked = (schema.width,), state_table(schema)
    return TaskSpec(
        name="table",
        classes=schema.classes or (),
        asked=asked,
        input_shape=shape,
        model=choose_network(shape, asked),
        preprocessing=Preprocessing(table=schema),
    )


def _read_image_task(data: Path, problem: str) -> TaskSpec:
    shape, stated = (3, _SIDE, _SIDE), state_folder(problem, data)
    return TaskSpec(
        name="image-folder",
        classes=stated.classes,
        asked=stated.asked,
        input_shape=shape,
        model=choose_network(shape, stated.asked),
        preprocessing=Preprocessing(scale=255.0, mean=0.47, std=0.25, image_mode="RGB"),
    )


def _read_array_task(data: Path, problem: str) -> TaskSpec:
    table = arrays.read_arrays(data, labelled=problem != "reconstruction")
    stated = state_problem(problem, table, str(data))
    with raise_as(ConfigError, str(data), on=ConfigError):
        task = make_array_spec("arrays", table["x"], stated)
        task.problem.convert_targets(stated.y, len(stated.y), task.input_shape, "y")
    return task


def make_array_spec(name: str, x: NDArray[Any], stated: Stated) -> TaskSpec:
    """Make the task of samples (n, *input_shape) and their problem.

    The network is one for the problem's outputs: for images of 16 pixels or more a CNN, else a perceptron.

    Inputs are standardised (`_make_preprocessing`); texts become tokens (`fedge.data.text`), for a bag of embeddings.

    Raises:
        ConfigError: a number is so large that beside it all others would look the same.
    """
    if is_text(x):
        how = Text()
        return _make_spec(name, stated, (how.length,), "bag", Preprocessing(text=how))
    return _make_spec(name, stated, x.shape[1:], choose_network(x.shape[1:], stated.asked), _make_preprocessing(x))


def _make_spec(name: str, stated: Stated, shape: tuple[int, ...], model: str, how: Preprocessing) -> TaskSpec:
    return TaskSpec(
        name=name,
        classes=stated.classes,
        asked=stated.asked,
        first_label=stated.first_label or UNSET,
        input_shape=tuple(int(extent) for extent in shape),
        model=model,
        preprocessing=how,
    )


def choose_network(shape: tuple[int, ...], asked: Asked | UnsetType) -> str:
    """Return the name of the built-in network for inputs of this shape."""
    is_image = len(shape) == 3 and min(shape[1:]) >= 16
    if asked and asked.NETWORK:
        return asked.NETWORK
    return "cnn" if is_image else "mlp"


def _make_preprocessing(x: NDArray[Any]) -> Preprocessing:
    """Choose scaling to mean 0 and deviation 1, for each column of samples (n, columns), else over all values.

    If the channels of samples (n, channels, ...) differ far more from one another than each one varies, each channel
    gets a scale. One scale for all would leave next to nothing of their variation.
    """
    mean, std = own_mean, own_std = _compute_moments(x, axis=(0, *range(2, x.ndim)))
    if x.ndim > 2 or x.shape[1] > MOST_SCALES:
        mean, std = _compute_moments(x)
        if x.shape[1] <= MOST_SCALES and np.sqrt((own_std**2).mean()) < LITTLE * std:
            mean, std = own_mean, own_std
    _require_visible(x, std)
    if mean.ndim:
        return Preprocessing(mean=tuple(mean.tolist()), std=tuple(std.tolist()))
    legible = float(f"{mean:.4g}")
    return Preprocessing(mean=legible if abs(legible - mean) < LITTLE * std else float(mean), std=float(f"{std:.4g}"))


def _compute_moments(
    x: NDArray[Any], axis: tuple[int, ...] | None = None
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Compute mean and standard deviation along these axes; the deviation of a constant is given as 1."""
    mean, std = x.mean(axis, dtype=np.float64), x.std(axis, dtype=np.float64)
    return np.asarray(mean), np.where(x.max(axis) > x.min(axis), std, 1.0)


def _require_visible(x: NDArray[Any], std: NDArray[np.float64]) -> None:
    """Refuse a number so large that most others, though different, become equal once they are scaled by it.

    Raises:
        ConfigError: there is such a number, perhaps one that stands for a missing value; the text says where.
    """
    if x.dtype.kind != "f":
        return
    axis = (0, *range(2, x.ndim)) if std.ndim else None
    with np.errstate(over="ignore"):  # infinity is far enough
        distance = np.abs(x - np.median(x, axis, keepdims=True))
    spread = np.median(distance, axis, keepdims=True)
    lost = (spread > 0) & (spread < np.finfo(np.float32).eps * std.reshape(spread.shape))
    if lost.any():
        at = np.unravel_index(int(np.argmax(np.where(lost, distance, 0))), x.shape)
        raise ConfigError(describe_fault(at, "so large that all others look the same beside it"))
