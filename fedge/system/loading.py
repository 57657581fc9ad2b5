"""User-defined objects: named on the command line as `package.module:name`, or passed in Python."""

from __future__ import annotations

import importlib
import itertools
import re
import sys
import traceback
from collections.abc import Container, Iterable, Mapping
from functools import cache
from pathlib import Path
from types import FrameType, ModuleType
from typing import TYPE_CHECKING, Any, Final
from weakref import WeakValueDictionary

from fedge.errors import ConfigError
from fedge.system.text import suggest_nearest

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

HERE: Final = "here"
"""Word in place of a module in the names of objects that only this process has, such as a class of a notebook."""

FINE_TUNED: Final = "+ft"
"""Suffix of the name of a method whose models are fine-tuned at the end."""

OURS: Final = frozenset({"fedge", "edge_agent", "coordinator", "export", "deploy"})
FAILURES: Final = (Exception, SystemExit)
"""Exceptions that count as failures of a user's code; Ctrl-C is not among them."""
_COLOURS: Final = re.compile(r"\x1b\[[0-9;]*m")
_LONGEST: Final = 300
"""Most characters of a reason, since libraries put whole programs into theirs."""

_held: WeakValueDictionary[str, Any] = WeakValueDictionary()
_allowed: Final[set[str]] = set()
_numbers = itertools.count(1)


def is_code_path(path: str) -> bool:
    """Return whether a text is `package.module:name`, the only form that names a user's code."""
    module, colon, name = path.partition(":")
    return bool(colon) and name.isidentifier() and all(part.isidentifier() for part in module.split("."))


def find_code(text: str) -> tuple[str, ...]:
    """Return all code (package.module:name) that a setting names, separated by commas or in a method's options.

    Example:
        >>> find_code("mine.median:Own+ft:a=1,fedavg:selection=mine.rules:largest")
        ('mine.median:Own', 'mine.rules:largest')
    """
    paths = []
    for words in (part.strip().split(":") for part in text.split(",")):
        paths.append(":".join(words[:2]).removesuffix(FINE_TUNED))
        paths += [f"{word.partition('=')[2].strip()}:{name.strip()}" for word, name in itertools.pairwise(words)]
    return tuple(dict.fromkeys(path for path in paths if is_code_path(path)))


def require_allowed(source: str, code: Iterable[str], allow: Container[str], how: str) -> None:
    """Refuse code that a file names unless the owner of this machine allows exactly that code.

    Args:
        source: the file, for the error text.
        code: the code that the file names, each `package.module:name`.
        allow: the code that the owner names, on the command line or in the environment.
        how: the option that allows code, for example --allow.

    Raises:
        ConfigError: some of the code is not allowed.
    """
    code = list(code)
    if foreign := [path for path in code if path not in allow]:
        raise ConfigError(
            f"{source} names code that would be run here: {', '.join(foreign)}; if you know and trust it, say so on "
            f"the command line: {how} {','.join(code)}"
        )
    allow_code(code)


def allow_code(code: Iterable[str]) -> None:
    """Remember code that the owner of this machine named or allowed, for `is_allowed` in this process."""
    _allowed.update(code)


def is_allowed(path: str) -> bool:
    """Return whether code that a file names may run in this process: its owner allowed it, or made it here."""
    return path in _allowed or path in _held


def load_object(path: str) -> Any:
    """Load the object at `package.module:name`, such as a task class or a network factory, or a registered object.

    The path comes from this machine's command line or environment, never from the network, and from a file only if the
    command line allows it (`require_allowed`).

    Raises:
        ConfigError: there is no such module or name, or the module's import fails.
    """
    if path in _held:
        return _held[path]
    if path.startswith(f"{HERE}:"):
        raise ConfigError(
            f"{path} was made in another Python process: write it into a file and name it package.module:name"
        )
    module_name, _, name = path.partition(":")
    advice = "write package.module:name, of a package that is installed here or lies in a folder of PYTHONPATH"
    if not is_code_path(path):
        raise ConfigError(f"cannot load {path}: {advice}")
    try:
        return getattr(importlib.import_module(module_name), name)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"cannot load {path}: {error}; {advice}") from error
    except Exception as error:
        raise ConfigError(f"cannot load {path}: {module_name} fails with {type(error).__name__}: {error}") from error


@cache
def find_entry_points(group: str) -> Mapping[str, EntryPoint]:
    """Return the entry points of a group in all packages, by name, without importing them."""
    from importlib.metadata import entry_points  # with `email` and `socket`, which a runtime does without

    return {point.name: point for point in sorted(entry_points(group=group))}


def load_named(name: str, group: str, what: str) -> Any:
    """Load the object that a package has installed under a name, or that `package.module:name` names.

    Args:
        name: name of an entry point, or a path as for `load_object`.
        group: group of the entry points.
        what: kind of object, for the error text.

    Raises:
        ConfigError: there is no such object (the text lists the installed ones), or its import fails.
    """
    known = find_entry_points(group)
    if name not in known and not is_code_path(name) and not is_registered(name):
        near = suggest_nearest(name, known) or f": it is one of {', '.join(known) or 'none'}, or package.module:name"
        raise ConfigError(f"there is no {what} {name!r}{near}")
    return load_object(known[name].value if name in known else name)


def load_role(module: str, what: str, extra: str) -> ModuleType:
    """Import part of a role, which may need packages that are not installed.

    `what` is the feature that needs the module, for the error text. `extra` is the extra that provides the packages.

    Raises:
        ConfigError: a third-party package is missing.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise make_missing_package_error(error, what, extra) from error


def make_missing_package_error(error: ModuleNotFoundError, what: str, extra: str) -> Exception:
    """Return an error that advises to install a missing package; if a module of ours is missing, the given error."""
    package = (error.name or "").split(".")[0]
    if package in OURS:
        return error
    return ConfigError(f"{what} needs the package {package}: in fedge's clone, pip install '.[{extra}]'")


def describe_error(error: BaseException) -> str:
    r"""Describe an exception from a user's code or a library under it: type, first line, and the user's line if any.

    Example:
        >>> describe_error(ValueError("\x1b[96mno such shape\x1b[0m\nfor more, see ..."))
        'ValueError: no such shape'
    """
    lines = [line.strip() for line in _COLOURS.sub("", str(error)).splitlines() if line.strip()]
    text = f"{type(error).__name__}: {lines[0][:_LONGEST]}" if lines else type(error).__name__
    own = [place for frame, line in traceback.walk_tb(error.__traceback__) if (place := find_user_line(frame, line))]
    return f"{text} ({own[-1]})" if own else text


def find_user_line(frame: FrameType, line: int) -> str:
    """Return file and line of a frame that runs a user's code, or "" for Python's, a package's or our code."""
    path, package = Path(frame.f_code.co_filename), str(frame.f_globals.get("__name__")).split(".")[0]
    if package in OURS or package in sys.stdlib_module_names - {"__main__"} or "site-packages" in path.parts:
        return ""
    return f"{path.name}, line {line}"


def register_object(thing: object) -> str:
    """Give an object a name by which `load_object` finds it in this process, as long as something else refers to it.

    An object keeps its name. A different object, such as a redefined class, gets a new name, so that nothing made for
    the old object is used for it.
    """
    for name, held in _held.items():
        if held is thing:
            return name
    name = f"{HERE}:{getattr(thing, '__name__', type(thing).__name__)}-{next(_numbers)}"
    _held[name] = thing
    return name


def is_registered(path: str | None) -> bool:
    """Return whether a name belongs to an object that exists only in this process."""
    return path is not None and path.startswith(f"{HERE}:")
