"""Power cuts: a process that ends, without any clean-up, just before one of its changes of the disk."""

import os
import sys
import warnings

CHANGES = ("os.rename", "os.link", "os.remove", "os.mkdir", "os.rmdir", "open", "os.truncate")


def in_a_process_cut_off_at(change, work):
    """Do `work` in a process that ends, without any clean-up, just before its change of the disk number `change`.

    Returns whether it was cut off.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # a fork beside threads, which this child never meets
        child = os.fork()
    if child == 0:
        left = change

        def cut(event, arguments):
            nonlocal left
            if event in CHANGES and not (event == "open" and not _writes(arguments)):
                if left == 0:
                    os._exit(9)
                left -= 1

        try:
            sys.addaudithook(cut)
            work()
        finally:
            os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9


def _writes(arguments):
    return isinstance(arguments[2], int) and arguments[2] & (os.O_WRONLY | os.O_RDWR)
