from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedge.data import tables
from fedge.data.preprocessing import preprocess
from fedge.data.problems.multi_label import MultiLabel
from fedge.data.problems.reconstruction import Reconstruction
from fedge.data.problems.regression import Regression
from fedge.data.task import Column, Preprocessing, Schema, TaskSpec
from fedge.errors import ConfigError
from fedge.tasks import load_pool, load_task, read_device_data, read_device_inputs, read_parts, write_task

TOML = """
target = "state"
classes = ["good", "bad"]
sensitive = "private"
user = "owner"
ignore = ["note"]

[[columns]]
name = "load"
mean = 10.0
std = 2.0
missing = 10.0

[[columns]]
name = "fuel"
categories = ["gas", "oil"]
"""
CSV = """note,load,fuel,state,private,owner
x,12,gas,good,0,ann
"a, b",,oil,bad,TRUE,bob
,8.5,oil,bad,0,ann
"""


@pytest.fixture
def schema(tmp_path: Path) -> Schema:
    (tmp_path / "engines.toml").write_text(TOML)
    return tables.read_schema(tmp_path / "engines.toml")


def written(folder: Path, text: str = CSV) -> Path:
    (folder / "rows.csv").write_text(text)
    return folder / "rows.csv"


def parquet(folder: Path, **columns: list[Any]) -> Path:
    pq.write_table(pa.table(columns), folder / "rows.parquet")
    return folder / "rows.parquet"


def test_a_table_becomes_numbers_as_its_schema_says(schema: Schema, tmp_path: Path) -> None:
    found = tables.read_table(schema, written(tmp_path))
    assert found["x"].tolist() == [[12, 1, 0], [10, 0, 1], [8.5, 0, 1]]
    assert found["y"].tolist() == [0, 1, 1]
    assert found["sensitive"].tolist() == [False, True, False]
    assert found["user"].tolist() == [0, 1, 0]


def test_parquet_gives_the_same_numbers_as_csv(schema: Schema, tmp_path: Path) -> None:
    file = parquet(
        tmp_path,
        load=[12, None, 8.5],
        fuel=["gas", "oil", "oil"],
        state=["good", "bad", "bad"],
        private=[False, True, False],
        owner=["ann", "bob", "ann"],
    )
    found, wanted = tables.read_table(schema, file), tables.read_table(schema, written(tmp_path))
    assert {name: array.tolist() for name, array in found.items()} == {n: a.tolist() for n, a in wanted.items()}


def test_whole_numbers_that_a_table_holds_as_floats_name_classes_too(tmp_path: Path) -> None:
    schema = Schema(target="y", classes=("0", "1"), columns=(Column(name="a"),))
    assert tables.read_table(schema, parquet(tmp_path, a=[1, 2], y=[1.0, 0.0]))["y"].tolist() == [1, 0]


def test_the_network_sees_each_column_scaled_by_the_schema_and_never_by_the_rows(tmp_path: Path) -> None:
    (tmp_path / "engines.toml").write_text(TOML)
    task = load_task(str(tmp_path / "engines.toml"))
    assert task.classes == ("good", "bad")
    x = tables.read_table(tables.get_schema(task), written(tmp_path))["x"]
    assert preprocess(task, x).tolist() == [[1, 1, 0], [0, 0, 1], [-0.75, 0, 1]]
    assert preprocess(task, x[:1]).tolist() == [[1, 1, 0]]


def test_an_offset_costs_nothing_and_what_no_network_can_see_is_refused(tmp_path: Path) -> None:
    columns = (Column(name="a", mean=101349.0, std=0.01), Column(name="b", categories=("x", "y")), Column(name="c"))
    schema = Schema(target="s", classes=("0", "1"), columns=columns)
    task = TaskSpec(
        name="t", classes=("0", "1"), input_shape=(4,), model="mlp", preprocessing=Preprocessing(table=schema)
    )
    found = tables.read_table(schema, written(tmp_path, "a,b,c,s\n101349.013,x,0.1,1\n101348.99,y,7,0\n"))
    np.testing.assert_allclose(preprocess(task, found["x"]), [[1.3, 1, 0, 0.1], [-1, 0, 1, 7]], atol=1e-5)
    for cell, says in (
        ("3e38", "row 2: a is too large to compute with once it is sc"),
        ("1e39", "row 2: a is not a num"),
    ):
        with pytest.raises(ConfigError, match=says):
            tables.read_table(schema, written(tmp_path, f"a,b,c,s\n1,x,0.1,1\n{cell},x,7,0\n"))


def test_devices_read_marks_and_a_device_that_does_not_train_needs_no_target(tmp_path: Path) -> None:
    (tmp_path / "engines.toml").write_text(TOML)
    task = load_task(str(tmp_path / "engines.toml"))
    data = read_device_data(task, written(tmp_path), seed=0)
    assert (data.n_train + len(data.y_val), data.has_sensitive) == (3, True)
    rows = written(tmp_path, "load,fuel,private,owner\n12,gas,0,ann\n11,oil,1,bob\n")
    assert read_device_inputs(task, rows).tolist() == [[1, 1, 0]]
    with pytest.raises(ConfigError, match="lacks state"):
        read_device_data(task, rows, seed=0)


def test_a_simulation_deals_rows_out_by_person(tmp_path: Path) -> None:
    (tmp_path / "engines.toml").write_text(TOML)
    found = load_pool(str(tmp_path / "engines.toml"), written(tmp_path))
    assert found.user is not None
    assert found.user.tolist() == [0, 1, 0]


def test_a_schema_travels_in_the_task_and_other_tasks_keep_their_fingerprints(tmp_path: Path, schema: Schema) -> None:
    task = load_task(str(tmp_path / "engines.toml"))
    write_task(task, tmp_path / "task.json")
    assert load_task(str(tmp_path / "task.json")) == task
    assert load_task("digits").compute_fingerprint() == "1091a34b63fcb0b6"
    assert b"table" not in msgspec.json.encode(load_task("digits").preprocessing)
    with pytest.raises(msgspec.ValidationError, match="makes 3 columns, but"):
        msgspec.convert(
            {"name": "t", "classes": ["a", "b"], "input_shape": [4], "model": "mlp",
             "preprocessing": msgspec.to_builtins(Preprocessing(table=schema))},
            TaskSpec,
        )  # fmt: skip


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        ("12,gas", "twelve,gas", "row 1: load is not a number$"),
        ("12,gas", "inf,gas", "row 1: load is not a number$"),
        ("12,gas", "1e39,gas", "row 1: load is not a number$"),
        ("12,gas", "12,gaz", "row 1: fuel is not one of gas, oil$"),
        ("12,gas", "12,", "row 1: fuel is missing: expected gas, oil"),
        (",bad,0,ann", ",,0,ann", "row 3: state is missing: expected good, bad"),
        (",bad,0,ann", ",bad,,ann", "row 3: private is missing: expected 0, 1"),
        ("private,", "privat,", r"lacks private \(did you mean privat\?\); has privat, which"),
        ("note,", "load,", "has load twice"),
        ("x,12", "12", "line 2: the row has 5 cells, the header 6$"),
        ("ann\n", "ann\n\n", "line 3 is blank: delete it"),
        ("a, b", 'a"b', "not a table with commas"),
        ("good", "\udcff", "not a table with commas"),
    ],
)
def test_what_does_not_fit_is_refused_by_row_and_column(
    schema: Schema, tmp_path: Path, old: str, new: str, told: str
) -> None:
    file = tmp_path / "rows.csv"
    file.write_bytes(CSV.replace(old, new).encode(errors="surrogateescape"))
    with pytest.raises(ConfigError, match=told):
        tables.read_table(schema, file)


def test_a_number_without_a_value_is_refused_unless_the_schema_has_one(tmp_path: Path) -> None:
    schema = Schema(target="y", classes=("0", "1"), columns=(Column(name="a"),))
    for missing in ("", "NA", "nan"):
        with pytest.raises(ConfigError, match="row 2: a is missing"):
            tables.read_table(schema, written(tmp_path, f"a,y\n1,0\n{missing},1\n"))


def test_a_category_may_be_called_as_a_missing_value_is(tmp_path: Path) -> None:
    columns = (Column(name="region", categories=("EU", "NA"), missing="EU"),)
    schema = Schema(target="y", classes=("0", "1"), columns=columns)
    assert tables.read_table(schema, written(tmp_path, "region,y\nNA,0\n,1\n"))["x"].tolist() == [[0, 1], [1, 0]]


def test_rows_are_numbered_over_batches(tmp_path: Path) -> None:
    schema = Schema(target="y", classes=("0", "1"), columns=(Column(name="a"),))
    lines = [f"{i},{i % 2}" for i in range(tables.BATCH + 10)]
    found = tables.read_table(schema, written(tmp_path, "\n".join(["a,y", *lines])))
    assert found["x"][:, 0].tolist() == list(range(tables.BATCH + 10))
    lines[tables.BATCH + 4] = "?,1"
    with pytest.raises(ConfigError, match=f"row {tables.BATCH + 5}: a is not a number"):
        tables.read_table(schema, written(tmp_path, "\n".join(["a,y", *lines])))


@pytest.mark.parametrize("text", ["", "a,y\n", "\n"])
def test_a_table_without_rows_is_refused(tmp_path: Path, text: str) -> None:
    schema = Schema(target="y", classes=("0", "1"), columns=(Column(name="a"),))
    with pytest.raises(ConfigError, match=r"rows|lacks"):
        tables.read_table(schema, written(tmp_path, text))


@pytest.mark.usefixtures("little_memory")
def test_a_table_that_is_too_large_is_refused(schema: Schema, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="a quarter of it"):
        tables.read_table(schema, written(tmp_path))
    file = parquet(tmp_path, load=[1.0], fuel=["gas"], state=["good"], private=[0], owner=["a"])
    with pytest.raises(ConfigError, match="a quarter of it"):
        tables.read_table(schema, file)


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        ('name = "fuel"', 'name = "load"', "load stands twice"),
        ('"bad"', '"good"', "a class stands twice"),
        ("missing = 10.0", 'missing = "ten"', "'ten' is none"),
        ('"oil"]', '"oil"]\nmissing = "coal"', "'coal' of fuel is none of its categories"),
        ('"oil"]', '"oil"]\nmean = 1.0', "fuel has categories"),
        ("std = 2.0", "std = 0.0", "not a schema"),
        ("std = 2.0", "sdt = 2.0", "not a schema.*sdt"),
        ("target", "targte", "not a schema"),
        ("[[columns]]", "[[columns", "not a schema"),
    ],
)
def test_a_schema_that_contradicts_itself_is_refused(tmp_path: Path, old: str, new: str, told: str) -> None:
    (tmp_path / "t.toml").write_text(TOML.replace(old, new))
    with pytest.raises(ConfigError, match=told):
        tables.read_schema(tmp_path / "t.toml")


def test_a_schema_or_commas_that_are_missing_are_told(schema: Schema, tmp_path: Path) -> None:
    (tmp_path / "engines.toml").touch()
    with pytest.raises(ConfigError, match=r"no schema of a table at .*engine.toml \(did you mean engines.toml"):
        tables.read_schema(tmp_path / "engine.toml")
    (tmp_path / "rows.csv").write_text("a;b\n1;2\n")
    with pytest.raises(ConfigError, match="has ';' between its columns: save it with commas"):
        tables.read_table(schema, tmp_path / "rows.csv")


def test_a_table_needs_a_task_with_a_schema(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--task SCHEMA\.toml"):
        read_device_data(load_task("digits"), written(tmp_path), seed=0)


def test_without_pyarrow_parquet_says_what_to_install(
    schema: Schema, tmp_path: Path, not_installed: Callable[..., None]
) -> None:
    (tmp_path / "rows.parquet").touch()
    not_installed("pyarrow")
    with pytest.raises(ConfigError, match=r"\.\[tables\]"):
        tables.read_table(schema, tmp_path / "rows.parquet")


@given(data=st.binary(max_size=200), at=st.integers(0, 2000), suffix=st.sampled_from(tables.SUFFIXES))
def test_any_bytes_are_a_table_or_refused(
    tmp_path_factory: pytest.TempPathFactory, data: bytes, at: int, suffix: str
) -> None:
    folder = tmp_path_factory.mktemp("any")
    schema = Schema(target="y", classes=("0", "1"), columns=(Column(name="a"),))
    whole = written(folder, "a,y\n1,0\n2,1\n") if suffix == ".csv" else parquet(folder, a=[1, 2], y=[0, 1])
    content = bytearray(whole.read_bytes())
    content[at % len(content) : at % len(content) + len(data) // 4] = data
    whole.write_bytes(content)
    try:
        found = tables.read_table(schema, whole)
    except ConfigError:
        return
    assert np.isfinite(found["x"]).all()


COLUMNS = '[[columns]]\nname = "a"\n'
FORMS = {
    "numbers": (
        '[[targets]]\nname = "late"\nmean = 5.0\nstd = 2.0\nunit = "min"\n[[targets]]\nname = "cost"\n' + COLUMNS,
        "a,late,cost\n1,7,0.5\n2,3,-1\n",
        Regression(targets=("late", "cost"), mean=(5.0, 0.0), std=(2.0, 1.0), units=("min", "")),
        [[1, 0.5], [-1, -1]],
    ),
    "columns of labels": (
        'labels = ["wet", "hot"]\n' + COLUMNS,
        "a,hot,wet\n1,1,0\n2,TRUE,1\n",
        MultiLabel(labels=("wet", "hot")),
        [[0, 1], [1, 1]],
    ),
    "labels in one column": (
        'target = "tags"\nlabels = ["wet", "hot"]\n' + COLUMNS,
        "a,tags\n1,\n2,hot; wet\n3,wet\n",
        MultiLabel(labels=("wet", "hot")),
        [[0, 0], [1, 1], [1, 0]],
    ),
    "no targets": (COLUMNS, "a\n1\n2\n", Reconstruction(), [0, 0]),
    "marks of known anomalies": ('target = "broken"\n' + COLUMNS, "a,broken\n1,0\n2,1\n", Reconstruction(), [0, 1]),
}


@pytest.mark.parametrize("form", FORMS)
def test_a_schema_says_what_is_asked(form: str, tmp_path: Path) -> None:
    toml, rows, problem, y = FORMS[form]
    (tmp_path / "schema.toml").write_text(toml)
    task = load_task(str(tmp_path / "schema.toml"))
    assert task.problem == problem
    write_task(task, tmp_path / "task.json")
    assert load_task(str(tmp_path / "task.json")) == task
    found = read_parts(task, written(tmp_path, rows), seed=0)
    assert found.y.tolist() == y
    assert len(load_pool(str(tmp_path / "schema.toml"), written(tmp_path, rows)).y) == len(y)
    alone = written(tmp_path, "".join(f"{row.split(',')[0]}\n" for row in rows.splitlines()))
    assert len(read_device_inputs(task, alone)) == len(y), "a device that only predicts has no targets"


@pytest.mark.parametrize(
    ("toml", "says"),
    [
        ('classes = ["0", "1"]\n', r"classes need the column that holds them: name it \(target\)"),
        ('target = "y"\nclasses = ["0", "1"]\nlabels = ["b"]\n', "classes and labels are two questions: keep one"),
        ('target = "y"\n[[targets]]\nname = "b"\n', "targets are columns themselves: leave target out"),
        ('labels = ["b", "b"]\n', "b stands twice; a label stands twice"),
        ('labels = ["a"]\n', "a stands twice"),
        ('target = "y"\nlabels = ["b;c"]\n', "the label b;c holds ';'"),
    ],
)
def test_a_schema_that_asks_two_things_is_refused(toml: str, says: str, tmp_path: Path) -> None:
    (tmp_path / "schema.toml").write_text(toml + COLUMNS)
    with pytest.raises(ConfigError, match=says):
        tables.read_schema(tmp_path / "schema.toml")


@pytest.mark.parametrize(
    ("form", "rows", "says"),
    [
        ("numbers", "a,late,cost\n1,,0\n", "row 1: late is missing: leave the row out, or fill it in"),
        ("numbers", "a,late\n1,2\n", "lacks cost"),
        ("columns of labels", "a,hot,wet\n1,2,0\n", "row 1: hot is not one of 0, 1, false, true"),
        ("labels in one column", "a,tags\n1,hot;cold\n", "row 1: tags holds a label that is not one of wet, hot"),
    ],
)
def test_targets_that_are_none_are_refused_by_row(form: str, rows: str, says: str, tmp_path: Path) -> None:
    (tmp_path / "schema.toml").write_text(FORMS[form][0])
    task = load_task(str(tmp_path / "schema.toml"))
    with pytest.raises(ConfigError, match=says):
        read_device_data(task, written(tmp_path, rows), seed=0)
