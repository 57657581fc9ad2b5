"""A watched source: what is new comes once, whatever is killed, given up or written again."""

from __future__ import annotations

import csv
import os
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from edge_agent.samples import SampleStore
from edge_agent.samples.collecting import collect_samples
from fedge.data.preprocessing import load_image
from fedge.data.task import Column, Preprocessing, Schema, TaskSpec
from fedge.errors import ConfigError

PICTURES = TaskSpec(
    name="image-folder",
    classes=("cat", "dog"),
    input_shape=(3, 8, 8),
    model="mlp",
    preprocessing=Preprocessing(scale=255.0, image_mode="RGB"),
)
SCHEMA = Schema(target="state", classes=("ok", "worn"), columns=(Column(name="a"), Column(name="b")), sensitive="mark")
ROWS = TaskSpec(
    name="table", classes=SCHEMA.classes, input_shape=(2,), model="mlp", preprocessing=Preprocessing(table=SCHEMA)
)
ARRAYS = TaskSpec(name="arrays", classes=("a", "b", "c"), input_shape=(2,), model="mlp")


def picture(path: Path, shade: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(np.full((8, 8, 3), shade, np.uint8)).save(path)


def write_rows(file: Path, n: int) -> None:
    with file.open("w", newline="") as opened:
        csv.writer(opened).writerows(
            [("a", "b", "state", "mark"), *((k, 1, "worn" if k % 2 else "ok", k % 5 == 0) for k in range(n))]
        )


def save_arrays(file: Path, numbers: range) -> None:
    x = np.array([[k, 0] for k in numbers], np.float32)
    np.savez(file, x=x, y=np.array(numbers) % 3)


def test_each_new_picture_comes_once_with_class_mark_and_origin(tmp_path: Path) -> None:
    folder = tmp_path / "camera"
    for k, name in enumerate(("cat/1.png", "dog/porch/2.png", "dog/3.png")):
        picture(folder / name, 10 * k)
    (folder / "sensitive.txt").write_text("dog/3.png\n")
    (folder / "dog" / "porch" / "2.png").rename(folder / "dog" / "2.png")
    with SampleStore(tmp_path, PICTURES) as store:
        assert collect_samples(store, folder).n_added == 3
        assert collect_samples(store, folder).n_added == 0
        picture(folder / "cat/4.png", 200)
        assert collect_samples(store, folder).n_added == 1
        found = {s.origin: (s.label, s.sensitive) for s in store.list_samples()}
        assert found == {
            "folder:cat/1.png": (0, False),
            "folder:dog/2.png": (1, False),
            "folder:dog/3.png": (1, True),
            "folder:cat/4.png": (0, False),
        }
        assert np.array_equal(
            store.read_labelled().x[0], np.moveaxis(load_image(PICTURES, folder / "cat/1.png"), -1, 0)
        )


def test_a_picture_that_cannot_be_read_waits_for_its_rest(tmp_path: Path) -> None:
    folder = tmp_path / "camera"
    picture(folder / "cat" / "1.png", 1)
    whole = (folder / "cat" / "1.png").read_bytes()
    (folder / "cat" / "1.png").write_bytes(whole[:40])
    picture(folder / "cow" / "2.png", 2)
    with SampleStore(tmp_path, PICTURES) as store:
        found = collect_samples(store, folder)
        assert (found.n_added, sorted(found.problems)) == (0, ["cat/1.png", "cow/2.png"])
        assert "cow is no class of the task (cat, dog)" in found.problems["cow/2.png"]
        (folder / "cat" / "1.png").write_bytes(whole)
        assert collect_samples(store, folder).n_added == 1


def test_a_picture_whose_name_is_not_utf_8_is_a_problem_and_the_others_come(tmp_path: Path) -> None:
    picture(tmp_path / "camera/cat/1.png", 10)
    picture(tmp_path / "camera/cat" / os.fsdecode(b"\xff.png"), 20)
    foreign = tmp_path / os.fsdecode(b"\xfe")
    foreign.mkdir()
    with SampleStore(tmp_path, PICTURES) as store:
        found = collect_samples(store, tmp_path / "camera")
        assert (found.n_added, found.problems) == (1, {"cat/\\udcff.png": "its name is not UTF-8"})
        with pytest.raises(ConfigError, match=r"\\udcfe is not UTF-8: rename it"):
            collect_samples(store, foreign)


def test_pictures_in_no_classs_folder_have_no_label(tmp_path: Path) -> None:
    picture(tmp_path / "camera" / "1.png", 1)
    with SampleStore(tmp_path, PICTURES) as store:
        assert collect_samples(store, tmp_path / "camera").n_added == 0
    (tmp_path / "samples.toml").write_text("[samples]\nunlabelled = 5\n")
    picture(tmp_path / "camera" / "2.png", 2)
    with SampleStore(tmp_path, PICTURES) as store:
        assert collect_samples(store, tmp_path / "camera").n_added == 1
        assert [s.label for s in store.list_samples()] == [None]


def test_rows_that_are_appended_come_once_with_their_marks(tmp_path: Path) -> None:
    file = tmp_path / "rows.csv"
    write_rows(file, 10)
    with SampleStore(tmp_path, ROWS) as store:
        assert collect_samples(store, file).n_added == 10
        write_rows(file, 13)
        assert collect_samples(store, file).n_added == 3
        found = store.read_labelled()
        assert found.y.tolist() == [k % 2 for k in range(13)]
        assert found.sensitive.tolist() == [k % 5 == 0 for k in range(13)]


def test_what_the_store_gave_up_does_not_come_again_unless_the_file_is_another(tmp_path: Path) -> None:
    (tmp_path / "samples.toml").write_text("[samples]\nper_class = 2\nkeep_old = 0.0\n")
    file = tmp_path / "d.npz"
    save_arrays(file, range(30))
    with SampleStore(tmp_path, ARRAYS) as store:
        assert collect_samples(store, file).n_added == 30
    for numbers, arrived in ((range(33), 33), (range(33), 33)):
        save_arrays(file, numbers)
        with SampleStore(tmp_path) as store:
            collect_samples(store, file)
            assert store.n_arrived == arrived
            assert sorted(store.read_labelled().x[:, 0].tolist()) == [*range(27, 33)]


def test_a_file_that_is_just_being_written_is_a_problem_of_this_look_alone(tmp_path: Path) -> None:
    file = tmp_path / "d.npz"
    save_arrays(file, range(3))
    whole = file.read_bytes()
    file.write_bytes(whole[:50])
    with SampleStore(tmp_path, ARRAYS) as store:
        assert list(collect_samples(store, file).problems) == ["d.npz"]
        file.write_bytes(whole)
        assert collect_samples(store, file).n_added == 3
        with pytest.raises(ConfigError, match="there is no folder or file of samples"):
            collect_samples(store, tmp_path / "e.npz")
