"""What glibc does with freed memory, for processes that make and drop large arrays and messages all the time."""

from __future__ import annotations

import ctypes
import platform

_ARENA_MAX, _MMAP_THRESHOLD, _TRIM_THRESHOLD = -8, -3, -1  # M_... of malloc.h


def tune_malloc() -> bool:
    """Let glibc keep freed chunks instead of returning them to the kernel; True if that was done.

    Every received chunk otherwise costs fresh pages: receiving is 2.5 times slower (findings/mqtt.md); so does every
    update of a simulated device. Both thresholds belong together; one alone makes it worse. One arena for all threads,
    so that chunks read and written in threads profit as well. Calling it again does nothing new.
    """
    if platform.libc_ver()[0] != "glibc":
        return False
    settings = ((_ARENA_MAX, 1), (_MMAP_THRESHOLD, 32 << 20), (_TRIM_THRESHOLD, 256 << 20))
    libc = ctypes.CDLL(None)
    return all(libc.mallopt(*setting) for setting in settings)
