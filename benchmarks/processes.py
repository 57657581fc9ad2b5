"""What scripts that time processes tell of them, and of the machine (Linux)."""

from __future__ import annotations

import os
import platform
import time
from pathlib import Path
from typing import Any


def cpu_s(pid: int) -> float:
    """Processor time that a process has used, threads that have ended included."""
    return time.clock_gettime(~pid << 3 | 2)  # its clock, as clock_getcpuclockid(3) numbers it


def peak_mb(pid: int) -> float:
    """Largest resident memory of a process so far."""
    status = Path(f"/proc/{pid}/status").read_text(encoding="utf-8")
    (peak,) = (line.split()[1] for line in status.splitlines() if line.startswith("VmHWM"))
    return int(peak) * 1024 / 1e6


def machine() -> dict[str, Any]:
    """What a run's figures depend on beside the code."""
    return {
        "machine": platform.processor() or platform.machine(),
        "processors": len(os.sched_getaffinity(0)),
        "load": round(os.getloadavg()[0], 1),
    }
