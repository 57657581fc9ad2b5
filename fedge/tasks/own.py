"""A task made in Python from samples in memory and any network: `fedge.Task`.

    task = fedge.Task.from_arrays(x, y, model=Net)
    fedge.simulate(task=task, method="fedge", rounds=30)

The task lives in this process, so the network may be a class defined in a notebook. The bundles that devices finally
run need neither the process nor the class.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any, Final, Self

import msgspec
import numpy as np
from numpy.typing import ArrayLike, NDArray

from fedge.data.task import TaskSpec
from fedge.errors import ConfigError, raise_as
from fedge.models.choice import with_network
from fedge.system.loading import FAILURES, register_object
from fedge.system.text import refuse_unknown_arguments
from fedge.tasks import arrays
from fedge.tasks.pool import Pool
from fedge.tasks.pool import load_pool as read_pool
from fedge.tasks.problems import FolderKind, Kind, state_problem
from fedge.tasks.specs import make_array_spec

ONE_SHAPE: Final = "pad shorter ones, with a mask as a further channel; concatenate several inputs of a sample"
"""What to do about samples of several shapes."""
_CHANNELS = (1, 3)  # numbers of channels of grey and colour images


@dataclass(frozen=True, eq=False)
class Task:
    """A task with all samples. `network` and `asked` hold given classes, which keeps their registered names valid."""

    pool: Pool
    network: object = None
    asked: object = None

    @property
    def spec(self) -> TaskSpec:
        """Classes, input shape, network and preprocessing."""
        return self.pool.spec

    @classmethod
    @refuse_unknown_arguments
    def from_arrays(
        cls,
        x: ArrayLike,
        y: ArrayLike | None = None,
        *,
        problem: Kind | str | type = "classification",
        model: object = None,
        classes: Sequence[str] | None = None,
        users: ArrayLike | None = None,
        block: ArrayLike | None = None,
        x_test: ArrayLike | None = None,
        y_test: ArrayLike | None = None,
        users_test: ArrayLike | None = None,
        name: str = "arrays",
    ) -> Self:
        """Make a task from samples in memory.

        By default a quarter of each simulated device's samples are for tests. With `x_test`, these are the only test
        samples: they are dealt to the devices as the others are, and nothing learns from them.

        Args:
            x: numbers (n, ...) in the shape that the network takes. Images may be channels-last; uint8 images may omit
                the channel axis. Whole numbers of other types count as uint8 images if they are 0..255 in the shape of
                images. Without a channel axis they do so only for fedge's own networks, since other networks may take
                them as they are.
            y: the targets. For classification whole numbers (n,), text, or one-hot rows; for several labels zeros and
                ones (n, labels); for regression numbers (n,) or (n, targets); for segmentation masks (n, height, width)
                of class numbers, 255 where a pixel does not count; for reconstruction nothing, or marks (n,), 1 for a
                known anomaly.
            problem: what is asked of the network: "classification", "multi-label", "regression", "segmentation",
                "reconstruction", or a class of your own with loss, score and outputs (`fedge.data.problems.own`), which
                may be given as package.module:Class, too.
            model: a name such as "cnn", "package.module:factory", a subclass of `torch.nn.Module`, a factory function,
                or a module, whose weights are the starting point. A class or function is called with the `TaskSpec`, or
                with no argument if it takes none. None means a convolutional network for images of 16 pixels or more,
                else a perceptron.
            classes: names of classes, labels or targets; if None, the labels or numbers.
            users: the person behind each sample, (n,), for partition "natural".
            block: the recording from which each sample was cut, (n,), a number or name. Overlapping windows of one
                recording stay on one device, and there on one side of training, validation and test.
            x_test: test samples in the form of `x`; None to draw them from `x`.
            y_test: their targets in the form of `y`.
            users_test: the person behind each of them, if there are `users`.
            name: name of the task.

        Raises:
            ConfigError: an array has a wrong shape, type or value, or there is no such argument.
        """
        told = {"x": x, "y": y, "users": users, "block": block}
        given = {key: _to_array(own, f"{name}: {key}") for key, own in told.items() if own is not None}
        told = {"x": x_test, "y": y_test, "users": users_test}
        tests = {key: _to_array(own, f"{name}: {key}_test") for key, own in told.items() if own is not None}
        given, is_test = _join_tests(given, tests, name)
        if classes is not None:
            given["classes"] = _to_array(classes, f"{name}: classes")
        user = _number_users(given.pop("users", None), len(given["x"]), name)
        table = arrays.require_arrays(given, name)
        n_train = None if is_test is None else int((~is_test).sum())
        own_network = model is not None and not (isinstance(model, str) and ":" not in model)
        images, mode = _move_channels_first(_to_pixels(table["x"], own_network))
        stated = state_problem(_name_problem(problem), table, name, n_train)
        with raise_as(ConfigError, name, on=ConfigError):
            spec = make_array_spec(name, images[:n_train], stated)
            spec.problem.convert_targets(stated.y, len(images), spec.input_shape, "y")
        if mode is not None:
            how = msgspec.structs.replace(spec.preprocessing, image_mode=mode)
            spec = msgspec.structs.replace(spec, preprocessing=how)
        pool = Pool(images, stated.y, spec, user, table.get("block"), is_test=is_test)
        return cls._make(pool, model, problem)

    @classmethod
    @refuse_unknown_arguments
    def from_dataset(
        cls,
        dataset: Any,
        *,
        problem: Kind | str | type = "classification",
        model: object = None,
        classes: Sequence[str] | None = None,
        name: str | None = None,
    ) -> Self:
        """Read a whole `torch.utils.data.Dataset` of pairs (input, target).

        Inputs are tensors, arrays or PIL images of one size. They are standardised again, which is harmless. Targets
        are as for `from_arrays`, one of each sample: a class, a number, a vector, a mask. Class names come from the
        dataset's attribute `classes`, if present. Other arguments are as for `from_arrays`.

        Raises:
            ConfigError: a sample is not such a pair, or shapes differ.
        """
        samples: Iterable[Any] = (dataset[i] for i in range(len(dataset))) if hasattr(dataset, "__len__") else dataset
        name = name or type(dataset).__name__
        if isinstance(dataset, Mapping):
            raise ConfigError(
                f"{name} is a dictionary of {', '.join(map(str, dataset))}: give its arrays to Task.from_arrays(x, y)"
            )
        samples = iter(samples)
        first = _take_first(samples, name)
        if isinstance(first, Mapping):
            keys = ", ".join(map(repr, first))
            raise ConfigError(
                f"the samples of {name} are dictionaries of {keys}: give pairs, such as "
                "[(sample[...], sample[...]) for sample in dataset], the input first, then the target"
            )
        if isinstance(first, Sequence) and len(first) == 2 and any(isinstance(part, Mapping) for part in first):
            raise ConfigError(
                f"{name} gives {' and '.join(type(part).__name__ for part in first)}: make an array of what is in the "
                "dictionary; targets of several parts go into one vector, for a problem of your own"
            )
        samples = chain([first], samples)
        try:
            inputs, targets = zip(*((np.asarray(x), np.asarray(y)) for x, y in samples), strict=True)
            x, y = np.stack(inputs), np.stack(targets)
        except FAILURES as error:
            raise ConfigError(f"{name} must give pairs (input, target) of one shape: {ONE_SHAPE} ({error})") from error
        found = classes if classes is not None else getattr(dataset, "classes", None)
        return cls.from_arrays(x, y, problem=problem, model=model, classes=found, name=name)

    @classmethod
    @refuse_unknown_arguments
    def from_folder(cls, folder: Path | str, *, problem: FolderKind = "classification", model: object = None) -> Self:
        """Make a task from a folder or .zip of images, scaled to 32 x 32; `model` is as for `from_arrays`.

        For classification, images are in one folder per class. For segmentation, `NAME.mask.png` is beside `NAME.jpg`
        or `NAME.png` (`fedge.data.masks`). For reconstruction, images alone are enough.

        Raises:
            ConfigError: the folder holds no such images.
        """
        return cls._make(read_pool("image-folder", Path(folder), problem=problem), model)

    @classmethod
    def _make(cls, pool: Pool, model: object, asked: object = None) -> Self:
        if model is None:
            return cls(pool, None, asked)
        return cls(replace(pool, spec=with_network(pool.spec, get_network_name(model))), model, asked)


def _take_first(samples: Iterator[Any], name: str) -> Any:
    try:
        return next(samples)
    except StopIteration:
        raise ConfigError(f"{name} has no samples") from None
    except FAILURES as error:
        raise ConfigError(f"{name} cannot give its first sample: {type(error).__name__}: {error}") from error


def _join_tests(
    given: arrays.Arrays, tests: arrays.Arrays, name: str
) -> tuple[arrays.Arrays, NDArray[np.bool_] | None]:
    """Return samples with test samples after them, each in a block of its own, and marks of the latter, (n,).

    Raises:
        ConfigError: the test samples are of another form.
    """
    if not tests:
        return given, None
    for key in ("x", "y", "users"):
        if (key in given) != (key in tests):
            there, missing = (key, f"{key}_test") if key in given else (f"{key}_test", key)
            raise ConfigError(f"{name}: there is {there}, but no {missing}: give both or neither")
        if key in given and not _are_alike(given[key], tests[key]):
            one, other = (f"{each.dtype}{each.shape}" for each in (given[key], tests[key]))
            raise ConfigError(f"{name}: {key}_test is {other}, but {key} is {one}: give both in the same form")
    n, n_test = len(given["x"]), len(tests["x"])
    joined = {key: np.concatenate([given[key], own]) for key, own in tests.items()}
    if "block" in given:
        block = arrays.number_blocks(given["block"], n, None, name)
        joined["block"] = np.concatenate([block, np.arange(n_test) + len(block)])
    return joined, np.arange(n + n_test) >= n


def _are_alike(one: NDArray[Any], other: NDArray[Any]) -> bool:
    """Return whether arrays have samples of one shape and kind, which one array can hold unchanged."""
    kinds = {"text" if each.dtype.kind in "USO" else each.dtype.kind.replace("i", "u") for each in (one, other)}
    return one.ndim > 0 and one.ndim == other.ndim and one.shape[1:] == other.shape[1:] and len(kinds) == 1


def _number_users(users: NDArray[Any] | None, n: int, name: str) -> NDArray[np.int64] | None:
    """Number the people behind n samples 0, 1, ...; None if they are unknown.

    Raises:
        ConfigError: there is not one for each sample.
    """
    if users is None:
        return None
    if users.shape != (n,):
        raise ConfigError(f"{name}: users must be one per sample, not {users.shape}")
    return np.unique(users, return_inverse=True)[1].astype(np.int64)


def _to_array(values: ArrayLike, what: str) -> NDArray[Any]:
    """Return values in memory as an array.

    Raises:
        ConfigError: the values cannot become an array; a tensor must be detached and on the CPU.
    """
    if isinstance(values, Mapping):
        raise ConfigError(
            f"{what} is a dictionary of {', '.join(map(str, values))}: join them to one array, such as "
            "np.concatenate([...], axis=1), and take it apart in the network"
        )
    try:
        return np.asarray(values)
    except FAILURES as error:
        do = f"give all samples one shape: {ONE_SHAPE}"
        if what.endswith(" y"):
            do = "give one target per sample, or a column of 0 and 1 for each of several labels"
        if hasattr(values, "detach"):
            do = f"give {what.rpartition(' ')[2]}.detach().cpu()"
        raise ConfigError(f"{what} cannot be made an array: {do} ({error})") from error


def _name_problem(problem: str | type) -> str:
    """Return the problem's name in the task: the given name or, for a class, its registered name.

    Raises:
        ConfigError: the problem is neither a name nor a class.
    """
    if isinstance(problem, str):
        return problem
    if not isinstance(problem, type):
        raise ConfigError(f"a problem is a name or a class with loss, score and outputs, not {type(problem).__name__}")
    return register_object(problem)


def get_network_name(model: object) -> str:
    """Return the network's name in the task, which is the given name or, for an object, its registered name.

    Raises:
        ConfigError: the model is neither a name, nor a module, nor callable.
    """
    if isinstance(model, str):
        return model
    if not callable(model):
        raise ConfigError(f"a network is a name, a torch.nn.Module or what makes one, not {type(model).__name__}")
    return register_object(model)


def _to_pixels(x: NDArray[Any], own_network: bool) -> NDArray[Any]:
    """Return whole numbers in the shape and range of images as uint8, and all others unchanged."""
    whole = x.dtype.kind in "iu" and x.dtype != np.uint8
    shaped = (x.ndim == 4 and not {x.shape[1], x.shape[-1]}.isdisjoint(_CHANNELS)) or (x.ndim == 3 and not own_network)
    return x.astype(np.uint8) if whole and shaped and x.min() >= 0 and x.max() <= 255 else x


def _move_channels_first(x: NDArray[Any]) -> tuple[NDArray[Any], str | None]:
    """Return images as (n, channels, height, width), and the mode of their files if they are uint8."""
    if x.ndim == 3 and x.dtype == np.uint8:
        x = x[:, np.newaxis]
    elif x.ndim == 4 and x.shape[-1] in _CHANNELS and x.shape[1] not in _CHANNELS:
        x = np.moveaxis(x, -1, 1)
    is_image = x.ndim == 4 and x.shape[1] in _CHANNELS and x.dtype == np.uint8
    return x, {1: "L", 3: "RGB"}[x.shape[1]] if is_image else None
