"""What commands on a device show of each kind of problem: answers, samples, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click import Command
from click.testing import CliRunner
from PIL import Image

from deploy.commands.infer import infer
from deploy.commands.serve import serve
from edge_agent.samples import SampleStore
from edge_agent.samples.cli import collect, samples
from edge_agent.samples.label import label
from fedge.data.task import list_differences
from fedge.errors import ConfigError
from tests.integration.test_problems_at_work import install
from tests.support.own_problem import NEAREST
from tests.support.problem_bundles import KINDS, Kind, make_kind


@pytest.fixture(scope="module", params=KINDS)
def kind(request: pytest.FixtureRequest) -> Kind:
    return make_kind(request.param)


@pytest.fixture(scope="module")
def bundle(kind: Kind, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return kind.write_bundle(tmp_path_factory.mktemp("bundle") / "1", release=1, steps=150)


def run(command: Command, *arguments: object) -> str:
    result = CliRunner().invoke(command, [*map(str, arguments)])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == 0, result.output
    return result.stdout


RECORDS: dict[str, Any] = {
    "classification": lambda r, k: r["predictions"] == k.y[:3].tolist() and r["accuracy"] > 0.9,
    "multi-label": lambda r, k: np.mean(r["labels"] == (k.y[:3] > 0)) > 0.8 and r["macro_f1"] > 0.5,
    "regression": lambda r, k: (
        np.allclose(r["values"], k.y[:3], atol=3) and r["units"] == ["min", "kg"] and r["r2"] > 0.9
    ),
    "segmentation": lambda r, k: r["mask"] == k.y[:3].tolist() and r["mean_iou"] > 0.9,
    "reconstruction": lambda r, k: len(r["surprise"]) == 3 and r["threshold"] > r["surprise"][0] and "likelihood" in r,
    "own": lambda r, k: np.shape(r["outputs"]) == (3, 1, 2) and r["score"] is not None,
}
TEXTS = {
    "classification": ("probability", "accuracy"),
    "multi-label": ("labels", "macro_f1"),
    "regression": ("delay", " min", "±", "rmse load"),
    "segmentation": ("cat ", " %", "pixel_accuracy"),
    "reconstruction": ("usual", "threshold", "surprise"),
    "own": ("outputs",),
}


def test_infer_shows_answers_and_the_score_of_every_kind(kind: Kind, bundle: Path, tmp_path: Path) -> None:
    np.savez(tmp_path / "test.npz", x=kind.x[:3], y=kind.y[:3])
    record = json.loads(run(infer, bundle, tmp_path / "test.npz", "--json"))
    assert RECORDS[kind.task.name](record, kind)
    assert ("accuracy" in record) == kind.problem.RIGHT_OR_WRONG
    text = run(infer, bundle, tmp_path / "test.npz")
    assert all(word in text for word in TEXTS[kind.task.name])
    np.save(tmp_path / "x.npy", kind.x[0])
    unlabelled = json.loads(run(infer, bundle, tmp_path / "x.npy", "--json"))[kind.problem.SCORE]
    assert (unlabelled is None) == (kind.task.name != "reconstruction")  # how usual an input is needs no label


def test_infer_keeps_the_promised_coverage_or_says_that_the_kind_has_no_sets(
    kind: Kind, bundle: Path, tmp_path: Path
) -> None:
    np.savez(tmp_path / "test.npz", x=kind.x[60:], y=kind.y[60:])
    if not kind.problem.SETS:
        with pytest.raises(ConfigError, match="only for classification and regression"):
            run(infer, bundle, tmp_path / "test.npz", "--coverage", 0.9)
        return
    record = json.loads(run(infer, bundle, tmp_path / "test.npz", "--coverage", 0.9, "--json"))
    assert record["coverage"]["found"] > 0.85
    if kind.task.name == "regression":
        within = (record["low"] <= kind.y[60:]) & (kind.y[60:] <= record["high"])
        assert within.all(axis=1).mean() == pytest.approx(record["coverage"]["found"])
    else:
        names = ["abc"[y] in held.split(",") for y, held in zip(kind.y[60:], record["set_names"], strict=True)]
        assert np.mean(names) == pytest.approx(record["coverage"]["found"])
    assert "coverage wanted 0.9, found " in run(infer, bundle, tmp_path / "test.npz", "--coverage", 0.9)
    few = run(infer, bundle, tmp_path / "test.npz", "--coverage", 0.99)
    assert "coverage 0.99 needs 99 validation samples, and the bundle has 60: every answer is in the set" in few


def test_masks_become_pictures_whose_pixels_are_class_numbers(tmp_path: Path) -> None:
    kind = make_kind("segmentation")
    bundle = kind.write_bundle(tmp_path / "1", release=1, steps=150)
    np.save(tmp_path / "two.npy", kind.x[:2])
    record = json.loads(run(infer, bundle, tmp_path / "two.npy", "--out", tmp_path / "masks", "--json"))
    found = [np.asarray(Image.open(file)) for file in record["mask_files"]]
    assert [Path(file).name for file in record["mask_files"]] == ["two-0.png", "two-1.png"]
    assert np.array_equal(found, record["mask"])
    other = make_kind("regression")
    bundle = other.write_bundle(tmp_path / "2", release=1, steps=1)
    np.save(tmp_path / "x.npy", other.x[:2])
    with pytest.raises(ConfigError, match="--out is for masks, and this bundle's problem is regression"):
        run(infer, bundle, tmp_path / "x.npy", "--out", tmp_path / "masks")


def test_outputs_are_decoded_by_the_class_that_the_command_names_alone(tmp_path: Path) -> None:
    kind = make_kind("own")
    bundle = kind.write_bundle(tmp_path / "1", release=1, steps=50)
    np.save(tmp_path / "x.npy", kind.x[:2])
    record = json.loads(run(infer, bundle, tmp_path / "x.npy", "--decode", NEAREST, "--json"))
    assert np.allclose(record["decoded"], np.array(record["outputs"])[:, 0])
    assert "decoded" in run(infer, bundle, tmp_path / "x.npy", "--decode", NEAREST)
    assert "decoded" not in json.loads(run(infer, bundle, tmp_path / "x.npy", "--json"))
    (tmp_path / "fedge.toml").write_text(f'[infer]\ndecode = "{NEAREST}"\n')
    with pytest.raises(ConfigError, match="decode"):
        run(infer, bundle, tmp_path / "x.npy", "--config", tmp_path / "fedge.toml")


def test_samples_are_listed_shown_and_exported_with_their_targets(kind: Kind, tmp_path: Path) -> None:
    with SampleStore(tmp_path, kind.task) as store:
        for x, y in zip(kind.x[:5], kind.convert()[:5], strict=True):
            store.add(x, y, origin="python")
    told = json.loads(run(samples, "list", tmp_path, "--json"))
    assert len(told["samples"]) == 5
    if not kind.problem.GROUPED:
        assert np.allclose(told["samples"][-1]["target"], kind.y[0], rtol=1e-5)
    assert kind.problem.describe_target(kind.convert()[0]) in run(samples, "list", tmp_path)
    assert kind.problem.describe_target(kind.convert()[1]) in run(samples, "show", tmp_path, 2)
    run(samples, "export", tmp_path, tmp_path / "out.npz")
    with np.load(tmp_path / "out.npz") as arrays:
        np.testing.assert_allclose(arrays["y"], kind.y[:5], rtol=1e-5)


def test_rows_of_an_npz_are_collected_once_with_their_targets(kind: Kind, tmp_path: Path) -> None:
    SampleStore(tmp_path, kind.task).close()
    np.savez(tmp_path / "rows.npz", x=kind.x[:3], y=kind.y[:3])
    assert json.loads(run(collect, tmp_path, tmp_path / "rows.npz", "--once", "--json"))["added"] == 3
    np.savez(tmp_path / "rows.npz", x=kind.x[:5], y=kind.y[:5])
    assert json.loads(run(collect, tmp_path, tmp_path / "rows.npz", "--once", "--json"))["added"] == 2
    with SampleStore(tmp_path) as store:
        np.testing.assert_allclose(store.read_labelled().y, kind.convert()[:5], rtol=1e-6)


def test_what_is_for_classes_alone_says_what_to_do(tmp_path: Path) -> None:
    kind = make_kind("regression")
    bundle = kind.write_bundle(tmp_path / "1", release=1, steps=1)
    install(tmp_path / "home", bundle, kind)
    with pytest.raises(ConfigError, match=r"--adapt-prior is for classification.*leave the option out"):
        run(serve, "--home", tmp_path / "home", "--adapt-prior")
    with pytest.raises(ConfigError, match="its problem is regression; send targets to `fedge serve` as feedback"):
        run(label, tmp_path / "home", "--port", 0)
    with pytest.raises(ConfigError, match="cat is no class, since task regression has none"):
        run(samples, "list", tmp_path / "home", "--class", "cat")


def test_a_bundle_and_samples_of_another_problem_are_refused_by_its_name(kind: Kind, tmp_path: Path) -> None:
    other = make_kind("regression" if kind.task.name == "own" else "own")
    assert f"{other.problem.NAME} in place of {kind.problem.NAME}" in list_differences(kind.task, other.task)
    with SampleStore(tmp_path, kind.task) as store:
        store.add(kind.x[0], kind.convert()[0], origin="python")
    with pytest.raises(ConfigError, match="give another --home, or move the folder away"):
        SampleStore(tmp_path, other.task)
