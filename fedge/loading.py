"""Objects of the user's own: named in the configuration as `package.module:name`, or handed over in Python."""

from __future__ import annotations

import importlib
import itertools
from types import ModuleType
from typing import Any, Final
from weakref import WeakValueDictionary

from fedge.errors import ConfigError

HERE: Final = "here"
"""Stands for a module in the names of objects that this process alone has, such as a class of a notebook."""

OURS: Final = frozenset({"fedge", "edge_agent", "coordinator", "export", "deploy"})

_held: WeakValueDictionary[str, Any] = WeakValueDictionary()
_numbers = itertools.count(1)


def load_object(path: str) -> Any:
    """What `package.module:name` names: a task class or a network factory; or an object that `hold` named.

    The path comes from the configuration of this machine, never from the network or a file that came from elsewhere.

    Raises:
        ConfigError: there is no such module or name in it, or the module fails when it is imported.
    """
    if path in _held:
        return _held[path]
    if path.startswith(f"{HERE}:"):
        raise ConfigError(
            f"{path} was made in another Python process: write it into a file and name it package.module:name"
        )
    module_name, _, name = path.partition(":")
    try:
        return getattr(importlib.import_module(module_name), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(
            f"cannot load {path}: {error}; write package.module:name, of a package that is installed here or lies in a "
            "folder of PYTHONPATH"
        ) from error
    except Exception as error:
        raise ConfigError(f"cannot load {path}: {module_name} fails with {type(error).__name__}: {error}") from error


def load_role(module: str, what: str, extra: str) -> ModuleType:
    """Import a part of a role, which may need more than is installed here.

    Args:
        module: of ours.
        what: needs it, for the error.
        extra: the installation that brings it.

    Raises:
        ConfigError: a package of others is missing.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise needs(error, what, extra) from error


def needs(error: ModuleNotFoundError, what: str, extra: str) -> Exception:
    """What to raise for a package that is missing: how to install it; the error itself for a module of ours."""
    package = (error.name or "").split(".")[0]
    if package in OURS:
        return error
    return ConfigError(f"{what} needs the package {package}: in fedge's clone, pip install '.[{extra}]'")


def hold(thing: object) -> str:
    """A name by which `load_object` finds an object in this process for as long as somebody else refers to it.

    The same object keeps its name. Another one, such as a class that was defined anew, gets another name, so that
    nothing made for the old one is taken for the new.
    """
    for name, held in _held.items():
        if held is thing:
            return name
    name = f"{HERE}:{getattr(thing, '__name__', type(thing).__name__)}-{next(_numbers)}"
    _held[name] = thing
    return name


def is_held(path: str | None) -> bool:
    """Whether a name is one of an object that no other process has."""
    return path is not None and path.startswith(f"{HERE}:")
