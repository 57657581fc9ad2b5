"""Runs a command that does not outlive its parent: `python tether.py PARENT COMMAND...`.

When the thread that started the command ends, even by kill -9, the kernel kills the command (on Linux; elsewhere the
command only runs). This is a script that imports little, so that it starts fast; a hook between fork and exec would not
be safe in a process with threads.
"""

import ctypes
import os
import signal
import sys


def die_with_parent(parent: int) -> None:
    """Ask the kernel to kill this process with the thread that started it."""
    if sys.platform == "linux":
        pr_set_pdeathsig = 1  # sys/prctl.h
        ctypes.CDLL(None, use_errno=True).prctl(pr_set_pdeathsig, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent:  # the parent died before we could ask
            raise SystemExit(1)


if __name__ == "__main__":
    die_with_parent(int(sys.argv[1]))
    os.execv(sys.argv[2], sys.argv[2:])  # noqa: S606 - no shell is wanted
