"""Loading of arrays from untrusted .npz and .npy files, with a check of claimed sizes before memory is allocated."""

from __future__ import annotations

import math
import os
import sys
import tokenize
import zipfile
import zlib
from collections.abc import Iterable
from pathlib import Path
from typing import IO, Any, Final

import numpy as np
from numpy.typing import NDArray

from fedge.errors import ConfigError
from fedge.system.files import require_there

MEMORY_SHARE: Final = 0.25
"""Share of this machine's memory that the samples of a file may take as model inputs. While these are made, there are
up to three copies."""
INPUT_BYTES: Final = 4
"""Bytes of a number in a model input, however small the number is in the file."""

_DAMAGED: Final = (
    OSError, ValueError, TypeError, KeyError, EOFError, MemoryError, RuntimeError, RecursionError, AttributeError,
    zipfile.BadZipFile, zlib.error, tokenize.TokenError,
)  # fmt: skip
"""Errors that NumPy and zipfile raise for damaged files."""


def load_arrays(file: Path, names: Iterable[str] | None = None) -> dict[str, NDArray[Any]]:
    """Load those of the named arrays that a file holds, or all its arrays.

    Raises:
        ConfigError: the file cannot be read, is not an .npz file, or its arrays need more than a quarter of the memory.
    """
    require_there(file, "file of samples")
    try:
        with file.open("rb") as opened, np.load(opened, allow_pickle=False) as archive:
            found = [name for name in names or archive.files if name in archive]
            require_room(file, sum(_read_claimed_size(archive.zip, name) for name in found))
            return {name: _require_readable(archive[name]) for name in found}
    except _DAMAGED as error:
        raise ConfigError(f"{file} is not an .npz file of arrays: {error}") from error


def load_array(file: Path) -> NDArray[Any]:
    """Load the array of an .npy file.

    Raises:
        ConfigError: the file cannot be read, is not an .npy file, or its array needs over a quarter of the memory.
    """
    require_there(file, "file of samples")
    try:
        with file.open("rb") as opened:
            require_room(file, _read_npy_size(opened, "it", os.fstat(opened.fileno()).st_size))
            opened.seek(0)
            return _require_readable(np.lib.format.read_array(opened, allow_pickle=False))
    except _DAMAGED as error:
        raise ConfigError(f"{file} is not an .npy file of an array: {error}") from error


def require_room(file: Path, claimed: int) -> None:
    """Refuse a file whose content takes more than a quarter of the memory; `claimed` is its size there in bytes.

    Raises:
        ConfigError: the content takes more.
    """
    allowed = int(MEMORY_SHARE * os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    if claimed > allowed:
        raise ConfigError(
            f"{file} takes {claimed / 2**20:.0f} MiB of memory, at most {allowed / 2**20:.0f} MiB, a quarter of it, "
            "may be taken here"
        )


def _require_readable(array: NDArray[Any]) -> NDArray[Any]:
    """Return the array after a check of its text, since invalid characters crash readers."""
    if array.dtype.kind == "U":
        numbers = np.ascontiguousarray(array).reshape(-1).view(np.dtype(np.uint32).newbyteorder(array.dtype.byteorder))
        if numbers.size and numbers.max() > sys.maxunicode:
            raise ValueError("its text holds numbers that are no characters")
    return array


def _read_claimed_size(archive: zipfile.ZipFile, name: str) -> int:
    """Return the bytes that an array takes as model input, by its header; refuse a member of another size."""
    member = f"{name}.npy" if f"{name}.npy" in archive.namelist() else name
    with archive.open(member) as file:
        return _read_npy_size(file, name, archive.getinfo(member).file_size)


def _read_npy_size(file: IO[bytes], name: str, size: int) -> int:
    """Return the bytes that the array of an open .npy file of `size` bytes takes as model input."""
    version = np.lib.format.read_magic(file)
    read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
    shape, _, dtype = read(file)
    if dtype.hasobject:
        raise ValueError(f"{name} holds Python objects: .astype(float) or .astype(str) makes numbers or text of them")
    claimed = math.prod(shape) * dtype.itemsize
    held = size - file.tell()
    if claimed != held:
        raise ValueError(f"{name} claims {claimed} bytes and holds {held}")
    return math.prod(shape) * max(dtype.itemsize, INPUT_BYTES)
