"""What the scripts of this folder share: flags, tables, files, plots, and what they tell of the machine (Linux).

`parser_of` gives each script `--json`, `finish` writes what was asked for there.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

DIGITS = tuple("0123456789")


def parser_of(description: str | None) -> argparse.ArgumentParser:
    """A parser with the module's text as help, and `--json`."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures to FILE")
    return parser


def several(kind: Callable[[str], Any] = str) -> Callable[[str], list[Any]]:
    """The type of a flag that takes values with commas between them."""
    return lambda text: [kind(part.strip()) for part in text.split(",") if part.strip()]


def finish(arguments: argparse.Namespace, figures: object) -> None:
    """Write the figures, if `--json` was given."""
    if arguments.json:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")


def say(text: str) -> None:
    """Print a line of progress to standard error."""
    print(text, file=sys.stderr, flush=True)


def progress_of(label: str) -> Callable[[str], None]:
    """What says lines of progress, each after a label."""
    return lambda text: say(f"{label}: {text}")


def show(rows: Iterable[Mapping[str, object]], title: str = "") -> None:
    """Print rows as columns; nested figures have a column each."""
    flat = [dict(_flat(row)) for row in rows]
    names = list(dict.fromkeys(name for row in flat for name in row))
    lines = [names, *([_text(row.get(name, "")) for name in names] for row in flat)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    print(*([title] if title else []), sep="\n")
    for line in lines:
        print("  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)), flush=True)


def _flat(row: Mapping[str, object], before: str = "") -> Iterable[tuple[str, object]]:
    for name, value in row.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{before}{name} ")
        else:
            yield f"{before}{name}", value


def _text(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def markdown(head: Sequence[object], rows: Iterable[Sequence[object]]) -> str:
    """A table in Markdown."""
    return "\n".join(f"| {' | '.join(map(str, row))} |" for row in (head, ["---"] * len(head), *rows))


def plot(file: Path, draw: Callable[..., None], *, n: int = 1, **size: Any) -> None:
    """Draw on the axes of a new figure, n side by side, and save it."""
    import matplotlib as mpl

    mpl.use("agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(1, n, layout="constrained", **size)
    draw(*np.ravel(axes))
    figure.savefig(file, dpi=150)


def digit_images(side: int) -> tuple[np.ndarray, np.ndarray]:
    """scikit-learn's digits as images (n, 1, side, side) in [0, 1], each pixel as a square, and labels."""
    from sklearn.datasets import load_digits

    x, y = load_digits(return_X_y=True)
    scale, rest = divmod(side, 8)
    images = np.kron(x.reshape(-1, 8, 8) / 16, np.ones((1, scale, scale)))
    margins = ((0, 0), (rest // 2, rest // 2), (rest // 2, rest // 2))
    return np.pad(images, margins)[:, None].astype(np.float32), y.astype(np.int64)


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
