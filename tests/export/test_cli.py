"""`fedge export`: verify and pack."""

import json

import numpy as np
import pytest
from click.testing import CliRunner

import deploy
from export.cli import export, find_newest_bundle
from fedge.bundle.manifest import MANIFEST, SKELETON
from fedge.errors import ConfigError, UpdateRejected
from tests.support.tables import mixture_of, write


@pytest.fixture
def home(tmp_path):
    logits = np.random.default_rng(0).normal(size=(2, 3, 4))
    for release in (2, 10, 9):
        write(tmp_path / "cam1" / "bundles" / str(release), logits + release, mixture_of(logits + release), release)
    return tmp_path / "cam1"


def run(*arguments):
    result = CliRunner().invoke(export, [str(a) for a in arguments])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.stdout


def test_the_newest_is_packed(home, tmp_path):
    (home / "bundles" / "10" / "note.txt").write_text("not of the bundle")
    record = json.loads(run(home, "--out", tmp_path / "out", "--json"))
    assert record["release"] == 10
    assert record["verified"] is True
    assert record["max_abs_diff"] < 1e-6
    assert record["digest"] == deploy.load(tmp_path / "out").digest
    assert {path.suffix for path in (tmp_path / "out").iterdir()} == {".json", ".onnx", ".safetensors"}


def test_without_out_it_only_verifies(home, tmp_path):
    text = run(home)
    assert "release 10" in text
    assert "digests verified" in text
    assert [path.name for path in tmp_path.iterdir()] == ["cam1"]


def test_several_homes_go_to_folders_of_their_names(home, tmp_path):
    home.rename(tmp_path / "cam2")
    logits = np.zeros((1, 2, 3))
    write(home / "bundles" / "1", logits, mixture_of(logits))
    run(home, tmp_path / "cam2", "--out", tmp_path / "out")
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["cam1", "cam2"]


def test_a_bundle_itself_may_be_named(home):
    assert find_newest_bundle(home / "bundles" / "2").manifest.release == 2


def test_a_damaged_bundle_is_refused_and_nothing_written(home, tmp_path):
    skeleton = home / "bundles" / "10" / SKELETON
    skeleton.write_bytes(skeleton.read_bytes()[:-1])
    with pytest.raises(UpdateRejected, match=SKELETON):
        run(home, "--out", tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["cam1"]


def test_an_older_one_that_is_damaged_does_not_keep_the_newest_from_being_packed(home, tmp_path):
    (home / "bundles" / "9" / SKELETON).unlink()
    run(home, "--out", tmp_path / "out")
    assert deploy.load(tmp_path / "out").manifest.release == 10


def test_unfinished_bundles_are_not_looked_at(home):
    (home / "bundles" / ".unfinished-x").mkdir()
    (home / "bundles" / ".unfinished-x" / MANIFEST).write_text("{}")
    assert find_newest_bundle(home).manifest.release == 10


def test_wrong_arguments(home, tmp_path):
    with pytest.raises(ConfigError, match="no bundle in"):
        run(tmp_path)
    with pytest.raises(ConfigError, match="exists already"):
        run(home, "--out", home)
