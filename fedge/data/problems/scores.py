"""Scores of answers: accuracy, F1, average precision, R^2, mean IoU, area under the ROC curve. Larger is better.

Each is a pure function on arrays, and None where the targets do not define it. `get_figure` says how people read them.
"""

from __future__ import annotations

import math
from typing import Any, Final, NamedTuple, Self

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from fedge.data.problems.maths import Array, Floats

Marks = NDArray[np.bool_]


class Figure(NamedTuple):
    """How people read a figure: its name in files, its name in words and in a narrow column, and its format.

    `share`: it is in [0, 1] and is read in percent. `digits`: after the point of another figure; None for one in units
    of its own, which gets four digits.
    """

    name: str
    words: str
    short: str
    share: bool = False
    digits: int | None = 3

    @property
    def known(self) -> bool:
        """Whether it is one of `FIGURES`."""
        return self.name.partition(" ")[0] in FIGURES

    def format_cell(self, value: float | None, sign: str = "") -> str:
        """Format a value, or with sign "+" a difference, for a column whose heading or note has the unit."""
        if value is None or math.isnan(value):
            return "–"
        if self.share:
            return f"{100 * value:{sign}.1f}"
        return f"{value:{sign}.4g}" if self.digits is None else f"{value:{sign}.{self.digits}f}"

    def format(self, value: float | None) -> str:
        """Format a value with its unit."""
        shown = self.format_cell(value)
        return f"{shown} %" if self.share and shown != "–" else shown


ACCURACY: Final = Figure("accuracy", "accuracy", "accuracy", share=True)
FIGURES: Final = {
    each.name: each
    for each in (
        ACCURACY,
        Figure("macro_f1", "macro F1", "F1", share=True),
        Figure("weighted_f1", "weighted F1", "weighted F1", share=True),
        Figure("mean_average_precision", "mean average precision", "mAP", share=True),
        Figure("exact_match", "exact match", "exact", share=True),
        Figure("r2", "R²", "R²"),
        Figure("rmse", "RMSE", "RMSE", digits=None),
        Figure("mae", "MAE", "MAE", digits=None),
        Figure("mean_iou", "mean IoU", "IoU", share=True),
        Figure("pixel_accuracy", "pixel accuracy", "pixels", share=True),
        Figure("likelihood", "log-likelihood", "log-lik."),
        Figure("auroc", "AUROC", "AUROC"),
    )
}


def get_figure(name: str) -> Figure:
    """Return how people read a figure of this name; after a space may stand of what it is, such as "rmse power"."""
    kind, space, of = name.partition(" ")
    if (known := FIGURES.get(kind)) is None:
        return Figure(name, name, name, digits=None)
    return known._replace(name=name, words=f"{known.words}{space}{of}", short=f"{known.short}{space}{of}")


class Counts(Struct, frozen=True, kw_only=True):
    """How often each answer was given to each kind of target: `counts` has a row for each of `rows`.

    `unit`: what is counted.
    """

    unit: str
    rows: tuple[str, ...]
    columns: tuple[str, ...]
    counts: tuple[tuple[int, ...], ...]

    @classmethod
    def from_table(cls, unit: str, rows: tuple[str, ...], columns: tuple[str, ...], table: NDArray[np.int64]) -> Self:
        """Make them from a table, (rows, columns)."""
        return cls(unit=unit, rows=rows, columns=columns, counts=tuple(map(tuple, table.tolist())))

    def add(self, more: Counts) -> Counts:
        """Return the sum of both, which are of one problem."""
        return Counts.from_table(self.unit, self.rows, self.columns, np.add(self.counts, more.counts))


def compute_accuracy(found: NDArray[np.integer], targets: NDArray[np.integer]) -> float | None:
    """Return the share of samples with the right class, 0 to 1; None without samples."""
    return float((found == targets).mean()) if len(targets) else None


def compute_f1(found: Marks, wanted: Marks) -> Array:
    """Return F1 = 2 TP / (2 TP + FP + FN) of each label, (C,); NaN for labels that no target has.

    `found`, `wanted`: whether each sample was given, and has, each label, (n, C).
    """
    right = (found & wanted).sum(axis=0)
    total = found.sum(axis=0) + wanted.sum(axis=0)
    f1 = np.divide(2 * right, total, out=np.full(total.shape, np.nan), where=total > 0)
    return np.where(wanted.any(axis=0), f1, np.nan)


def compute_macro_f1(found: Marks, wanted: Marks) -> float | None:
    """Return the mean F1 over the labels that some target has, 0 to 1; None if there are none.

    >>> compute_macro_f1(np.array([[True, False], [True, True]]), np.array([[True, False], [False, True]]))
    0.8333333333333333
    """
    f1 = compute_f1(found, wanted)
    return float(np.nanmean(f1)) if np.isfinite(f1).any() else None


def compute_average_precision(scores: Floats, wanted: Marks) -> float | None:
    """Return the mean precision at the rank of each wanted sample, (0, 1]; None without a wanted sample.

    Samples of equal scores count together, at the last of their ranks, so their order does not matter.
    """
    if not wanted.any():
        return None
    order = np.argsort(-scores, kind="stable")
    ordered, hits = scores[order], wanted[order].cumsum()
    last = np.append(ordered[1:] != ordered[:-1], True)  # of each group of equal scores
    ranks, hits = np.flatnonzero(last) + 1, hits[last]
    return float((np.diff(hits, prepend=0) * hits / ranks).sum() / wanted.sum())


def compute_mean_average_precision(scores: Floats, wanted: Marks) -> float | None:
    """Return the mean of the average precisions, over the labels that some target has; arrays are (n, C)."""
    found = [compute_average_precision(s, w) for s, w in zip(scores.T, wanted.T, strict=True)]
    known = [value for value in found if value is not None]
    return float(np.mean(known)) if known else None


def compute_auroc(scores: Floats, wanted: Marks) -> float | None:
    """Return the probability that a wanted sample has a larger score than another one; None if one kind is missing.

    Ties count half (the Mann-Whitney statistic).

    >>> compute_auroc(np.array([0.1, 0.4, 0.4, 0.8]), np.array([False, False, True, True]))
    0.875
    """
    n_wanted = int(wanted.sum())
    n_others = len(wanted) - n_wanted
    if not n_wanted or not n_others:
        return None
    _, place, counts = np.unique(scores, return_inverse=True, return_counts=True)
    ranks = (counts.cumsum() - (counts - 1) / 2)[place]
    return float((ranks[wanted].sum() - n_wanted * (n_wanted + 1) / 2) / (n_wanted * n_others))


def compute_macro_auroc(scores: Floats, wanted: Marks) -> float | None:
    """Return the mean AUROC over the labels that some targets have and others have not; arrays are (n, C)."""
    found = [compute_auroc(s, w) for s, w in zip(scores.T, wanted.T, strict=True)]
    known = [value for value in found if value is not None]
    return float(np.mean(known)) if known else None


def compute_r2(found: Floats, targets: Floats) -> float | None:
    """Return R^2 = 1 - sum of squared errors / sum of squared deviations, the mean over targets that vary.

    None without two samples, or if no target varies. Arrays are (n, D).
    """
    if len(targets) < 2:
        return None
    wanted = np.asarray(targets, np.float64)
    errors = ((np.asarray(found, np.float64) - wanted) ** 2).sum(axis=0)
    whole = ((wanted - wanted.mean(axis=0)) ** 2).sum(axis=0)
    varies = whole > 1e-12 * np.maximum(1.0, (wanted**2).sum(axis=0))
    return float((1 - errors[varies] / whole[varies]).mean()) if varies.any() else None


def compute_mean_iou(found: NDArray[Any], targets: NDArray[Any], n_classes: int, ignored: int) -> float | None:
    """Return the mean over the classes in the targets of intersection / union, 0 to 1; None without counted pixels.

    Pixels whose target is `ignored` count nowhere. Arrays are (n, H, W).
    """
    kept = targets != ignored
    pairs = np.bincount(targets[kept].astype(np.int64) * n_classes + found[kept], minlength=n_classes**2)
    table = pairs.reshape(n_classes, n_classes)
    both, wanted = table.diagonal(), table.sum(axis=1)
    union = wanted + table.sum(axis=0) - both
    present = wanted > 0
    return float((both[present] / union[present]).mean()) if present.any() else None


def count_marks(found: Marks, wanted: Marks) -> NDArray[np.int64]:
    """Count, for each of C labels, samples with it that were found and missed, and others named and left alone, (C, 4).

    These are true positives, false negatives, false positives and true negatives; arrays are (n, C).
    """
    kinds = (found & wanted, ~found & wanted, found & ~wanted, ~found & ~wanted)
    return np.stack([kind.sum(axis=0) for kind in kinds], axis=1).astype(np.int64)


def compute_confusion(found: NDArray[np.integer], targets: NDArray[np.integer], n_classes: int) -> NDArray[np.int64]:
    """Count samples by class and answer, (C, C): row = class, column = answer."""
    pairs = np.bincount(targets * n_classes + found, minlength=n_classes**2)
    return pairs.reshape(n_classes, n_classes)
