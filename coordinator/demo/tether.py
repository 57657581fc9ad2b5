"""Runs a command that does not outlive its parent: `python tether.py PARENT_PID COMMAND...`.

However the parent ends, even by kill -9, the kernel then sends SIGTERM to the command. It is a separate script, so that
it starts fast and differs visibly from the command. Without a Linux kernel it only runs the command.
"""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1  # linux/prctl.h


def main(parent: int, command: list[str]) -> None:
    """Tie this process to its parent and become the command."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != parent:  # the parent died before prctl
            sys.exit(1)
    os.execv(command[0], command)  # noqa: S606 - no shell is wanted


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])
