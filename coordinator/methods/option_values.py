"""A method's own options: which there are, and whether given ones are right.

The options `selection` and `clustering` name parts. Other packages bring such parts, too, and they are named like
methods: by entry point, or as `package.module:name` on the command line or in Python.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple, get_args, get_origin

import msgspec
from msgspec import Meta, Struct

from coordinator.clustering import find
from coordinator.methods.settings import Option
from coordinator.selection import contract, select
from fedge.errors import ConfigError, raise_as
from fedge.settings import get_annotations
from fedge.system.loading import find_entry_points, is_code_path, is_registered

if TYPE_CHECKING:
    from coordinator.methods.method import Method


class NoOptions(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The options of a method that has none."""


def parse_options(kind: type[Method[Any]], given: Mapping[str, Option]) -> tuple[Struct, str | None]:
    """Return the method's own options, checked, and its selection, which all methods with cohorts share.

    Raises:
        ConfigError: an unknown name or word (the nearest right one is named), a refused one (with the reason), or a
            value out of range.
    """
    hints = {field.name: field.type for field in msgspec.structs.fields(kind.Options)}
    known = {name: list_words(hint) for name, hint in hints.items()}
    if kind.SELECTIONS:
        known["selection"] = list(kind.SELECTIONS)
    for name, value in given.items():
        if name not in known:
            why = kind.REFUSED.get(name) or suggest_name(name, list(known), "it has")
            raise ConfigError(f"the method has no option {name!r}; {why}")
        is_word = (isinstance(value, str) or name == "selection") and known[name]
        if is_word and value not in known[name] and not is_own(name, value, hints.get(name), known[name]):
            why = kind.REFUSED.get(f"{name}={value}", "")
            near = suggest_name(str(value), [*known[name], *list_others(name, hints.get(name))])
            why = f"{why}; it is one of {', '.join(known[name])}" if why else near
            raise ConfigError(f"option of the method: {name} cannot be {value!r}; {why}")
        if isinstance(value, float) and not math.isfinite(value):  # no message holds one
            raise ConfigError(f"option {name} of the method must be a finite number, not {value}")
        if name in hints:
            with raise_as(ConfigError, f"option of the method: {name}", on=msgspec.ValidationError):
                msgspec.convert(value, type=hints[name], strict=False)
    own = {name: value for name, value in given.items() if name != "selection"}
    with raise_as(ConfigError, "option of the method", on=msgspec.ValidationError):
        options = msgspec.convert(own, type=kind.Options, strict=False)
    selection = given.get("selection", kind.SELECTIONS[0] if kind.SELECTIONS else None)
    return options, None if selection is None else str(selection)


def list_words(hint: object) -> list[str]:
    """Return the words that an option accepts; none if it takes text, numbers or booleans."""
    if get_origin(hint) is Literal:
        return [value for value in get_args(hint) if isinstance(value, str)]
    if isinstance(hint, Meta):
        return list((hint.extra or {}).get("offers", ()))
    return [word for part in get_args(hint) for word in list_words(part)]


def suggest_name(given: str, known: Sequence[str], otherwise: str = "it is one of") -> str:
    """Return the hint for an unknown name."""
    near = difflib.get_close_matches(given, known, n=1)
    return f"did you mean {near[0]!r}?" if near else f"{otherwise} {', '.join(known) or 'none'}"


# ------------------------------------------------------------------------------------- parts of other packages


class Part(NamedTuple):
    """A kind of part that an option can name, by the group of its entry points and the names of fedge's own parts."""

    group: str
    ours: tuple[str, ...]


PARTS: Final = {"selection": Part(contract.GROUP, select.OURS), "clustering": Part(find.GROUP, find.OURS)}


def list_code(options: Mapping[str, object]) -> tuple[str, ...]:
    """Return the code that the options of a method name as its parts."""
    return tuple(str(options[name]) for name in PARTS if is_code_path(str(options.get(name, ""))))


def explain_no_privacy(selection: str | None) -> str:
    """Explain why differential privacy refuses a selection of another package; empty for ours."""
    own = selection is not None and selection not in select.OURS
    return "nothing accounts for what a rule of your own learns of devices; use uniform" if own else ""


def is_own(name: str, value: object, hint: object, offered: Collection[str]) -> bool:
    """Return whether an option names a part of another package or a path, which the method takes.

    Args:
        name: the option's name.
        value: the given value.
        hint: the option's type; None for a selection, which every method takes that offers selections.
        offered: fedge's own parts that the method takes.

    Raises:
        ConfigError: the part cannot be loaded, is no such part, or does not suit the method.
    """
    part = PARTS.get(name)
    if part is None or not isinstance(value, str) or value in part.ours or not _takes_others(hint):
        return False
    if value not in find_entry_points(part.group) and not is_code_path(value) and not is_registered(value):
        return False
    if name == "clustering":
        find.load_clusterer(value)
        return True
    rule = contract.load_rule(value)
    if isinstance(rule, contract.Rule) and rule.CLUSTERS and "stratified" not in offered:
        raise ConfigError(
            f"selection {value} says how many of each cluster train, and here are none: take cfic, fedepc or fedge"
        )
    return True


def list_others(name: str, hint: object) -> list[str]:
    """List what an option takes beyond fedge's own parts, for errors: installed parts, and the form of a path."""
    part = PARTS.get(name)
    if part is None or not _takes_others(hint):
        return []
    return [*(own for own in find_entry_points(part.group) if own not in part.ours), "package.module:name"]


def _takes_others(hint: object) -> bool:
    """Return whether an option of this type (None for a selection) takes parts of other packages."""
    return hint is None or any(
        isinstance(meta, Meta) and "offers" in (meta.extra or {}) for meta in get_annotations(hint)
    )
