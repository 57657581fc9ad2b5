"""Differences between what a page has and what there is, so that a refresh sends only what changed.

A table has a row for each key, such as a device, and each row flat fields. The table knows for each field the version
in which it last changed. So it can tell any page what is new to it, without keeping what that page has.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import msgspec

GONE: Final = "gone"
"""Field of a row that is there no more."""


@dataclass(slots=True)
class _Row:
    """A row. `changed`: by field, the version in which it last changed."""

    values: dict[str, Any] = field(default_factory=dict)
    changed: dict[str, int] = field(default_factory=dict)


class Table:
    """Rows by key, in the order in which they first came; their places never change."""

    def __init__(self) -> None:
        self._rows: dict[str, _Row] = {}

    def update(self, rows: Mapping[str, Mapping[str, Any]], version: int) -> None:
        """Take these rows as the present ones. A field that a row has no more becomes None."""
        for key in self._rows.keys() - rows.keys():
            _update_row(self._rows[key], {GONE: True}, version)
        for key, values in rows.items():
            _update_row(self._rows.setdefault(key, _Row()), values, version)

    def list_changes(self, since: int) -> dict[str, dict[str, list[Any]]]:
        """Return what changed after version `since`, by field: the rows' places ("at") and the values ("is").

        Without "at", the values are of all rows. Since 0, a page has nothing yet, so rows that are gone are left out.
        """
        found: dict[str, dict[str, list[Any]]] = {}
        for place, row in enumerate(self._rows.values()):
            if not since and row.values.get(GONE):
                continue
            for name, version in row.changed.items():
                if version > since and (since or row.values[name] is not None):
                    column = found.setdefault(name, {"at": [], "is": []})
                    column["at"].append(place)
                    column["is"].append(row.values[name])
        return {name: _pack_column(column, len(self._rows)) for name, column in found.items()}


def _pack_column(column: dict[str, list[Any]], n_rows: int) -> dict[str, list[Any]]:
    return {"is": column["is"]} if len(column["at"]) == n_rows else column


def _update_row(row: _Row, values: Mapping[str, Any], version: int) -> None:
    for name in row.values.keys() | values.keys():
        now = values.get(name)
        if name not in row.values or row.values[name] != now:
            row.values[name], row.changed[name] = now, version


class Differences:
    """The tables of a page, and what a page with an earlier version lacks.

    Versions are texts: a word of this object, so that no page takes another process's version for ours, and a number.
    """

    def __init__(self, *tables: str) -> None:
        self._word = secrets.token_hex(4)
        self._version = 0
        self._tables = {name: Table() for name in tables}

    def update(self, tables: Mapping[str, Mapping[str, Mapping[str, Any]]]) -> None:
        """Take this content of the tables as the present one."""
        self._version += 1
        for name, table in self._tables.items():
            table.update(tables[name], self._version)

    def encode_since(self, version: str) -> bytes:
        """Encode what a page with this version lacks as JSON: everything ("whole") if the version is not ours."""
        word, _, number = version.partition(".")
        known = word == self._word and number.isdecimal() and len(number) < 19
        since = int(number) if known else 0
        changes = {name: table.list_changes(since) for name, table in self._tables.items()}
        return msgspec.json.encode({"version": f"{self._word}.{self._version}", "whole": not since, "tables": changes})


def flatten(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Iterate over a struct's fields with names such as "health.now.accuracy"; figures are rounded."""
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from flatten(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", _round_figure(value)


def _round_figure(value: Any) -> Any:
    """Round a fraction to four digits after the point, and a time (seconds since the epoch) to whole seconds."""
    if not isinstance(value, float):
        return value
    return round(value, 4) if abs(value) < 1e6 else round(value)
