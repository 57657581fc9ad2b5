"""Counts the samples of each device by class, and finds what looks wrong with them."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from difflib import SequenceMatcher
from itertools import combinations
from pathlib import Path, PurePosixPath
from typing import Any, Final

import numpy as np

from coordinator.service.findings import Finding
from fedge.data import images
from fedge.data.task import TaskSpec

FEW: Final = 20
"""Fewest samples of a device; with fewer, its validation samples, a fifth, tell hardly anything."""
SIMILAR: Final = 0.8
"""Least similarity (`difflib`, 0..1) of two names of which one may be a typo of the other."""
RARE: Final = 4
"""A typo has at most 1 / RARE of the right name's samples, unless no device has samples of both names."""
MOST_NAMES: Final = 200
"""Most classes whose names are compared, since 20,000 pairs take a second."""
PARTS: Final = frozenset({"train", "test", "val"})
"""Names of folders above class folders that are parts of the data, not devices."""

Counts = Mapping[str, Mapping[str, int]]
"""Numbers of samples by device and class; device "" if the data name no devices."""


def count_by_class(task: TaskSpec, y: np.ndarray[Any, Any]) -> dict[str, int]:
    """Count the labels y (n,) of each class of the task."""
    return task.problem.count_by_name(y)


def count_in_folder(source: Path) -> dict[str, dict[str, int]]:
    """Count the images of a folder or .zip by device, the folders above the class folder, and class.

    Raises:
        ConfigError: as `images.list_images`.
    """
    found: defaultdict[str, Counter[str]] = defaultdict(Counter)
    for name in map(PurePosixPath, images.list_images(source)):
        device = "/".join(part for part in name.parts[:-2] if part not in PARTS)
        found[device][name.parent.name] += 1
    return {device: dict(sorted(counts.items())) for device, counts in sorted(found.items())}


def find_empty_folders(sources: Iterable[Path]) -> Iterator[Finding]:
    """Find folders without images and without folders in them; hidden ones do not count."""
    folders = (path for source in sources if source.is_dir() for path in source.rglob("*") if path.is_dir())
    if empty := [str(path) for path in sorted(folders) if not path.name.startswith(".") and _is_empty(path)]:
        yield Finding(f"no image is in {_format_some(empty)}", "put images there, or delete the folder")


def _is_empty(folder: Path) -> bool:
    try:
        return not any(each.is_dir() or each.suffix.lower() in images.SUFFIXES for each in folder.iterdir())
    except PermissionError:  # such as lost+found, of a disk of its own
        return False


def find_missing_classes(counts: Counts) -> Iterator[Finding]:
    """Find the classes of which no device has a sample."""
    total = _count_total(counts)
    if missing := [name for name in total if not total[name]]:
        yield Finding(
            f"no sample is of {_format_some(missing)}", "nobody can learn them: add samples, or leave the classes out"
        )


def find_oddities(counts: Counts, sizes: Mapping[str, int]) -> Iterator[Finding]:
    """Find classes without samples, devices with few, and class names that look like a typo of another.

    Args:
        counts: numbers of samples by device and class.
        sizes: each device's number of samples, which may have several labels, or no class.
    """
    yield from find_missing_classes(counts)
    if few := [f"{device or 'all together'} has {n}" for device, n in sizes.items() if n < FEW]:
        do = f"a device needs at least {FEW} samples, better 50: a fifth is held out to validate"
        yield Finding(f"few samples: {_format_some(few)}", do)
    total = _count_total(counts)
    names = sorted(name for name in total if total[name])
    for pair in combinations(names if len(names) <= MOST_NAMES else (), 2):
        rare, common = sorted(pair, key=lambda name: total[name])
        apart = not any(of_device.get(rare) and of_device.get(common) for of_device in counts.values())
        if _is_same(rare, common) or (_is_similar(rare, common) and (apart or total[rare] * RARE <= total[common])):
            what = f"class {rare} ({total[rare]} samples) looks like a typo of {common} ({total[common]})"
            yield Finding(what, f"if they are one class, rename {rare} to {common} wherever it occurs")


def _count_total(counts: Counts) -> dict[str, int]:
    names = dict.fromkeys(name for of_device in counts.values() for name in of_device)
    return {name: sum(of_device.get(name, 0) for of_device in counts.values()) for name in names}


def _is_same(one: str, other: str) -> bool:
    """Return whether two names differ only in case, spaces and punctuation."""
    return "".join(filter(str.isalnum, one.casefold())) == "".join(filter(str.isalnum, other.casefold())) != ""


def _is_similar(one: str, other: str) -> bool:
    """Return whether two names are nearly equal, and differ in more than a number."""
    letters = [[c for c in name if not c.isdigit()] for name in (one, other)]
    return letters[0] != letters[1] and SequenceMatcher(None, one, other).ratio() >= SIMILAR


def format_counts(counts: Counts, sizes: Mapping[str, int]) -> Iterator[str]:
    """Format a line per device: its samples, and how many are of each class, or have each label."""
    width = max(map(len, counts), default=0)
    for device, of_device in counts.items():
        parts = [f"{name} {n}" for name, n in of_device.items() if n]
        if device or parts:
            yield f"{device.ljust(width)}  {sizes[device]}{': ' * bool(parts)}{_format_some(parts)}".strip()


def _format_some(words: Sequence[str], most: int = 12) -> str:
    return ", ".join(words[:most]) + f", and {len(words) - most} more" * (len(words) > most)
