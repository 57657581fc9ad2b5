"""Memory that is freed stays with the process, or goes back at once."""

import platform
import subprocess
import sys

import numpy as np
import psutil
import pytest

from fedge.system.malloc import release_freed_memory, tune_malloc

FAULTS = """
import resource, sys
import numpy as np
from fedge.system.malloc import tune_malloc

if sys.argv[1] == "tuned":
    tune_malloc(large=True)
    tune_malloc()  # as by a transport that starts later
counts = []
for _ in range(4):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    np.ones(80_000_000, np.float32)
    counts.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
print(min(counts))
"""


def test_it_can_be_called_twice() -> None:
    assert tune_malloc() == tune_malloc()


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="tunes glibc")
def test_a_large_array_is_made_again_without_fresh_pages() -> None:
    faults = {
        how: int(subprocess.run([sys.executable, "-c", FAULTS, how], check=True, capture_output=True).stdout)
        for how in ("tuned", "plain")
    }
    assert faults["tuned"] < 10 <= faults["plain"]


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="glibc's alone")
def test_what_was_freed_goes_back_to_the_kernel() -> None:
    """Though a later array is still in use, which alone would keep it."""
    process = psutil.Process()
    arrays = [np.ones(6000) for _ in range(1000)]  # of 48 kB each, so that none is mapped alone
    last = arrays.pop()
    del arrays
    before = process.memory_info().rss
    release_freed_memory()
    assert process.memory_info().rss < before - 30e6
    assert last.sum() == 6000
