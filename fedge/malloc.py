"""What glibc does with freed memory, for processes that make and drop large arrays and messages all the time."""

from __future__ import annotations

import ctypes
import platform

_ARENA_MAX, _MMAP_MAX, _MMAP_THRESHOLD, _TRIM_THRESHOLD = -8, -4, -3, -1  # M_... of malloc.h


def tune_malloc(*, large: bool = False) -> bool:
    """Let glibc keep freed chunks instead of returning them to the kernel; True if that was done.

    `large`: also those of 32 MiB and more, such as models, each of which is otherwise mapped anew, however many. For a
    server, whose memory must hold its largest round anyway: with a model of 45 MB a server step took 15 instead of 16
    to 120 ms, an idle round of 100 simulated devices of 6.7 MB 213 instead of 265 ms.

    Every received chunk otherwise costs fresh pages: receiving is 2.5 times slower; so does every
    update of a simulated device. Both thresholds belong together; one alone makes it worse. One arena for all threads,
    so that chunks read and written in threads profit as well. Calling it again does nothing new.
    """
    if platform.libc_ver()[0] != "glibc":
        return False
    settings = [(_ARENA_MAX, 1), (_MMAP_THRESHOLD, 32 << 20), (_TRIM_THRESHOLD, -1 if large else 256 << 20)]
    if large:
        settings.append((_MMAP_MAX, 0))
    libc = ctypes.CDLL(None)
    return all(libc.mallopt(*setting) for setting in settings)
