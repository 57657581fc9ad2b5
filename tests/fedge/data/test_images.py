import json
import os
import zipfile
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from fedge.data import images
from fedge.data.task import Preprocessing, TaskSpec
from fedge.errors import ConfigError

TASK = TaskSpec(
    name="image-folder", classes=("cat", "dog"), input_shape=(3, 4, 4), model="cnn",
    preprocessing=Preprocessing(scale=255.0, image_mode="RGB"),
)  # fmt: skip
NAMES = ["cat/1.png", "cat/2.JPG", "dog/1.jpeg"]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for shade, name in enumerate(NAMES):
        path = tmp_path / "set" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(np.full((4, 4, 3), 50 * shade, np.uint8)).save(path, format="PNG")
    (tmp_path / "set" / "cat" / "notes.txt").write_text("no image")
    return tmp_path / "set"


@pytest.fixture
def archive(folder: Path) -> Path:
    with zipfile.ZipFile(folder.parent / "set.zip", "w") as target:
        for name in NAMES:
            target.write(folder / name, f"train/{name}")
    return folder.parent / "set.zip"


def test_names_and_labels(folder: Path, archive: Path) -> None:
    assert images.list_images(folder) == NAMES
    assert images.list_images(archive) == [f"train/{name}" for name in NAMES]
    assert images.get_labels(images.list_images(archive), TASK.classes).tolist() == [0, 0, 1]


def test_pixels_come_in_the_order_of_the_names(folder: Path, archive: Path) -> None:
    for source in (folder, archive):
        x = images.load_images(TASK, source, images.list_images(source)[::-1])
        assert x.shape == (3, 4, 4, 3)
        assert x[:, 0, 0, 0].tolist() == [100, 50, 0]


def test_sources_without_class_folders_are_refused(tmp_path: Path) -> None:
    (tmp_path / "loose.png").write_bytes(b"")
    (tmp_path / "file.txt").write_text("x")
    (tmp_path / "empty").mkdir()
    for source in (tmp_path, tmp_path / "empty", tmp_path / "file.txt", tmp_path / "none"):
        with pytest.raises(ConfigError, match=r"folder"):
            images.list_images(source)


def test_a_class_whose_name_is_no_text_is_refused(folder: Path) -> None:
    (folder / "dog").rename(folder / os.fsdecode(b"do\xe9"))
    with pytest.raises(ConfigError, match=r"'do\\udce9/1.jpeg' is not UTF-8; rename it"):
        images.list_images(folder)


def test_unknown_classes_and_broken_images_are_named(folder: Path, archive: Path) -> None:
    with pytest.raises(ConfigError, match=r"\['dog'\]"):
        images.get_labels(NAMES, ("cat", "bird"))
    (folder / NAMES[1]).write_bytes(b"broken")
    with pytest.raises(ConfigError, match=r"2\.JPG"):
        images.load_images(TASK, folder, NAMES)


def test_marks(folder: Path) -> None:
    assert images.read_sensitive_flags(folder, NAMES).tolist() == [False, False, False]
    (folder / "sensitive.txt").write_text("dog/1.jpeg\n\n cat/1.png \n")
    assert images.read_sensitive_flags(folder, NAMES).tolist() == [True, False, True]
    (folder / "sensitive.txt").write_text("dog/1.jpg\n")
    with pytest.raises(ConfigError, match=r"dog/1\.jpg"):
        images.read_sensitive_flags(folder, NAMES)


def test_marks_behind_a_link_to_nowhere_are_not_none(folder: Path) -> None:
    (folder / "sensitive.txt").symlink_to(folder / "unmounted" / "sensitive.txt")
    with pytest.raises(ConfigError, match="must name an image a line"):
        images.read_sensitive_flags(folder, NAMES)


def test_split(folder: Path) -> None:
    assert images.read_split_numbers(folder, NAMES) is None
    (folder / "split.json").write_text(json.dumps({"val": ["dog/1.jpeg"], "test": ["cat/1.png"]}))
    split = images.read_split_numbers(folder, NAMES)
    assert split is not None
    assert split.tolist() == [2, 0, 1]


@pytest.mark.parametrize(
    "content",
    [
        "{", "[]", '{"validation": []}', '{"val": "cat/1.png"}', '{"val": ["cat/9.png"]}', '{"val": [["x"]]}',
        '{"val": ["cat/1.png"], "test": ["cat/1.png"]}',
    ],
)  # fmt: skip
def test_wrong_splits_are_named(folder: Path, content: str) -> None:
    (folder / "split.json").write_text(content)
    with pytest.raises(ConfigError, match=r"split\.json"):
        images.read_split_numbers(folder, NAMES)


def test_all_images_that_cannot_be_read_are_named_at_once(folder: Path) -> None:
    broken = [NAMES[0], NAMES[-1]]
    for name in broken:
        (folder / name).write_bytes(b"no image")
    with pytest.raises(ConfigError, match=f"2 of {len(NAMES)} images cannot be read: remove or replace") as caught:
        images.load_images(TASK, folder, images.list_images(folder))
    assert all(name in str(caught.value) for name in broken)


def test_images_of_other_formats_are_told(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    images.warn_of_unread(folder)
    assert not caplog.records
    (folder / NAMES[0]).with_suffix(".heic").write_bytes(b"")
    images.warn_of_unread(folder)
    assert "n=1" in caplog.text
    assert ".heic" in caplog.text
