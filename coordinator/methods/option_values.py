"""A method's own options: which there are, and whether given ones are right."""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, cast, get_args, get_origin

import msgspec
from msgspec import Struct

from coordinator.methods.settings import Option
from coordinator.selection.select import Selection
from fedge.errors import ConfigError, failing_as

if TYPE_CHECKING:
    from coordinator.methods.method import Method


class NoOptions(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """No options."""


def options_of(kind: type[Method[Any]], given: Mapping[str, Option]) -> tuple[Struct, Selection | None]:
    """The method's own options, checked, and its selection, which all methods with cohorts share.

    Raises:
        ConfigError: an unknown name or word (the nearest right one is named), a refused one (with the reason), or a
            value out of range.
    """
    hints = {field.name: field.type for field in msgspec.structs.fields(kind.Options)}
    known = {name: words_of(hint) for name, hint in hints.items()}
    if kind.SELECTIONS:
        known["selection"] = list(kind.SELECTIONS)
    for name, value in given.items():
        if name not in known:
            why = kind.REFUSED.get(name) or nearest(name, list(known), "it has")
            raise ConfigError(f"the method has no option {name!r}; {why}")
        if (isinstance(value, str) or name == "selection") and known[name] and value not in known[name]:
            why = kind.REFUSED.get(f"{name}={value}", "")
            why = f"{why}; it is one of {', '.join(known[name])}" if why else nearest(str(value), known[name])
            raise ConfigError(f"option of the method: {name} cannot be {value!r}; {why}")
        if isinstance(value, float) and not math.isfinite(value):  # no message holds one
            raise ConfigError(f"option {name} of the method must be a finite number, not {value}")
        if name in hints:
            with failing_as(ConfigError, f"option of the method: {name}", on=msgspec.ValidationError):
                msgspec.convert(value, type=hints[name], strict=False)
    own = {name: value for name, value in given.items() if name != "selection"}
    with failing_as(ConfigError, "option of the method", on=msgspec.ValidationError):
        options = msgspec.convert(own, type=kind.Options, strict=False)
    selection = given.get("selection", kind.SELECTIONS[0] if kind.SELECTIONS else None)
    return options, cast("Selection | None", selection)


def words_of(hint: object) -> list[str]:
    """The words that an option accepts; none if it takes text, numbers or booleans."""
    if get_origin(hint) is Literal:
        return [value for value in get_args(hint) if isinstance(value, str)]
    return [word for part in get_args(hint) for word in words_of(part)]


def nearest(given: str, known: Sequence[str], otherwise: str = "it is one of") -> str:
    """The hint for an unknown name."""
    near = difflib.get_close_matches(given, known, n=1)
    return f"did you mean {near[0]!r}?" if near else f"{otherwise} {', '.join(known) or 'none'}"
