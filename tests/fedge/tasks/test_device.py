import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from PIL import Image

from fedge.data.classes import add_classes
from fedge.data.task import TRAIN, VALIDATION, Column, Preprocessing, Schema, TaskSpec
from fedge.errors import ConfigError
from fedge.tasks import DeviceData, load_task, read_device_data, read_device_inputs, read_labelled, read_parts

WINDOWS = TaskSpec(
    name="arrays", classes=("a", "b"), input_shape=(2,), model="mlp", preprocessing=Preprocessing(scale=2.0)
)


def npz(folder: Path, n: int = 20, **more: Any) -> Path:
    x = np.arange(2 * n, dtype=np.float32).reshape(n, 2)
    np.savez(folder / "d.npz", **({"x": x, "y": np.arange(n) % 2} | more))
    return folder / "d.npz"


def test_a_given_split_is_kept_and_test_samples_are_never_seen(tmp_path: Path) -> None:
    split = np.array([0, 1, 2, 0, 2] * 4)
    marks = np.arange(20) % 3 == 0
    data = read_device_data(WINDOWS, npz(tmp_path, split=split, sensitive=marks), seed=0)
    assert (data.x_train[:, 0] * 2).tolist() == (2 * np.flatnonzero(split == 0)).tolist()
    assert (data.x_val[:, 0] * 2).tolist() == (2 * np.flatnonzero(split == 1)).tolist()
    assert data.y_train.tolist() == (np.flatnonzero(split == 0) % 2).tolist()
    assert data.sensitive.tolist() == marks[split == 0].tolist()


def test_without_split_a_fifth_is_held_out_by_the_seed(tmp_path: Path) -> None:
    source = npz(tmp_path)
    data, again, other = (read_device_data(WINDOWS, source, seed=seed) for seed in (0, 0, 1))
    assert (len(data.y_train), len(data.y_val)) == (16, 4)
    assert np.bincount(data.y_val).tolist() == [2, 2]
    assert np.array_equal(data.x_val, again.x_val)
    assert not np.array_equal(data.x_val, other.x_val)
    everything = np.concatenate([data.x_train, data.x_val])[:, 0]
    assert sorted((2 * everything).tolist()) == list(range(0, 40, 2))


@pytest.mark.parametrize("is_given", [True, False])
def test_all_parts_of_a_source_are_those_that_its_device_trains_on_and_more(tmp_path: Path, is_given: bool) -> None:
    more = {"split": np.array([0, 1, 2, 0, 2] * 4)} if is_given else {}
    source = npz(tmp_path, sensitive=np.arange(20) % 3 == 0, **more)
    parts, data = read_parts(WINDOWS, source, seed=4), read_device_data(WINDOWS, source, seed=4)
    assert parts.is_given == is_given
    assert len(parts.y) == 20
    again = DeviceData.from_samples(parts.x, parts.y, sensitive=parts.sensitive, split=parts.split, seed=0)
    assert again.compute_digest() == data.compute_digest()


@pytest.mark.parametrize("marked", [[], [3, 40, 41]])
def test_windows_of_one_recording_are_held_out_together(tmp_path: Path, marked: list[int]) -> None:
    block, marks = np.repeat(np.arange(10), 5)[::-1], np.isin(np.arange(50), marked)
    source = npz(tmp_path, 50, block=block, sensitive=marks, y=block % 2)
    data, parts = read_device_data(WINDOWS, source, seed=3), read_parts(WINDOWS, source, seed=3)
    held = np.unique(block[parts.split == VALIDATION])
    assert len(data.y_val) == 5 * len(held) >= 10
    assert not set(held) & set(block[parts.split == TRAIN])
    assert np.array_equal(data.x_val, parts.x[parts.split == VALIDATION])


def test_without_marks_nothing_is_sensitive(tmp_path: Path) -> None:
    data = read_device_data(WINDOWS, npz(tmp_path), seed=0)
    assert data.n_shared == data.n_train == 16


def test_labels_and_shapes_must_fit_the_task(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"y holds 0\.\.2, and class numbers are 0\.\.1 here"):
        read_device_data(WINDOWS, npz(tmp_path, y=np.arange(20) % 3), seed=0)
    with pytest.raises(ConfigError, match="shape"):
        read_device_data(WINDOWS, npz(tmp_path, x=np.zeros((20, 3))), seed=0)


@pytest.mark.parametrize(
    ("value", "says"), [(1e39, "more than single"), (3.3e38, "so far from"), (1e20, "so far from"), (np.nan, "not a f")]
)
@pytest.mark.parametrize("part", [0, 2])
def test_a_number_that_no_network_can_see_is_refused_with_file_sample_and_column(
    tmp_path: Path, value: float, says: str, part: int
) -> None:
    x = np.zeros((20, 2))
    x[17, 1] = value
    task = msgspec.structs.replace(WINDOWS, preprocessing=Preprocessing(std=0.1))
    file = npz(tmp_path, x=x, split=np.full(20, part))
    for read in (lambda: read_device_data(task, file, seed=0), lambda: read_device_inputs(task, file)):
        with pytest.raises(ConfigError, match=rf"\.npz: sample 17, column 1 .*{says}"):
            read()


def test_a_folder_of_images(tmp_path: Path) -> None:
    for number in range(10):
        path = tmp_path / ("cat" if number < 5 else "dog") / f"{number}.png"
        path.parent.mkdir(exist_ok=True)
        Image.fromarray(np.full((32, 32, 3), 10 * number, np.uint8)).save(path)
    (tmp_path / "split.json").write_text(json.dumps({"val": ["cat/0.png"], "test": ["dog/9.png"]}))
    (tmp_path / "sensitive.txt").write_text("dog/8.png\n")
    task = load_task("image-folder", tmp_path)
    data = read_device_data(task, tmp_path, seed=0)
    assert data.x_train.shape == (8, 3, 32, 32)
    assert data.y_train.tolist() == [0, 0, 0, 0, 1, 1, 1, 1]
    assert data.sensitive.tolist() == [False] * 7 + [True]
    np.testing.assert_allclose(data.x_train[:, 0, 0, 0], (np.arange(10, 90, 10) / 255 - 0.47) / 0.25, rtol=1e-5)
    np.testing.assert_allclose(data.x_val, -0.47 / 0.25, rtol=1e-5)


def test_a_device_that_does_not_train_needs_no_labels(tmp_path: Path) -> None:
    np.savez(tmp_path / "x.npz", x=np.arange(8, dtype=np.float32).reshape(4, 2))
    np.testing.assert_array_equal(read_device_inputs(WINDOWS, tmp_path / "x.npz"), np.arange(8).reshape(4, 2) / 2)
    marked = npz(tmp_path, n=5, split=np.array([0, 1, 2, 0, 1]), sensitive=np.array([1, 0, 0, 0, 0]), y=np.arange(5))
    np.testing.assert_array_equal(read_device_inputs(WINDOWS, marked)[:, 0], [1, 3, 4])
    with pytest.raises(ConfigError, match="x and y"):
        read_device_data(WINDOWS, tmp_path / "x.npz", seed=0)
    np.savez(tmp_path / "none.npz", z=np.zeros(3))
    with pytest.raises(ConfigError, match=r"arrays x$"):
        read_device_inputs(WINDOWS, tmp_path / "none.npz")


@pytest.mark.parametrize(
    "wrong", ["Sensitive.txt", "sensitive.txt.bak", "cat/sensitive.txt", "splits.json", "cat/5.webp"]
)
def test_files_beside_images_that_nobody_would_look_at_are_refused(tmp_path: Path, wrong: str) -> None:
    for number in range(10):
        path = tmp_path / ("cat" if number < 5 else "dog") / f"{number}.png"
        path.parent.mkdir(exist_ok=True)
        Image.fromarray(np.full((32, 32, 3), 10 * number, np.uint8)).save(path)
    task = load_task("image-folder", tmp_path)
    for harmless in (".DS_Store", "cat/Thumbs.db", ".cache/index.bin", "sensitive.txt"):
        (tmp_path / harmless).parent.mkdir(exist_ok=True)
        (tmp_path / harmless).write_bytes(b"")
    assert read_device_data(task, tmp_path, seed=0).n_shared == 8
    (tmp_path / wrong).write_text("cat/1.png\n")
    for read in (lambda: read_device_data(task, tmp_path, seed=0), lambda: read_device_inputs(task, tmp_path)):
        with pytest.raises(ConfigError, match=f"{Path(wrong).name} means nothing here") as error:
            read()
        if "ensitive" in wrong:
            assert "did you mean sensitive.txt?" in str(error.value)


def test_images_without_class_folders_are_read_by_a_device_that_does_not_train(tmp_path: Path) -> None:
    for number in range(4):
        (tmp_path / "seen" / "today").mkdir(parents=True, exist_ok=True)
        Image.fromarray(np.full((32, 32, 3), 10 * number, np.uint8)).save(
            tmp_path / ("seen/today" if number else "") / f"{number}.png"
        )
    (tmp_path / "sensitive.txt").write_text("seen/today/3.png\n")
    task = TaskSpec(
        name="image-folder",
        classes=("a", "b"),
        input_shape=(3, 32, 32),
        model="cnn",
        preprocessing=Preprocessing(image_mode="RGB"),
    )
    assert read_device_inputs(task, tmp_path)[:, 0, 0, 0].tolist() == [0, 10, 20]


def test_labelled_samples_are_all_but_those_for_testing(tmp_path: Path) -> None:
    x, y = read_labelled(WINDOWS, npz(tmp_path, split=np.array([0, 1, 2, 0, 2] * 4)))
    assert sorted((x[:, 0] * 2).tolist()) == [2 * i for i in range(20) if i % 5 not in (2, 4)]
    np.testing.assert_array_equal(y, x[:, 0].astype(int) % 2)


def test_a_task_of_the_users_own_reads_its_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_sensor.py").write_text(
        "import numpy as np\n"
        "from fedge.tasks import DeviceData\n"
        "class Sensor:\n"
        "    def device_data(self, source, *, seed):\n"
        "        x, y = np.full((3, 2), seed, np.float32), np.zeros(3, np.int64)\n"
        "        return DeviceData(x, y, np.zeros(3, np.bool_), x[:0], y[:0])\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    task = TaskSpec(name="my_sensor:Sensor", classes=("a", "b"), input_shape=(2,), model="mlp")
    assert read_device_data(task, tmp_path, seed=9).x_train.tolist() == [[9, 9]] * 3
    assert read_device_inputs(task, tmp_path).tolist() == [[0, 0]] * 3
    parts = read_parts(task, tmp_path, seed=9)
    assert (parts.x.tolist(), parts.split.tolist(), parts.is_given) == ([[9, 9]] * 3, [0] * 3, True)
    code = (tmp_path / "my_sensor.py").read_text()
    (tmp_path / "other_sensor.py").write_text(code.replace("np.zeros(3, np.int64)", "np.full(3, 2)"))
    task = msgspec.structs.replace(task, name="other_sensor:Sensor")
    with pytest.raises(ConfigError, match=rf"cannot read {tmp_path}: y of the training samples holds 2\.\.2"):
        read_device_data(task, tmp_path, seed=9)
    (tmp_path / "broken_sensor.py").write_text(code.replace("seed, np.float32", "1e39"))
    task = msgspec.structs.replace(task, name="broken_sensor:Sensor")
    with pytest.raises(ConfigError, match=r"of the training samples, sample 0, column 0 .* is more than single"):
        read_device_data(task, tmp_path, seed=9)
    task = msgspec.structs.replace(task, name="my_sensor:Sensor", input_shape=(4,))
    with pytest.raises(ConfigError, match=rf"cannot read {tmp_path}: samples of shape \(2,\) found"):
        read_device_data(task, tmp_path, seed=9)


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("Broken", "AttributeError: 'NoneType' object has no attribute 'x' (wrong_sensor.py, line 2)"),
        ("Pair", "device_data returned tuple, not a fedge.tasks.DeviceData"),
        ("Exiting", "SystemExit: no sensor (wrong_sensor.py, line 6)"),
    ],
)
def test_a_task_of_the_users_own_that_fails_is_told_in_a_sentence(
    name: str, told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "wrong_sensor.py").write_text(
        "class Broken:\n    def device_data(self, source, *, seed): return None.x\n"
        "class Pair:\n    def device_data(self, source, *, seed): return [1], [0]\n"
        "class Exiting:\n    def device_data(self, source, *, seed): raise SystemExit('no sensor')\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    task = TaskSpec(name=f"wrong_sensor:{name}", classes=("a", "b"), input_shape=(2,), model="mlp")
    with pytest.raises(ConfigError) as refused:
        read_device_data(task, tmp_path, seed=9)
    assert str(refused.value) == f"wrong_sensor:{name} cannot read {tmp_path}: {told}"


def test_what_a_task_of_the_users_own_cannot_read_is_told_without_a_traceback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "task_that_opens.py").write_text(
        "import numpy as np\n"
        "class Mine:\n    def device_data(self, source, *, seed):\n        return source.read_bytes()\n"
        "class Other:\n    def device_data(self, source, *, seed):\n        return np.load(source)['windows']\n"
    )
    np.savez(tmp_path / "dev1.npz", x=np.zeros(1))
    monkeypatch.syspath_prepend(tmp_path)
    mine = msgspec.structs.replace(WINDOWS, name="task_that_opens:Mine")
    for read in (lambda at: read_device_data(mine, at, seed=0), lambda at: read_device_inputs(mine, at)):
        with pytest.raises(ConfigError, match=r"no file or folder of samples at .*dev2\.npz \(did you mean dev1\.npz"):
            read(tmp_path / "dev2.npz")
        with pytest.raises(ConfigError, match=r"cannot read .*Is a directory"):
            read(tmp_path)
    with pytest.raises(ConfigError, match=r"cannot read .*dev1\.npz: KeyError: .*windows"):
        read_device_data(msgspec.structs.replace(mine, name="task_that_opens:Other"), tmp_path / "dev1.npz", seed=0)


def write_folder(folder: Path) -> Path:
    for name in ("a", "b", "new"):
        (folder / name).mkdir(parents=True)
        for k in range(5):
            Image.fromarray(np.full((4, 4), 10 * k, np.uint8)).save(folder / name / f"{k}.png")
    (folder / "sensitive.txt").write_text("new/0.png\nb/1.png\n")
    return folder


def write_table(folder: Path) -> Path:
    (folder / "d.csv").write_text("load,kind\n" + "".join(f"{k},{['a', 'b', 'new'][k % 3]}\n" for k in range(15)))
    return folder / "d.csv"


PICTURES = TaskSpec(
    name="p", classes=("a", "b"), input_shape=(1, 4, 4), model="mlp", preprocessing=Preprocessing(image_mode="L")
)
TABLE = TaskSpec(
    name="table",
    classes=("a", "b"),
    input_shape=(1,),
    model="mlp",
    preprocessing=Preprocessing(table=Schema(target="kind", classes=("a", "b"), columns=(Column(name="load"),))),
)


@pytest.mark.parametrize(
    ("task", "write"),
    [
        (WINDOWS, lambda folder: npz(folder, 15, y=np.arange(15) % 3)),
        (PICTURES, lambda folder: write_folder(folder / "pictures")),
        (TABLE, write_table),
    ],
    ids=["npz", "folder", "table"],
)
def test_samples_of_classes_that_the_task_lacks_are_left_out_on_request(
    tmp_path: Path, task: TaskSpec, write: Callable[[Path], Path]
) -> None:
    source = write(tmp_path)
    with pytest.raises(ConfigError):
        read_parts(task, source, seed=0)
    known = read_parts(task, source, seed=0, only_known=True)
    assert (len(known.x), np.bincount(known.y).tolist(), known.n_unknown) == (10, [5, 5], 5)
    assert len(known.split) == len(known.sensitive) == 10
    grown = read_parts(add_classes(task, ("new",)), source, seed=0)
    assert (np.bincount(grown.y).tolist(), grown.n_unknown) == ([5, 5, 5], 0)


def test_a_task_of_the_users_own_may_have_samples_of_a_class_that_joins_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "growing_sensor.py").write_text(
        "import numpy as np\n"
        "from fedge.tasks import DeviceData\n"
        "class Sensor:\n"
        "    def device_data(self, source, *, seed):\n"
        "        x, y = np.zeros((4, 2), np.float32), np.array([0, 1, 2, 1])\n"
        "        return DeviceData(x[:3], y[:3], np.arange(3) == 2, x[3:], y[3:])\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    task = TaskSpec(name="growing_sensor:Sensor", classes=("a", "b"), input_shape=(2,), model="mlp")
    known = read_parts(task, tmp_path, seed=0, only_known=True)
    assert (known.y.tolist(), known.sensitive.tolist(), known.n_unknown) == ([0, 1, 1], [False] * 3, 1)
    assert read_parts(add_classes(task, ("c",)), tmp_path, seed=0).y.tolist() == [0, 1, 2, 1]
