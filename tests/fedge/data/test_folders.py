"""Folders of images, for problems that need class folders, nothing, or what no folder tells."""

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from fedge.data import folders
from fedge.data.problems.regression import Regression
from fedge.errors import ConfigError
from fedge.tasks import load_task, read_device_data


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    for name in ("cat/1.png", "cat/2.png", "dog/1.png", "loose.png"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        Image.fromarray(np.zeros((32, 32, 3), np.uint8)).save(tmp_path / name)
    return tmp_path


def test_images_alone_are_enough_for_reconstruction(photos: Path) -> None:
    task = load_task("image-folder", photos, problem="reconstruction")
    assert task.model == "autoencoder"
    found = read_device_data(task, photos, seed=0)
    assert found.n_train + len(found.y_val) == 4
    assert not found.labelled[1].any()


def test_classes_need_folders(photos: Path) -> None:
    with pytest.raises(ConfigError, match=r"loose\.png lies in none"):
        load_task("image-folder", photos)
    (photos / "loose.png").unlink()
    task = load_task("image-folder", photos)
    names = folders.list_samples(task.problem, photos)
    assert folders.read_targets(task, photos, names).tolist() == [0, 0, 1]
    (photos / "bird").mkdir()
    (photos / "dog" / "1.png").rename(photos / "bird" / "1.png")
    names = folders.list_samples(task.problem, photos)
    assert folders.read_targets(task, photos, names, only_known=True).tolist() == [2, 0, 0]


def test_numbers_are_told_by_no_folder(photos: Path) -> None:
    with pytest.raises(ConfigError, match=r"not regression: give an \.npz"):
        load_task("image-folder", photos, problem="regression")
    problem = Regression(targets=("a",), mean=(0.0,), std=(1.0,))
    with pytest.raises(ConfigError, match=r"does not tell the targets of regression: give an \.npz"):
        folders.list_samples(problem, photos)
    assert len(folders.list_samples(problem, photos, labelled=False)) == 4
