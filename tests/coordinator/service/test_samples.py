from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from coordinator.service import samples
from fedge.data.task import TaskSpec

TASK = TaskSpec(name="digits", classes=tuple("0123456789"), input_shape=(1, 8, 8), model="mlp")


def told(counts: samples.Counts) -> list[str]:
    return [
        finding.what
        for finding in samples.find_oddities(counts, {device: sum(each.values()) for device, each in counts.items()})
    ]


def test_classes_without_samples_are_named() -> None:
    (found,) = samples.find_missing_classes({"": samples.count_by_class(TASK, np.array([0, 1, 2, 3, 4, 5, 6, 7]))})
    assert found.what == "no sample is of 8, 9"
    assert not [*samples.find_missing_classes({"": samples.count_by_class(TASK, np.arange(10))})]
    assert not [*samples.find_missing_classes({"a": {"x": 0, "y": 1}, "b": {"x": 1}})]


def test_devices_with_few_samples_are_named() -> None:
    assert told({"cam1": {"a": 20}, "cam2": {"a": 10, "b": 9}}) == ["few samples: cam2 has 19"]
    assert told({"": {"a": 3}}) == ["few samples: all together has 3"]


def test_samples_count_whatever_their_targets() -> None:
    assert not [*samples.find_oddities({"": {}}, {"": 20})], "numbers have no classes"
    assert [*samples.format_counts({"cam1": {}}, {"cam1": 20})] == ["cam1  20"]
    (found,) = samples.find_oddities({"": {"hot": 10, "wet": 10}}, {"": 10})
    assert found.what == "few samples: all together has 10", "a sample may have several labels"


@pytest.mark.parametrize(
    ("counts", "typo"),
    [
        ({"": {"Cat": 40, "cat": 40}}, True),
        ({"": {"T-shirt": 40, "tshirt": 40}}, True),
        ({"": {"scratched": 90, "scrached": 10}}, True),
        ({"": {"walking upstairs": 50, "walking downstairs": 50}}, False),
        ({"cam1": {"scratched": 40}, "cam2": {"scrached": 40}}, True),
        ({"cam1": {"male": 40, "female": 40}, "cam2": {"male": 40}}, False),
        ({"": {"class1": 90, "class2": 10}}, False),
        ({"": {"+": 50, "-": 50}}, False),
        ({"": {"dog": 90, "cat": 10}}, False),
    ],
)
def test_class_names_that_look_like_a_typo(counts: samples.Counts, typo: bool) -> None:
    assert ["looks like a typo of" in text for text in told(counts)] == [True] * typo


def image(at: Path) -> None:
    at.parent.mkdir(parents=True, exist_ok=True)
    at.write_bytes(b"")


def test_images_are_counted_by_the_folders_above_their_classes(tmp_path: Path) -> None:
    for name in ("cam2/cat/1.jpg", "cam1/cat/1.jpg", "cam1/cat/2.png", "cam1/dog/1.jpg"):
        image(tmp_path / name)
    assert samples.count_in_folder(tmp_path) == {"cam1": {"cat": 2, "dog": 1}, "cam2": {"cat": 1}}
    image(tmp_path / "flat/train/cat/1.jpg")
    image(tmp_path / "flat/test/cat/1.jpg")
    assert samples.count_in_folder(tmp_path / "flat") == {"": {"cat": 2}}
    assert [*samples.format_counts(samples.count_in_folder(tmp_path / "cam1"), {"": 3})] == ["3: cat 2, dog 1"]


def test_class_folders_without_images_are_named(tmp_path: Path) -> None:
    image(tmp_path / "cam1/cat/1.jpg")
    for name in ("cam1/dog", "cam1/.cache"):
        (tmp_path / name).mkdir()
    (tmp_path / "cam1/dog/notes.txt").write_text("later")
    (found,) = samples.find_empty_folders([tmp_path])
    assert found.what == f"no image is in {tmp_path / 'cam1/dog'}"


def test_a_folder_that_may_not_be_read_is_no_empty_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "lost+found").mkdir()
    real = Path.iterdir

    def forbidden(folder: Path) -> Iterator[Path]:
        if folder.name == "lost+found":
            raise PermissionError(13, "Permission denied")
        return real(folder)

    monkeypatch.setattr(Path, "iterdir", forbidden)
    assert not [*samples.find_empty_folders([tmp_path])]
