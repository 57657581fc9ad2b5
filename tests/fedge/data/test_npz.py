"""Files of arrays from anybody: read, or refused before memory is taken for them."""

import struct
import subprocess
import sys
import zipfile

import numpy as np
import pytest

from fedge.data import npz
from fedge.errors import ConfigError

pytestmark = pytest.mark.torch_free


def header(shape):
    text = f"{{'descr': '<f4', 'fortran_order': False, 'shape': {shape}, }}\n".encode()
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(text)) + text


def archive(path, **members):
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as file:
        for name, data in members.items():
            file.writestr(f"{name}.npy", data)
    return path


def test_the_named_arrays_that_are_there(tmp_path):
    np.savez(tmp_path / "a.npz", x=np.arange(3), z=np.zeros(2))

    found = npz.load_arrays(tmp_path / "a.npz", ("x", "y"))

    assert list(found) == ["x"]
    assert found["x"].tolist() == [0, 1, 2]


@pytest.mark.parametrize("shape", [(1 << 20, 1024), (1 << 38,), (26,)])
def test_a_header_that_claims_more_than_there_is(tmp_path, shape):
    path = archive(tmp_path / "a.npz", x=header(shape) + bytes(100))

    with pytest.raises(ConfigError, match=r"x claims \d+ bytes and holds 100"):
        npz.load_arrays(path, ("x",))


def test_an_array_of_objects_says_so(tmp_path):
    np.savez(tmp_path / "a.npz", x=np.arange(6.0).astype(object))

    with pytest.raises(ConfigError, match=r"x holds Python objects: \.astype\(float\)"):
        npz.load_arrays(tmp_path / "a.npz", ("x",))


def test_zeros_that_were_packed_into_little(tmp_path, little_memory):
    path = archive(tmp_path / "a.npz", x=header((1 << 20,)) + bytes(1 << 22))
    assert path.stat().st_size < 10_000

    with pytest.raises(ConfigError, match="takes 4 MiB of memory, at most 0 MiB"):
        npz.load_arrays(path, ("x",))


@pytest.mark.parametrize("dtype", ["u1", "f4", "f8"])
def test_the_largest_file_that_is_read_leaves_room_for_what_is_made_of_it(tmp_path, dtype):
    """Bytes become numbers of four, and there are copies while that is done."""
    np.savez(tmp_path / "a.npz", x=np.zeros((200_000, 8, 8), dtype), y=np.arange(200_000) % 10)
    code = f"""
import resource
from pathlib import Path
from fedge import npz
from fedge.tasks import read_device_data
from fedge.tasks.specs import BUILT_IN
seen = []
real = npz.require_room
npz.require_room = lambda file, claimed: (seen.append(claimed), real(file, claimed))
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
read_device_data(BUILT_IN["digits"], Path({str(tmp_path / "a.npz")!r}), seed=0).compute_digest()
taken = 1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
allowed = seen[0] / npz.MEMORY_SHARE
assert taken < allowed, (taken, allowed)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    "data", [b"", b"no array", header((25,))[:20], header("(" * 100 + ")" * 100), header((-1, -25))]
)
def test_what_is_no_array(tmp_path, data):
    with pytest.raises(ConfigError, match=r"is not an \.npz file"):
        npz.load_arrays(archive(tmp_path / "a.npz", x=data), ("x",))


@pytest.mark.parametrize("data", [b"", b"PK", b"\x93NUMPY", header((1 << 38,))])
def test_what_is_no_archive(tmp_path, data):
    (tmp_path / "a.npz").write_bytes(data)
    with pytest.raises(ConfigError, match=r"is not an \.npz file"):
        npz.load_arrays(tmp_path / "a.npz", ("x",))


@pytest.mark.parametrize("shape", [(10**12, 1, 8, 8), (1 << 38,), (26,)])
def test_an_array_whose_header_claims_more_than_there_is(tmp_path, shape):
    (path := tmp_path / "a.npy").write_bytes(header(shape) + bytes(100))

    with pytest.raises(
        ConfigError, match=r"a\.npy is not an \.npy file of an array: it claims \d+ bytes and holds 100"
    ):
        npz.load_array(path)


def test_an_array_that_is_too_large_for_the_memory(tmp_path):
    with (path := tmp_path / "a.npy").open("wb") as file:
        file.write(header((1 << 40,)))
        file.truncate(file.tell() + (1 << 42))  # without a byte on the disk

    with pytest.raises(ConfigError, match="a quarter of it"):
        npz.load_array(path)


def test_an_array(tmp_path):
    np.save(tmp_path / "a.npy", np.arange(3))
    assert npz.load_array(tmp_path / "a.npy").tolist() == [0, 1, 2]
