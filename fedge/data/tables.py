"""Tables, CSV or Parquet, and the schema that defines their columns.

The schema is a TOML file that is equal on all machines. It defines which columns become numbers and how they are
scaled, so nothing is learned from a device's rows. Nothing here needs torch.
"""

from __future__ import annotations

import csv
import os
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from fedge.data.npz import require_room
from fedge.data.scaling import FURTHEST, LARGEST, choose_precision
from fedge.data.task import Column, Schema, TaskSpec
from fedge.errors import ConfigError, raise_as
from fedge.system.files import require_there
from fedge.system.loading import make_missing_package_error
from fedge.system.text import escape_controls, suggest_nearest

SUFFIXES: Final = (".csv", ".parquet")
NO_VALUE: Final = frozenset({"", "na", "nan", "null"})
"""Words of cells that count as missing, in upper or lower case."""
MARKS: Final = {"0": 0, "1": 1, "false": 0, "true": 1}
SEPARATOR: Final = ";"
"""Sign between the labels of a row that are in one cell."""
BATCH: Final = 4096
"""Number of rows that are read together."""

Cells = Mapping[str, Sequence[object]]


def read_schema(file: Path) -> Schema:
    """Read the schema in a TOML file.

    Raises:
        ConfigError: the schema cannot be read, or contradicts itself; the text says where.
    """
    require_there(file, "schema of a table")
    with raise_as(ConfigError, f"{file} is not a schema of a table", on=(OSError, ValueError, RecursionError)):
        schema = msgspec.convert(tomllib.loads(file.read_text(encoding="utf-8")), Schema)
    names = [c.name for c in schema.columns]
    names += [*schema.target_columns, *filter(None, (schema.sensitive, schema.user)), *schema.ignore]
    faults = [f"{name} stands twice" for name in dict.fromkeys(names) if names.count(name) > 1]
    faults += [*_find_faults_of_targets(schema)]
    for column in schema.columns:
        if not column.categories:
            if isinstance(column.missing, str):
                faults.append(f"{column.name} is a number, and missing = {column.missing!r} is none")
            elif column.missing is not None and not _fits(column, column.missing):
                faults.append(
                    f"missing = {column.missing!r} of {column.name} is too large to compute with once it is scaled"
                )
        elif column.missing not in (None, *column.categories):
            faults.append(f"missing = {column.missing!r} of {column.name} is none of its categories")
        elif (column.mean, column.std) != (0, 1) or len(set(column.categories)) < len(column.categories):
            faults.append(f"{column.name} has categories: each once, and neither mean nor std")
    if faults:
        raise ConfigError(f"{file}: {'; '.join(faults)}")
    return schema


def _find_faults_of_targets(schema: Schema) -> Iterator[str]:
    """Yield what contradicts itself in what a schema asks."""
    asked = {"classes": schema.classes, "targets": schema.targets, "labels": schema.labels}
    if len(there := [name for name, value in asked.items() if value]) > 1:
        yield f"{' and '.join(there)} are two questions: keep one"
    if schema.classes and not schema.target:
        yield "classes need the column that holds them: name it (target)"
    if schema.targets and schema.target:
        yield "targets are columns themselves: leave target out"
    for what, names in (("class", schema.classes), ("label", schema.labels)):
        if len(set(names or ())) < len(names or ()):
            yield f"a {what} stands twice"
    if schema.target and (odd := [label for label in schema.labels or () if SEPARATOR in label]):
        yield f"the label {odd[0]} holds {SEPARATOR!r}, which stands between labels"


def get_schema(task: TaskSpec) -> Schema:
    """Return the schema of a task whose samples are rows.

    Raises:
        ConfigError: the task's samples are not rows.
    """
    if not task.preprocessing.table:
        raise ConfigError(f"task {task.name} takes no tables: name a schema, --task SCHEMA.toml")
    return task.preprocessing.table


def get_scale(schema: Schema) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return the mean and the std of each network input, (width,) each; 0 and 1 for inputs of categories."""
    widths = [column.width for column in schema.columns]
    mean, std = (np.repeat(values, widths) for values in zip(*((c.mean, c.std) for c in schema.columns), strict=True))
    return mean.astype(np.float64), std.astype(np.float64)


def read_table(
    schema: Schema, file: Path, *, labelled: bool = True, only_known: bool = False
) -> dict[str, NDArray[Any]]:
    """Read a table's rows into arrays like those of an .npz; unless `labelled`, columns of targets may be missing.

    If `only_known`, the caller leaves out rows of classes that the schema does not have; they get higher numbers.

    Returns:
        x (n, width), unscaled, in float32, or in float64 if a mean is large compared with its std; y unless there are
        no targets, class numbers or marks (n,) int64, numbers (n, targets) float64, or zeros and ones (n, labels)
        int64; and if the schema names their columns, sensitive (n,) bool and user (n,) int64, numbered in order of
        appearance.

    Raises:
        ConfigError: the file cannot be read, is too large for the memory, has other columns than the schema, or has an
            invalid cell; the text then names the row, counted from 1 after the header.
    """
    parts: list[dict[str, NDArray[Any]]] = []
    users: dict[object, int] = {}
    n = 0
    kind = choose_precision(*get_scale(schema))
    require_there(file, "table")
    for cells in (
        _read_csv(schema, file, labelled) if file.suffix.lower() == ".csv" else _read_parquet(schema, file, labelled)
    ):
        reader = _Reader(file, n + 1)
        part = {"x": np.concatenate([reader.read_inputs(c, cells[c.name]) for c in schema.columns], axis=1, dtype=kind)}
        if schema.target_columns and all(name in cells for name in schema.target_columns):
            part["y"] = reader.read_targets(schema, cells, only_known=only_known)
        if schema.sensitive:
            part["sensitive"] = reader.read_marks(schema.sensitive, cells[schema.sensitive]).astype(np.bool_)
        if schema.user:
            part["user"] = np.array([users.setdefault(str(who), len(users)) for who in cells[schema.user]], np.int64)
        parts.append(part)
        n += len(part["x"])
        require_room(file, part["x"].itemsize * n * schema.width)
    if not parts:
        raise ConfigError(f"{file} has no rows")
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


class _Reader:
    """Converts the cells of one batch to numbers; `first` is the number of the batch's first row, for errors."""

    def __init__(self, file: Path, first: int) -> None:
        self._file, self._first = file, first

    def read_inputs(
        self, column: Column, cells: Sequence[object], empty: str = "give the column a `missing` in the schema"
    ) -> NDArray[np.floating]:
        """Return a column's network inputs, (n, width); `empty` advises what to do about an empty cell."""
        if column.categories:
            known = {name: number for number, name in enumerate(column.categories)}
            return np.eye(len(known), dtype=np.float32)[self.number_cells(column.name, cells, known, column.missing)]
        found = np.array([self._read_number(i, column, cell, empty) for i, cell in enumerate(cells)], np.float64)
        return found[:, np.newaxis]

    def read_targets(self, schema: Schema, cells: Cells, *, only_known: bool) -> NDArray[Any]:
        """Return what is to be predicted, (n, ...), as `read_table` does."""
        if schema.targets:
            columns = [Column(name=target.name, mean=target.mean, std=target.std) for target in schema.targets]
            return np.concatenate([self.read_inputs(c, cells[c.name], "leave the row out") for c in columns], axis=1)
        if schema.labels and not schema.target:
            return np.stack([self.read_marks(name, cells[name]) for name in schema.labels], axis=1)
        assert schema.target
        if schema.labels:
            return self._read_sets(schema.target, cells[schema.target], schema.labels)
        if not schema.classes:
            return self.read_marks(schema.target, cells[schema.target])
        numbers = {name: number for number, name in enumerate(schema.classes)}
        for word in map(_format_cell, cells[schema.target]) if only_known else ():
            if word.lower() not in NO_VALUE:
                numbers.setdefault(word, len(numbers))
        return self.number_cells(schema.target, cells[schema.target], numbers)

    def read_marks(self, name: str, cells: Sequence[object]) -> NDArray[np.int64]:
        """Return 0 or 1 for each cell, (n,)."""
        return self.number_cells(name, [_format_cell(cell).lower() for cell in cells], MARKS)

    def _read_sets(self, name: str, cells: Sequence[object], labels: Sequence[str]) -> NDArray[np.int64]:
        """Return which labels each cell holds, (n, labels); an empty cell holds none."""
        place, found = {label: k for k, label in enumerate(labels)}, np.zeros((len(cells), len(labels)), np.int64)
        for i, cell in enumerate(cells):
            words = [word.strip() for word in _format_cell(cell).split(SEPARATOR)]
            for word in (word for word in words if word.lower() not in NO_VALUE):
                if word not in place:
                    known = ", ".join(labels[:20])
                    raise self._make_error(
                        i, name, f"holds a label that is not one of {known}; '{SEPARATOR}' separates several"
                    )
                found[i, place[word]] = 1
        return found

    def number_cells(
        self, name: str, cells: Sequence[object], known: Mapping[str, int], missing: object = None
    ) -> NDArray[np.int64]:
        """Return the number for each cell's word, (n,) int64."""
        found = np.empty(len(cells), np.int64)
        for i, cell in enumerate(cells):
            word = _format_cell(cell)
            if word not in known and word.lower() in NO_VALUE:
                word = "" if missing is None else str(missing)
            if word not in known:
                fault = "is not one of" if word else "is missing: expected"
                raise self._make_error(i, name, f"{fault} {', '.join([*known][:20])}")
            found[i] = known[word]
        return found

    def _read_number(self, i: int, column: Column, cell: object, empty: str) -> float:
        word = _format_cell(cell)
        if word.lower() in NO_VALUE:
            if column.missing is None:
                raise self._make_error(i, column.name, f"is missing: {empty}, or fill it in")
            return float(column.missing)
        try:
            value = float(word)
        except ValueError:
            value = np.inf
        if not abs(value) <= LARGEST:
            raise self._make_error(i, column.name, "is not a number")
        if not _fits(column, value):
            what = "is too large to compute with once it is scaled: empty the cell if it is missing"
            raise self._make_error(i, column.name, what)
        return value

    def _make_error(self, i: int, name: str, what: str) -> ConfigError:
        """Make an error that names the cell but not its value, since the text gets into logs, which people share."""
        return ConfigError(f"{self._file}, row {self._first + i}: {name} {what}")


def _fits(column: Column, value: float) -> bool:
    """Return whether a number is small enough to compute with, also once it is scaled."""
    return abs(value) <= LARGEST and abs(value - column.mean) <= FURTHEST * column.std


def _format_cell(cell: object) -> str:
    """Return a cell as text, without the ".0" of a whole number that is stored as a float because of gaps."""
    if isinstance(cell, float) and cell.is_integer():
        return str(int(cell))
    return "" if cell is None else str(cell).strip()


def _read_csv(schema: Schema, file: Path, labelled: bool) -> Iterator[Cells]:
    try:
        with file.open(encoding="utf-8-sig", newline="") as opened:
            require_room(file, os.fstat(opened.fileno()).st_size)
            rows = csv.reader(opened, strict=True)
            header = [name.strip() for name in next(rows, [])]
            if len(header) == 1 and (other := next((mark for mark in ";\t|" if mark in header[0]), None)):
                raise ConfigError(f"{file} has {other!r} between its columns: save it with commas")
            wanted = _select_columns(schema, file, header, labelled)
            whole = (_require_whole(row, header, f"{file}, line {rows.line_num}") for row in rows)
            for batch in iter(lambda: [*islice(whole, BATCH)], []):
                cells = dict(zip(header, zip(*batch, strict=True), strict=True))
                yield {name: cells[name] for name in wanted}
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise ConfigError(f"{file} is not a table with commas, in UTF-8, with a header: {error}") from error


def _require_whole(row: list[str], header: list[str], where: str) -> list[str]:
    """Return the row, after a check that it has a cell for each column."""
    if not row:
        raise ConfigError(f"{where} is blank: delete it")
    if len(row) != len(header):
        raise ConfigError(f"{where}: the row has {len(row)} cells, the header {len(header)}")
    return row


def _read_parquet(schema: Schema, file: Path, labelled: bool) -> Iterator[Cells]:
    try:
        from pyarrow import parquet
    except ModuleNotFoundError as error:
        raise make_missing_package_error(error, "a Parquet table", "tables") from error
    try:
        with parquet.ParquetFile(file, memory_map=True) as opened:
            wanted = _select_columns(schema, file, opened.schema_arrow.names, labelled)
            groups = [opened.metadata.row_group(i) for i in range(opened.metadata.num_row_groups)]
            require_room(file, max((group.total_byte_size for group in groups), default=0))
            for batch in opened.iter_batches(BATCH, columns=wanted):
                yield batch.to_pydict()
    except (OSError, ValueError, MemoryError, NotImplementedError) as error:  # pyarrow's own are subclasses of these
        raise ConfigError(f"{file} is not a Parquet table: {error}") from error


def _select_columns(schema: Schema, file: Path, there: Iterable[str], labelled: bool) -> list[str]:
    """Return the columns to read, each once."""
    there = list(there)
    needed = [*(c.name for c in schema.columns), *filter(None, (schema.sensitive, schema.user))]
    needed += [name for name in schema.target_columns if labelled or name in there]
    faults = [f"lacks {name}{suggest_nearest(name, there)}" for name in needed if name not in there]
    faults += [f"has {name} twice" for name in needed if there.count(name) > 1]
    faults += [f"has {name}, which the schema does not name" for name in there if name not in {*needed, *schema.ignore}]
    if faults:
        more = f"; and {len(faults) - 4} more" if len(faults) > 4 else ""
        text = escape_controls("; ".join(faults[:4]))
        raise ConfigError(f"{file} {text}{more}. Mend the table, or the schema: `ignore` names columns to leave out")
    return needed
