import contextlib
import io
import stat

import numpy as np
import pytest

from fedge.data.task import TaskSpec
from fedge.data.validation import FILE, Validation, load_validation
from fedge.errors import ConfigError

TASK = TaskSpec(name="t", classes=("a", "b"), input_shape=(3,), model="mlp")


@pytest.mark.parametrize("y", [None, np.array([0, 1])])
def test_what_is_saved_is_loaded_and_for_the_owner_alone(tmp_path, y):
    Validation(np.ones((2, 3), np.float32), y).save(tmp_path)

    found = load_validation(tmp_path, TASK)

    assert found.x.shape == (2, 3)
    assert (found.y is None) == (y is None)
    assert stat.S_IMODE((tmp_path / FILE).stat().st_mode) == 0o600


def test_marks_are_kept(tmp_path):
    Validation(np.ones((3, 3), np.float32), None, np.array([True, False, True])).save(tmp_path)

    assert list(load_validation(tmp_path, TASK).reportable) == [False, True, False]


def test_without_marks_all_may_be_told():
    assert list(Validation(np.ones((2, 3), np.float32), None).reportable) == [True, True]


@pytest.mark.parametrize(
    "marks",
    [
        {"sensitive": np.array([True])},
        {"sensitive": np.array([0, 1])},
        {"sensitive": np.array(["no", "yes"])},
        {"Sensitive": np.array([True, False])},
    ],
)
def test_marks_that_are_none_do_not_pass_for_no_marks(tmp_path, marks):
    np.savez(tmp_path / FILE, x=np.ones((2, 3)), **marks)

    with pytest.raises(ConfigError, match=FILE):
        load_validation(tmp_path, TASK)


def test_without_a_file_there_are_no_samples(tmp_path):
    assert load_validation(tmp_path, TASK).x.shape == (0, 3)


@pytest.mark.parametrize("content", [b"", b"junk", b"PK\x05\x06" + b"\0" * 18])
def test_a_file_that_cannot_be_read_is_named(tmp_path, content):
    (tmp_path / FILE).write_bytes(content)

    with pytest.raises(ConfigError, match=FILE):
        load_validation(tmp_path, TASK)


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_whatever_byte_is_damaged_is_no_other_error(tmp_path, save):
    buffer = io.BytesIO()
    save(buffer, x=np.ones((9, 3), np.float32), y=np.arange(9) % 2)
    for position in range(0, len(buffer.getvalue()), 2):
        damaged = bytearray(buffer.getvalue())
        damaged[position] ^= 0xFF
        (tmp_path / FILE).write_bytes(damaged)
        with contextlib.suppress(ConfigError):
            load_validation(tmp_path, TASK)


@pytest.mark.parametrize("samples", [{"x": np.full((2, 3), np.nan)}, {"x": np.ones((2, 3)), "y": np.array(["a", "b"])}])
def test_samples_and_labels_are_numbers(tmp_path, samples):
    np.savez(tmp_path / FILE, **samples)

    with pytest.raises(ConfigError, match=FILE):
        load_validation(tmp_path, TASK)


def test_samples_of_another_task_are_refused(tmp_path):
    Validation(np.ones((2, 4), np.float32), None).save(tmp_path)

    with pytest.raises(ConfigError, match="shape"):
        load_validation(tmp_path, TASK)
