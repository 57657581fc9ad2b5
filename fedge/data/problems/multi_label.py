"""Several labels at once: each of C labels is there or not (docs/methods/problems.md section 2).

z_c = o_c / T + kappa pi_c;   l = sum_c ln sigma((2 y_c - 1) z_c);   p_c = sum_k alpha_k sigma(z_kc)
pi_c = ln((n_c + 1/2) / (n - n_c + 1/2));   E = sum_c softplus(o_c)   (Wang et al., NeurIPS 2021)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Annotated, Any, ClassVar, Final

import numpy as np
from msgspec import UNSET, Meta, UnsetType
from numpy.typing import NDArray

from fedge.data.problems.calibration import Calibration
from fedge.data.problems.classification import mix_probabilities
from fedge.data.problems.formulas import Answers
from fedge.data.problems.maths import Array, Floats, sigmoid, softplus
from fedge.data.problems.names import Word
from fedge.data.problems.problem import Problem
from fedge.data.problems.results import Column, Result
from fedge.data.problems.scores import (
    Counts,
    compute_macro_auroc,
    compute_macro_f1,
    compute_mean_average_precision,
    count_marks,
)
from fedge.errors import ConfigError

KINDS: Final = ("found", "missed", "wrongly named", "rightly left out")
"""What may become of a label of a sample: true positive, false negative, false positive, true negative."""


LOWEST: Final = 0.1
"""Lower bound of a label's threshold, for labels that hardly any sample has."""


class MultiLabel(Problem, frozen=True, kw_only=True, tag="multi-label"):
    """C labels, each 0 or 1; outputs are logits (C,).

    `shares` (C,) says how many of the task's samples have each label; the same on all machines.
    """

    NAME: ClassVar = "several labels"
    SCORE: ClassVar = "macro_f1"
    RAW: ClassVar = "logits"
    OUTPUTS: ClassVar = ("probabilities",)

    labels: Annotated[tuple[Word, ...], Meta(min_length=1, max_length=10_000)]
    shares: tuple[Annotated[float, Meta(ge=0, le=1)], ...] | UnsetType = UNSET

    def __post_init__(self) -> None:
        if self.shares and len(self.shares) != len(self.labels):
            raise ValueError(f"{len(self.labels)} labels have {len(self.shares)} shares")

    @property
    def thresholds(self) -> Array:
        """The probability from which each label is there, (C,): sqrt(1/2 pi / (1 + pi)), or 1/2 if pi is unknown.

        The threshold with the largest F1 is half of that F1 (Lipton et al., ECML 2014). F1 is 1 at most, and
        2 pi / (1 + pi) for a model that always says yes, and this is the geometric mean of the two.
        """
        if isinstance(self.shares, UnsetType):
            return np.full(len(self.labels), 0.5)
        shares = np.array(self.shares)
        return np.asarray(np.maximum(np.sqrt(0.5 * shares / (1 + shares)), LOWEST))

    def find_labels(self, probabilities: Floats) -> NDArray[np.bool_]:
        """Return which labels are there, (n, C)."""
        return np.asarray(probabilities >= self.thresholds)

    def get_output_shape(self, input_shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return (C,)."""
        return (len(self.labels),)

    def describe_outputs(self) -> str:
        """Return them in words."""
        return f"there are {len(self.labels)} labels"

    def get_target_shape(self, input_shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return (C,)."""
        return (len(self.labels),)

    def convert_targets(self, y: NDArray[Any], n: int, input_shape: tuple[int, ...], what: str) -> NDArray[Any]:
        """Return zeros and ones, (n, C) int64; raise ConfigError for other numbers."""
        wanted = f"0 or 1 for each of {len(self.labels)} labels"
        if y.shape != (n, len(self.labels)) or y.dtype.kind not in "buif":
            raise ConfigError(f"{what} must be {wanted} ({n}, {len(self.labels)}), not {y.dtype}{y.shape}")
        if not ((y == 0) | (y == 1)).all():
            raise ConfigError(f"{what} must be {wanted}; found {y.min()}..{y.max()}")
        return y.astype(np.int64)

    def group_targets(self, y: NDArray[Any]) -> NDArray[np.int64]:
        """Return each sample's rarest label among these samples, or C if it has none."""
        if not len(y):
            return np.zeros(0, np.int64)
        counts = np.where(y > 0, y.sum(axis=0), np.iinfo(np.int64).max)
        return np.where(y.any(axis=1), counts.argmin(axis=1), len(self.labels)).astype(np.int64)

    def fit_offset(self, targets: NDArray[Any], predict: Callable[[], Floats]) -> Array:
        """Return the log odds pi of each label, (C,), with half a sample added on either side."""
        there, n = targets.sum(axis=0), len(targets)
        return np.asarray(np.log((there + 0.5) / (n - there + 0.5)))

    def calibrate(self, outputs: Floats, how: Calibration, offset: Array) -> Answers:
        """Return logits z, (n, C)."""
        return Answers(np.asarray(outputs, np.float64) / how.temperature + how.kappa * offset)

    def compute_log_likelihood(self, answers: Answers, targets: NDArray[Any]) -> Array:
        """Return the sum over labels of ln sigma(z) where the label is there, and ln sigma(-z) elsewhere."""
        return np.asarray(-softplus(np.where(targets > 0, -answers.values, answers.values)).sum(axis=1))

    def compute_unknown(self, targets: NDArray[Any]) -> Array:
        """Return that of even odds, -C log 2."""
        return np.full(len(targets), -len(self.labels) * math.log(2))

    def compute_energies(self, outputs: Floats, answers: Answers) -> Floats:
        """Return the joint energy, the sum of softplus(o)."""
        return np.asarray(softplus(np.asarray(outputs, np.float64)).sum(axis=1))

    def mix(self, components: Sequence[Answers], weights: Floats) -> tuple[Floats, ...]:
        """Return the probability of each label, (n, C); 1/2 where nothing is usable."""
        return (mix_probabilities([sigmoid(each.values) for each in components], weights, 0.5),)

    def count_by_name(self, y: NDArray[Any]) -> dict[str, int]:
        """Count the samples that have each label."""
        return dict(zip(self.labels, y.sum(axis=0).tolist(), strict=True))

    def name_answers(self, answers: Sequence[Floats]) -> tuple[str, ...]:
        """Return the labels that are there, with commas between them."""
        return tuple(", ".join(self.labels[c] for c in np.flatnonzero(row)) for row in self.find_labels(answers[0]))

    def compute_score(self, mixed: Sequence[Floats], targets: NDArray[Any]) -> float | None:
        """Return the macro F1 of the labels that are there, over labels that some sample has."""
        return compute_macro_f1(self.find_labels(mixed[0]), targets > 0)

    def compute_metrics(self, mixed: Sequence[Floats], targets: NDArray[Any]) -> dict[str, float]:
        """Return mean average precision, and the share of samples with all labels right."""
        precision = compute_mean_average_precision(mixed[0], targets > 0)
        known = {} if precision is None else {"mean_average_precision": precision}
        exact = ((self.find_labels(mixed[0])) == (targets > 0)).all(axis=1)
        return known | ({"exact_match": float(exact.mean())} if len(exact) else {})

    def read_target(self, value: Any, input_shape: tuple[int, ...]) -> NDArray[Any]:
        """Return zeros and ones, (C,), of names of labels in a list, or of 0 or 1 for each; raise ConfigError."""
        if isinstance(value, list) and all(isinstance(name, str) for name in value):
            if unknown := [name for name in value if name not in self.labels]:
                text = f"{unknown[0][:100]!r} is not a label; there are {', '.join(self.labels)}"
                raise ConfigError(text[:900])
            return np.isin(self.labels, value).astype(np.int64)
        return super().read_target(value, input_shape)

    def find_names(self, target: NDArray[Any]) -> tuple[str, ...]:
        """Return the names of the labels that are there."""
        return tuple(self.labels[c] for c in np.flatnonzero(target))

    def list_names(self) -> tuple[str, ...]:
        """Return the names of all labels."""
        return self.labels

    def describe_target(self, target: NDArray[Any]) -> str:
        """Return the names of the labels that are there."""
        return _join_words(self.find_names(target))

    def grade_samples(self, answers: Sequence[Floats], targets: NDArray[Any]) -> Array | None:
        """Return the F1 of each sample's labels, 0 to 1; 1 where rightly none was given."""
        found, wanted = self.find_labels(answers[0]), targets > 0
        both, total = (found & wanted).sum(axis=1), found.sum(axis=1) + wanted.sum(axis=1)
        return np.where(total > 0, 2 * both / np.maximum(total, 1), 1.0)

    def list_results(self, input_shape: tuple[int, ...]) -> tuple[Result, ...]:
        """Return the probability of each label, whether it is given, and the names of those given."""
        labels = (len(self.labels),)
        return Result("probabilities", "FP32", labels), Result("labels", "BOOL", labels), Result("names", "BYTES", ())

    def make_results(self, answers: Sequence[Floats], usual: tuple[float, float]) -> dict[str, Any]:
        """Return these."""
        return {
            "probabilities": answers[0],
            "labels": self.find_labels(answers[0]),
            "names": self.name_answers(answers),
        }

    def make_columns(self, answers: Sequence[Floats], usual: tuple[float, float]) -> tuple[Column, ...]:
        """Return the labels that are given, each with its probability."""
        found = zip(answers[0], self.find_labels(answers[0]), strict=True)
        rows = [[(self.labels[c], row[c]) for c in np.flatnonzero(there)] for row, there in found]
        return (Column("labels", tuple(_join_words([f"{name} {p:.4f}" for name, p in row]) for row in rows)),)

    def compute_details(self, mixed: Sequence[Floats], targets: NDArray[Any]) -> dict[str, float]:
        """Return the mean AUROC of the labels beside them."""
        found = compute_macro_auroc(mixed[0], targets > 0)
        return self.compute_metrics(mixed, targets) | ({} if found is None else {"auroc": found})

    def count_answers(self, mixed: Sequence[Floats], targets: NDArray[Any]) -> Counts:
        """Return for each label how many samples had it and had not, rightly and wrongly."""
        return Counts.from_table("samples", self.labels, KINDS, count_marks(self.find_labels(mixed[0]), targets > 0))


def _join_words(words: Sequence[str]) -> str:
    return ", ".join(words) or "none"
