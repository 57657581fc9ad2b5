"""Methods by name: those of installed packages, and one's own by its path."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from typing import Any, Final

import msgspec

from coordinator.methods.method import NO_DATA, Method, Server
from coordinator.methods.option_values import suggest_name
from coordinator.methods.promises import require_method
from coordinator.methods.settings import MethodSettings
from coordinator.methods.state import State
from fedge.errors import ConfigError
from fedge.system.loading import FINE_TUNED, load_object

GROUP: Final = "fedge.methods"
"""Entry points of installed packages, ours among them, that name a `Method` each."""


@cache
def get_installed_methods() -> Mapping[str, EntryPoint]:
    """Return the methods of all installed packages, by name; not imported yet."""
    return {point.name: point for point in sorted(entry_points(group=GROUP))}


def load_method_class(name: str) -> type[Method[Any]]:
    """Load the method of that name or path (`package.module:Class`); a trailing "+ft" is ignored.

    Raises:
        ConfigError: there is no such method; the text lists the installed ones.
    """
    base = name.removesuffix(FINE_TUNED)
    known = get_installed_methods()
    if ":" not in base and base not in known:
        raise ConfigError(f"there is no method {name!r}; {suggest_name(base, list(known), 'choose one of')}")
    kind = load_object(base) if ":" in base else known[base].load()
    if not (isinstance(kind, type) and issubclass(kind, Method)):
        raise ConfigError(f"{base} is no method: it must be a subclass of coordinator.methods.method.Method")
    if kind.round is Method.round:
        raise ConfigError(f"{base} lacks round, which every method needs")
    require_method(base, kind, State)
    return kind


def make_method(name: str, settings: MethodSettings, server: Server = NO_DATA) -> Method[Any]:
    """Make the method of that name or path; "fedavg+ft" is "fedavg" with fine-tuning at the end.

    Raises:
        ConfigError: there is no such method, it has no such option, or the server lacks something that it needs.
    """
    kind = load_method_class(name)
    return kind(msgspec.structs.replace(settings, fine_tune=settings.fine_tune or name.endswith(FINE_TUNED)), server)
