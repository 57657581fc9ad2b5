"""`fedge samples` and `fedge collect` as the owner of a device meets them."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner, Result
from PIL import Image

from edge_agent.samples import SampleStore
from fedge.commands.cli import command
from fedge.data.task import Preprocessing, TaskSpec
from fedge.errors import ConfigError
from fedge.tasks import read_device_data

TASK = TaskSpec(
    name="image-folder",
    classes=("cat", "dog"),
    input_shape=(1, 8, 8),
    model="mlp",
    preprocessing=Preprocessing(scale=255.0, image_mode="L"),
)


def run(*words: object) -> Result:
    return CliRunner().invoke(command, [str(word) for word in words], catch_exceptions=False, standalone_mode=False)


def told(*words: object) -> Any:
    return json.loads(run(*words, "--json").output)


def picture(path: Path, shade: int) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(np.full((8, 8), shade, np.uint8)).save(path)
    return path


@pytest.fixture
def home(tmp_path: Path) -> Path:
    home = tmp_path / "cam1"
    with SampleStore(home, TASK) as store:
        for k in range(30):
            x = np.full((8, 8), k, np.uint8)
            store.add(x, k % 2, origin="http" if k < 20 else "folder:porch/1.png", sensitive=k % 10 == 9, at=float(k))
    return home


def test_the_list_has_the_newest_last_and_the_totals(home: Path) -> None:
    lines = run("samples", "list", home, "--last", 2).output.splitlines()
    assert lines[0].split()[0] == "29"
    assert "1970-01-01 00:00:29 UTC  dog" in lines[1]
    assert "sensitive, from folder:porch/1.png" in lines[1]
    assert lines[-1] == "27 samples came that are not sensitive; data version 27"
    found = told("samples", "list", home, "--class", "cat")
    assert {s["label"] for s in found["samples"]} == {0}
    assert [(t["label"], t["sensitive"], t["n"]) for t in found["totals"]] == [
        (0, False, 15),
        (1, False, 12),
        (1, True, 3),
    ]


def test_a_sample_is_shown_also_as_a_picture(home: Path, tmp_path: Path) -> None:
    found = told("samples", "show", home, 8, "--image", tmp_path / "8.png")
    assert (found["number"], found["label"], found["max"]) == (8, 1, 7.0)
    assert np.asarray(Image.open(tmp_path / "8.png")).tolist() == [[7] * 8] * 8


def test_samples_are_marked_and_deleted(home: Path) -> None:
    assert told("samples", "mark", home, 1, 2) == {"changed": 2}
    assert told("samples", "mark", home, 1, "--not-sensitive") == {"changed": 1}
    assert told("samples", "delete", home, 1, 2) == {"deleted": 2}
    assert told("samples", "delete", home, "--origin", "folder:porch", "--class", "cat") == {"deleted": 5}
    (home / "samples.toml").write_text('[samples]\nsensitive_folders = "porch"\n')
    assert told("samples", "mark", home, "--rules") == {"changed": 4}
    with pytest.raises(ConfigError, match="name the samples, a --class or an --origin"):
        run("samples", "delete", home)
    with pytest.raises(ConfigError, match="name the samples, or give --rules"):
        run("samples", "mark", home)


def test_an_export_is_data_for_an_agent(home: Path, tmp_path: Path) -> None:
    assert told("samples", "export", home, tmp_path / "d.npz")["exported"] == 27
    data = read_device_data(TASK, tmp_path / "d.npz", seed=0)
    assert not data.has_sensitive
    assert told("samples", "export", home, tmp_path / "d.npz", "--with-sensitive")["exported"] == 30
    assert read_device_data(TASK, tmp_path / "d.npz", seed=0).has_sensitive


def test_samples_are_added_from_pictures_folders_and_files(home: Path, tmp_path: Path) -> None:
    one = picture(tmp_path / "one.png", 100)
    picture(tmp_path / "more" / "dog" / "2.png", 101)
    np.savez(tmp_path / "d.npz", x=np.full((2, 8, 8), [[[102]], [[103]]], np.uint8), y=[0, 1])
    assert told("samples", "add", home, one, "--class", "cat", "--sensitive") == {"added": 1}
    assert told("samples", "add", home, tmp_path / "more", tmp_path / "d.npz") == {"added": 3}
    assert told("samples", "add", home, tmp_path / "more") == {"added": 0}
    found = told("samples", "list", home, "--last", 4)["samples"]
    assert [(s["label"], s["sensitive"]) for s in found] == [(1, False), (0, False), (1, False), (0, True)]
    with pytest.raises(ConfigError, match="cats is no class of the task"):
        run("samples", "add", home, one, "--class", "cats")


def test_a_home_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="name the folder that `fedge agent`"):
        run("samples", "list", tmp_path / "nowhere")


@pytest.mark.process
def test_a_folder_is_watched_until_the_end(home: Path, tmp_path: Path) -> None:
    folder = tmp_path / "camera"
    picture(folder / "cat" / "1.png", 100)
    assert told("collect", home, folder, "--once") == {"source": str(folder), "added": 1}
    program = [sys.executable, "-m", "fedge", "collect", home, folder, "--every", "0.1", "--json"]
    with subprocess.Popen(program, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for k in (2, 3):
            picture(folder / ".new.png", 100 + k).rename(folder / "cat" / f"{k}.png")
            assert json.loads(process.stdout.readline())["added"] == 1
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 130
