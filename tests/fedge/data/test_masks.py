"""Masks beside images: which belongs to which, what their pixels are, and what is refused."""

import json
import zipfile
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from PIL import Image

from coordinator.simulation.commands.check import check
from coordinator.simulation.run import simulate
from coordinator.simulation.settings import Scenario
from deploy.commands.infer import infer
from fedge.data import masks
from fedge.errors import ConfigError
from fedge.tasks import Task, load_pool, load_task, read_device_data, read_device_inputs

CLASSES = ("street", "car", "tree")


def save(path: Path, pixels: np.ndarray, **how: object) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels).save(path, **how)


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """Ten photos of 64 x 64, whose upper half is a car or a tree, with a frame that counts nowhere."""
    folder = tmp_path / "photos"
    for i in range(10):
        mask = np.zeros((64, 64), np.uint8)
        mask[:32] = 1 + i % 2
        mask[:, :2] = 255
        save(folder / "monday" / f"{i}.jpg", np.full((64, 64, 3), 100, np.uint8))
        save(folder / "monday" / f"{i}.mask.png", mask)
    (folder / "classes.txt").write_text("\n".join(CLASSES))
    return folder


def test_a_folder_with_masks_is_a_task_and_a_devices_data(photos: Path) -> None:
    task = load_task("image-folder", photos, problem="segmentation")
    assert (task.problem.kind, task.model, task.input_shape) == ("segmentation", "unet", (3, 32, 32))
    assert task.problem.classes == CLASSES  # type: ignore[attr-defined]
    found = read_device_data(task, photos, seed=0)
    y = found.labelled[1]
    assert y.shape == (10, 32, 32)
    assert y.dtype == np.int64
    assert set(np.unique(y[:, :, 1:])) == {0, 1, 2}, "nearest pixels, none between classes"
    assert (y[:, :, 0] == 255).all()
    assert len(found.y_val) == 2, "one of each group"
    assert len(read_device_inputs(task, photos)) == 10, "a mask is no photo"
    assert load_pool("image-folder", photos, problem="segmentation", limit=4).y.shape == (4, 32, 32)


def test_classes_without_names_and_archives(photos: Path) -> None:
    (photos / "classes.txt").unlink()
    archive = photos.parent / "photos.zip"
    with zipfile.ZipFile(archive, "w") as target:
        for file in photos.rglob("*.*"):
            target.write(file, file.relative_to(photos))
    task = Task.from_folder(archive, problem="segmentation")
    assert task.spec.problem.classes == ("class 0", "class 1", "class 2")  # type: ignore[attr-defined]
    assert np.array_equal(np.sort(np.unique(task.pool.y)), [0, 1, 2, 255])


def test_a_palette_png_holds_class_numbers(tmp_path: Path) -> None:
    save(tmp_path / "a.png", np.zeros((32, 32, 3), np.uint8))
    coloured = Image.fromarray(np.full((32, 32), 1, np.uint8), mode="P")
    coloured.putpalette([0, 0, 0, 255, 0, 0])
    coloured.save(tmp_path / "a.mask.png")
    task = load_task("image-folder", tmp_path, problem="segmentation")
    assert (masks.load_masks(task, tmp_path, ["a.png"]) == 1).all()


def test_what_does_not_belong_together_is_refused(photos: Path) -> None:
    (photos / "monday" / "3.mask.png").rename(photos / "monday" / "33.mask.png")
    with pytest.raises(ConfigError, match=r"monday/3\.jpg has no mask: put monday/3\.mask\.png beside it"):
        masks.list_images(photos)
    with pytest.raises(ConfigError, match=r"monday/33\.mask\.png is the mask of no image"):
        masks.list_images(photos, labelled=False)


def test_wrong_masks_are_refused(photos: Path) -> None:
    task = load_task("image-folder", photos, problem="segmentation")
    save(photos / "monday" / "3.mask.png", np.full((64, 64), 7, np.uint8))
    with pytest.raises(ConfigError, match=r"a mask holds 7\.\.7: a pixel is 0\.\.2, or 255"):
        read_device_data(task, photos, seed=0)
    with pytest.raises(ConfigError, match=r"names 3 classes, and masks have pixels of 7"):
        load_task("image-folder", photos, problem="segmentation")
    save(photos / "monday" / "3.mask.png", np.zeros((64, 32), np.uint8))
    with pytest.raises(ConfigError, match=r"3\.mask\.png has 32 x 64 pixels, and its image 64 x 64: save the mask in"):
        read_device_data(task, photos, seed=0)
    save(photos / "monday" / "3.mask.png", np.zeros((64, 64, 3), np.uint8))
    with pytest.raises(ConfigError, match=r"pixels are RGB, not class numbers: save it as a grey or palette PNG"):
        read_device_data(task, photos, seed=0)


def test_a_folder_with_masks_goes_from_the_check_to_predictions(photos: Path, tmp_path: Path) -> None:
    checked = CliRunner().invoke(check, ["--task", "image-folder", "--data", str(photos), "--problem", "segmentation"])
    assert checked.exit_code == 0, checked.output
    scenario = Scenario(
        task="image-folder", data=photos, problem="segmentation", devices=2, rounds=1, min_samples=4, hardware="none"
    )
    simulate(scenario, "fedavg", {}, 0, tmp_path / "run", lambda _: None, "fedavg")
    bundle = next((tmp_path / "run").rglob("bundles/1"))
    told = CliRunner().invoke(infer, [str(bundle), str(photos), "--json"])
    assert told.exit_code == 0, told.output
    assert json.loads(told.stdout)["n"] == 10, "a mask is no photo"
