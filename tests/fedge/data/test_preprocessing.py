import io
import struct
import zlib
from pathlib import Path

import msgspec
import numpy as np
import pytest
from PIL import Image

from fedge.data.preprocessing import load_image, preprocess
from fedge.data.task import Preprocessing, TaskSpec
from fedge.errors import ConfigError

GREY = TaskSpec(
    name="grey", classes=("a", "b"), input_shape=(1, 2, 3), model="mlp",
    preprocessing=Preprocessing(scale=4.0, mean=0.5, std=2.0, image_mode="L"),
)  # fmt: skip
COLOUR = msgspec.structs.replace(
    GREY, input_shape=(3, 2, 4), preprocessing=Preprocessing(scale=255.0, image_mode="RGB")
)
WINDOW = TaskSpec(name="window", classes=("a", "b"), input_shape=(3, 5), model="mlp")


def test_scales_then_centres() -> None:
    raw = np.arange(6, dtype=np.uint8).reshape(1, 2, 3)
    expected = (np.arange(6) / 4 - 0.5) / 2
    x = preprocess(GREY, raw)
    assert x.dtype == np.float32
    assert x.shape == (1, 1, 2, 3)
    np.testing.assert_allclose(x.ravel(), expected, rtol=1e-6)


def test_a_scale_that_single_precision_can_compute_is_computed_so_to_the_last_bit() -> None:
    raw = np.random.default_rng(0).random((5, 1, 2, 3)).astype(np.float32)
    wanted = (raw - np.float32(0.5 * 4.0)) / np.float32(4.0 * 2.0)
    assert np.array_equal(preprocess(GREY, raw), wanted)


@pytest.mark.parametrize("offset", [101349.0, -1e6, 1e9])
def test_an_offset_costs_nothing(offset: float) -> None:
    signal = np.random.default_rng(0).standard_normal((50, 3, 5))
    centred = np.stack([signal[:, 0], 1000 * signal[:, 1], signal[:, 2] / 1000], axis=1)
    of_each = msgspec.structs.replace(
        WINDOW, preprocessing=Preprocessing(mean=(offset, 0.0, offset), std=(1.0, 1000.0, 0.001))
    )
    x = centred + np.array([offset, 0, offset])[:, None]
    np.testing.assert_allclose(preprocess(of_each, x), signal, atol=1e-3 if abs(offset) == 1e9 else 1e-5)
    of_all = msgspec.structs.replace(WINDOW, preprocessing=Preprocessing(mean=offset / 2, std=0.5, scale=2.0))
    np.testing.assert_allclose(preprocess(of_all, signal + offset), signal, atol=1e-6)
    in_single = (signal + 101349).astype(np.float32)  # what a client sends that has no more
    of_all = msgspec.structs.replace(WINDOW, preprocessing=Preprocessing(mean=101349.05, std=1.0))
    np.testing.assert_allclose(preprocess(of_all, in_single), signal - 0.05, atol=2**-8)


def test_what_no_network_can_see_is_refused_with_its_place() -> None:
    x = np.zeros((4, 3, 5))
    x[2, 1, 4] = 1e39
    far = msgspec.structs.replace(WINDOW, preprocessing=Preprocessing(mean=1e38, std=1e36))
    for task in (WINDOW, far):
        with pytest.raises(ConfigError, match=r"sample 2, place \(1, 4\) .* is more than single precision"):
            preprocess(task, x)
    x[2, 1, 4] = 3e38
    narrow = msgspec.structs.replace(WINDOW, preprocessing=Preprocessing(std=0.1))
    with pytest.raises(ConfigError, match=r"sample 2, place \(1, 4\) .* is so far from the task's mean"):
        preprocess(narrow, x)


def test_accepts_channels_first_and_channels_last() -> None:
    first = np.random.default_rng(0).integers(0, 256, (5, 3, 2, 4), dtype=np.uint8)
    assert np.array_equal(preprocess(COLOUR, first), preprocess(COLOUR, np.moveaxis(first, 1, -1)))


def test_windows_stay_as_they_are_and_the_input_is_not_modified() -> None:
    raw = np.ones((4, 3, 5), dtype=np.float32)
    x = preprocess(WINDOW, raw)
    x[:] = 7
    assert (raw == 1).all()


def test_no_samples_are_fine() -> None:
    assert preprocess(GREY, np.zeros((0, 2, 3), np.uint8)).shape == (0, 1, 2, 3)


@pytest.mark.parametrize("shape", [(5, 3), (3, 5), (4, 5, 3), (4, 3, 5, 1), (4,), ()])
def test_other_shapes_are_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(ConfigError, match="shape"):
        preprocess(WINDOW, np.zeros(shape))


@pytest.mark.parametrize("dtype", ["U3", "O", "c16", "M8[s]"])
def test_what_is_no_number_is_refused(dtype: str) -> None:
    with pytest.raises(ConfigError, match="numbers"):
        preprocess(WINDOW, np.zeros((4, 3, 5), dtype=dtype))


def image_file(path: Path, pixels: np.ndarray, **options: object) -> Path:
    Image.fromarray(pixels).save(path, **options)  # type: ignore[arg-type]
    return path


@pytest.mark.parametrize("suffix", ["png", "jpg"])
def test_reads_images_in_the_tasks_colours_and_size(tmp_path: Path, suffix: str) -> None:
    file = image_file(tmp_path / f"a.{suffix}", np.full((10, 20, 3), 200, np.uint8))
    assert load_image(COLOUR, file).shape == (2, 4, 3)
    assert load_image(GREY, file).shape == (2, 3)
    assert np.abs(load_image(GREY, file).astype(int) - 200).max() <= 1


def test_an_image_of_the_right_size_is_kept_pixel_for_pixel(tmp_path: Path) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (2, 4, 3), dtype=np.uint8)
    file = image_file(tmp_path / "a.png", pixels)
    assert np.array_equal(load_image(COLOUR, file), pixels)
    assert np.array_equal(load_image(COLOUR, io.BytesIO(file.read_bytes())), pixels)


def test_images_are_turned_the_way_their_camera_says(tmp_path: Path) -> None:
    pixels = np.arange(6, dtype=np.uint8).reshape(3, 2) * 40
    exif = Image.Exif()
    exif[0x0112] = 6  # to be turned by 90 degrees clockwise
    file = image_file(tmp_path / "a.png", pixels, exif=exif)
    assert np.array_equal(load_image(GREY, file), np.rot90(pixels, -1))


def test_what_is_no_image_is_refused_by_name(tmp_path: Path) -> None:
    whole = image_file(tmp_path / "a.png", np.zeros((20, 20), np.uint8)).read_bytes()
    for content in (b"", b"text", whole[:40]):
        (tmp_path / "bad.png").write_bytes(content)
        with pytest.raises(ConfigError, match=r"bad\.png"):
            load_image(GREY, tmp_path / "bad.png")
    with pytest.raises(ConfigError, match=r"in the zip"):
        load_image(GREY, io.BytesIO(b""), "in the zip")
    with pytest.raises(ConfigError, match=r"none\.png"):
        load_image(GREY, tmp_path / "none.png")


def test_an_image_whose_metadata_bring_pillow_down_is_refused(tmp_path: Path) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6  # turned
    exif[0x010F] = "abc"
    damaged = exif.tobytes().replace(b"\x01\x0f", b"\x01\x00")  # a width that is text
    Image.new("L", (3, 2)).save(tmp_path / "a.png", exif=damaged)
    with pytest.raises(ConfigError, match="cannot read the image"):
        load_image(GREY, tmp_path / "a.png")


def test_a_decompression_bomb_is_refused(tmp_path: Path) -> None:
    file = image_file(tmp_path / "a.png", np.zeros((30, 30), np.uint8))
    small, limit = file.read_bytes(), Image.MAX_IMAGE_PIXELS
    assert limit is not None
    for pixels in (2.1 * limit, 1.1 * limit):  # above twice the limit Pillow raises an error, above the limit it warns
        side = int(pixels**0.5)
        header = b"IHDR" + struct.pack(">II", side, side) + small[24:29]
        file.write_bytes(small[:12] + header + struct.pack(">I", zlib.crc32(header)) + small[33:])
        with pytest.raises(ConfigError, match=r"a\.png.*bomb"):
            load_image(GREY, file)


def test_a_task_of_arrays_takes_no_images(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="takes arrays"):
        load_image(WINDOW, image_file(tmp_path / "a.png", np.zeros((2, 3), np.uint8)))
