"""Real digits in each of the formats; the sets themselves are not needed."""

import gzip
import struct
import zipfile
from collections.abc import Callable
from io import BytesIO
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from sklearn.datasets import load_digits

from fedge.data import preprocessing
from fedge.data.task import Preprocessing, TaskSpec
from fedge.errors import ConfigError
from fedge.tasks import DeviceData, Pool, load_pool


@pytest.fixture(scope="module")
def digits() -> Pool:
    return load_pool("digits")


def idx(array: np.ndarray) -> bytes:
    return struct.pack(f">{1 + array.ndim}I", 0x800 + array.ndim, *array.shape) + array.astype(np.uint8).tobytes()


def write_idx(folder: Path, digits: Pool, suffix: str = ".gz") -> None:
    """The first 50 digits as a set in MNIST's format: 40 to train, 10 to test."""
    folder.mkdir(parents=True, exist_ok=True)
    for part, chosen in (("train", slice(0, 40)), ("t10k", slice(40, 50))):
        images = np.kron(digits.x[chosen], np.ones((1, 3, 3), np.uint8))[:, :28, :28] * 15
        images = np.pad(images, ((0, 0), (2, 2), (2, 2)))
        for name, array in ((f"{part}-images-idx3-ubyte", images), (f"{part}-labels-idx1-ubyte", digits.y[chosen])):
            data = idx(array)
            (folder / f"{name}{suffix}").write_bytes(gzip.compress(data) if suffix else data)


def test_digits_are_those_of_scikit_learn(digits: Pool) -> None:
    theirs = load_digits()
    np.testing.assert_array_equal(digits.x, theirs.images)
    np.testing.assert_array_equal(digits.y, theirs.target)


def test_digits_are_whole(digits: Pool) -> None:
    assert digits.x.shape == (1797, 8, 8)
    assert (int(digits.x.min()), int(digits.x.max()), digits.x.dtype) == (0, 16, np.uint8)
    assert np.bincount(digits.y).tolist() == [178, 182, 177, 183, 181, 182, 181, 179, 174, 180]
    x = preprocessing.preprocess(digits.spec, digits.x)
    assert x.shape == (1797, 1, 8, 8)
    scaled = x.astype(np.float64) * digits.spec.preprocessing.std + digits.spec.preprocessing.mean
    assert scaled.min() == pytest.approx(0, abs=1e-6)
    assert scaled.max() == pytest.approx(1, abs=1e-6)


def test_a_limit_is_a_random_choice_in_stored_order(digits: Pool) -> None:
    some, again, other = (load_pool("digits", seed=seed, limit=100) for seed in (1, 1, 2))
    assert np.array_equal(some.x, again.x)
    assert not np.array_equal(some.y, other.y)
    places = np.random.default_rng(1).permutation(1797)[:100]
    assert np.array_equal(some.y, digits.y[np.sort(places)])
    assert len(load_pool("digits", limit=5000).y) == 1797


@pytest.mark.parametrize(
    ("task", "folder", "suffix"),
    [
        ("mnist", ".", ".gz"), ("mnist", "mnist", ".gz"), ("mnist", "MNIST/raw", ""),
        ("fashion-mnist", "fashion-mnist", ".gz"), ("fashion-mnist", "FashionMNIST/raw", ""),
    ],
)  # fmt: skip
def test_idx_files_wherever_they_usually_lie(tmp_path: Path, digits: Pool, task: str, folder: str, suffix: str) -> None:
    write_idx(tmp_path / folder, digits, suffix)
    found = load_pool(task, tmp_path)
    assert found.x.shape == (50, 28, 28)
    assert np.array_equal(found.y, digits.y[:50])
    assert found.spec.name == task
    assert found.x[:, 3, 3].tolist() == (digits.x[:50, 0, 0] * 15).tolist()
    assert found.x[:, 14, 14].tolist() == (digits.x[:50, 4, 4] * 15).tolist()


def test_an_idx_file_that_grows_when_it_is_unpacked_is_refused_first(tmp_path: Path, digits: Pool) -> None:
    write_idx(tmp_path, digits)
    file = tmp_path / "train-images-idx3-ubyte.gz"
    for sides, told in (((2**31, 2**10, 2**10), "a quarter of it"), ((3, 1, 1), "with 4 values")):
        with gzip.open(file, "wb") as opened:
            opened.write(struct.pack(">4I", 0x00000803, *sides) + bytes(2**20))
        with pytest.raises(ConfigError, match=rf"train-images-idx3-ubyte\.gz .*{told}"):
            load_pool("mnist", tmp_path)


def test_broken_idx_files_are_named(tmp_path: Path, digits: Pool) -> None:
    write_idx(tmp_path, digits)
    file = tmp_path / "train-images-idx3-ubyte.gz"
    good = gzip.decompress(file.read_bytes())
    for bad in (b"", good[:10], good[:-1], good + b"\0", b"\0\0\x08\x01" + good[4:]):
        file.write_bytes(gzip.compress(bad))
        with pytest.raises(ConfigError, match="train-images-idx3-ubyte"):
            load_pool("mnist", tmp_path)
    for bad in (good, gzip.compress(good)[:-20]):
        file.write_bytes(bad)
        with pytest.raises(ConfigError, match="train-images-idx3-ubyte"):
            load_pool("mnist", tmp_path)
    file.unlink()
    with pytest.raises(ConfigError, match="train-images-idx3-ubyte"):
        load_pool("mnist", tmp_path)


def test_labels_must_match_the_images(tmp_path: Path, digits: Pool) -> None:
    write_idx(tmp_path, digits)
    (tmp_path / "t10k-labels-idx1-ubyte.gz").write_bytes(gzip.compress(idx(digits.y[:9])))
    with pytest.raises(ConfigError, match="50 images, but 49 labels"):
        load_pool("mnist", tmp_path)


def test_a_zip_of_jpegs_and_the_folder_it_unpacks_to_are_the_same_set(tmp_path: Path, digits: Pool) -> None:
    with zipfile.ZipFile(tmp_path / "set.zip", "w") as archive:
        for number in range(30):
            file = BytesIO()
            Image.fromarray(np.kron(digits.x[number] * 15, np.ones((4, 4), np.uint8))).save(file, format="JPEG")
            archive.writestr(
                f"{'train' if number < 20 else 'test'}/{digits.y[number]}/{number:04}.jpg", file.getvalue()
            )
        archive.extractall(tmp_path / "set")
    packed, unpacked = load_pool("image-folder", tmp_path / "set.zip"), load_pool("image-folder", tmp_path / "set")
    assert packed.x.shape == (30, 32, 32, 3)
    assert packed.spec == unpacked.spec
    assert packed.spec.classes == tuple("0123456789")
    assert np.array_equal(packed.x, unpacked.x)
    assert np.bincount(packed.y).tolist() == np.bincount(digits.y[:30]).tolist()
    some = load_pool("image-folder", tmp_path / "set", seed=3, limit=7)
    chosen = np.sort(np.random.default_rng(3).permutation(30)[:7])
    assert np.array_equal(some.x, packed.x[chosen])


def test_arrays(tmp_path: Path, digits: Pool) -> None:
    np.savez(tmp_path / "a.npz", x=digits.x[:40].reshape(40, 64), y=digits.y[:40])
    found = load_pool("arrays", tmp_path / "a.npz")
    assert np.array_equal(found.x, digits.x[:40].reshape(40, 64))
    assert found.spec.input_shape == (64,)


@pytest.mark.parametrize("task", ["mnist", "arrays", "image-folder", "uci-har", "own_task:Own"])
def test_without_data_there_is_no_pool(task: str, own: type) -> None:
    with pytest.raises(ConfigError, match="say where"):
        load_pool(task, None)


@pytest.mark.parametrize(("task", "words"), [("cifar", "unknown task cifar"), ("digitz", "did you mean digits?")])
def test_a_task_that_nothing_has_is_named_and_the_nearest_one(task: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words.replace("?", r"\?")):
        load_pool(task, None)


class Own:
    """A task class of the user's own, which gives model inputs."""

    def spec(self, data: Path | None) -> TaskSpec:
        how = Preprocessing(scale=10.0)
        return TaskSpec(name="x", classes=("a", "b"), input_shape=(3,), model="mlp", preprocessing=how)

    def device_data(self, source: Path, *, seed: int) -> DeviceData:
        x = np.arange(30, dtype=np.float32).reshape(10, 3)
        y = np.arange(10) % 2
        return DeviceData(x_train=x[:8], y_train=y[:8], sensitive=y[:8] == 1, x_val=x[8:], y_val=y[8:])


@pytest.fixture
def own(own_module: Callable[..., object]) -> type:
    own_module("own_task", Own=Own)
    return Own


def test_a_task_class_gives_what_one_device_would_read_and_nothing_is_left_to_preprocess(own: type) -> None:
    found = load_pool("own_task:Own", Path("anything"))
    assert found.x.shape == (10, 3)
    assert found.y.tolist() == [0, 1] * 5
    assert (found.spec.name, found.spec.preprocessing) == ("Own", Preprocessing())
    assert len(load_pool("own_task:Own", Path("anything"), limit=4).y) == 4
