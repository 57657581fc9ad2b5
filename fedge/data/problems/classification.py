"""Single-label classification: one class for each sample (docs/methods/fedge.md).

q = log-softmax(o / T + kappa pi);  l = q[y];  b = pi;  E = logsumexp(o);  p = sum_k alpha_k exp q_k
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import numpy as np
from msgspec import structs
from numpy.typing import NDArray

from fedge.data.problems.calibration import Calibration
from fedge.data.problems.formulas import Answers
from fedge.data.problems.labels import read_labels
from fedge.data.problems.maths import Array, Floats, log_softmax, logsumexp
from fedge.data.problems.names import HOW_TO_ADD
from fedge.data.problems.problem import Problem
from fedge.data.problems.results import Column, Result
from fedge.data.problems.scores import (
    Counts,
    compute_accuracy,
    compute_confusion,
    compute_macro_auroc,
    compute_macro_f1,
)
from fedge.errors import ConfigError


class Classification(Problem, frozen=True, kw_only=True, tag="classification"):
    """One of C classes; outputs are logits (C,), targets class numbers."""

    NAME: ClassVar = "classification"
    SCORE: ClassVar = "accuracy"
    RAW: ClassVar = "logits"
    WIDTH: ClassVar = "task.n_classes"
    COUNTED: ClassVar = True
    OUTPUTS: ClassVar = ("probabilities",)
    CLASSED: ClassVar = True
    APART: ClassVar = True
    RIGHT_OR_WRONG: ClassVar = True
    GROUPED: ClassVar = True
    SHARED: ClassVar = True
    SETS: ClassVar = True
    FOLDER: ClassVar = "classes"

    classes: tuple[str, ...]
    first: int = 0  # the number of the first class in files
    open: bool = False  # whether samples may be of classes that have not joined yet

    def get_output_shape(self, input_shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return (C,)."""
        return (len(self.classes),)

    def describe_outputs(self) -> str:
        """Return them in words."""
        n, some = len(self.classes), ", ".join(self.classes[:8])
        return f"there are {n} classes ({some}{', ...' * (n > 8)})"

    def get_target_shape(self, input_shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return (), since a target is one number."""
        return ()

    def convert_targets(self, y: NDArray[Any], n: int, input_shape: tuple[int, ...], what: str) -> NDArray[Any]:
        """Return class numbers, (n,) int64; raise ConfigError for others."""
        return read_labels(y, n, self.classes, self.first, None if self.open else len(self.classes), what)

    def find_known(self, y: NDArray[Any]) -> NDArray[np.bool_]:
        """Return which samples are of a known class."""
        return y < len(self.classes)

    def allow_unknown(self) -> Classification:
        """Return the problem that takes class numbers beyond the known ones, too."""
        return structs.replace(self, open=True)

    def make_targets(self, n: int, input_shape: tuple[int, ...]) -> NDArray[Any]:
        """Return all classes in turn."""
        return np.arange(n) % len(self.classes)

    def group_targets(self, y: NDArray[Any]) -> NDArray[np.int64]:
        """Return the classes."""
        return y

    def fit_offset(self, targets: NDArray[Any], predict: Callable[[], Floats]) -> Array:
        """Return pi, the log class shares (C,), with half a sample added for each class (fedge.md, 8)."""
        smoothed = np.bincount(targets, minlength=len(self.classes)) + 0.5
        return np.asarray(np.log(smoothed / smoothed.sum()))

    def calibrate(self, outputs: Floats, how: Calibration, offset: Array) -> Answers:
        """Return log-probabilities q, (n, C)."""
        with np.errstate(invalid="ignore"):
            return Answers(log_softmax(np.asarray(outputs, np.float64) / how.temperature + how.kappa * offset))

    def compute_log_likelihood(self, answers: Answers, targets: NDArray[Any]) -> Array:
        """Return q[y]."""
        return np.asarray(answers.values[np.arange(len(targets)), targets], np.float64)

    def compute_unknown(self, targets: NDArray[Any]) -> Array:
        """Return -log C, that of equal shares."""
        return np.full(len(targets), -math.log(len(self.classes)))

    def compute_energies(self, outputs: Floats, answers: Answers) -> Floats:
        """Return logsumexp(o)."""
        with np.errstate(invalid="ignore"):
            return logsumexp(np.asarray(outputs, np.float64))

    def mix(self, components: Sequence[Answers], weights: Floats) -> tuple[Floats, ...]:
        """Return probabilities (n, C); equal shares where nothing is usable."""
        return (mix_probabilities([np.exp(each.values) for each in components], weights),)

    def compute_score(self, mixed: Sequence[Floats], targets: NDArray[Any]) -> float | None:
        """Return the accuracy, 0 to 1; None without samples."""
        return compute_accuracy(mixed[0].argmax(axis=1), targets)

    def count_by_name(self, y: NDArray[Any]) -> dict[str, int]:
        """Count the samples of each class."""
        return dict(zip(self.classes, np.bincount(y, minlength=len(self.classes)).tolist(), strict=True))

    def find_classes(self, answers: Sequence[Floats]) -> NDArray[np.integer]:
        """Return the most probable classes."""
        return np.asarray(answers[0].argmax(axis=1))

    def name_answers(self, answers: Sequence[Floats]) -> tuple[str, ...]:
        """Return the names of the most probable classes."""
        return tuple(self.classes[k] for k in answers[0].argmax(axis=1))

    def score_alone(self, outputs: Floats, targets: NDArray[Any]) -> float | None:
        """Return the accuracy of the largest logits."""
        return compute_accuracy(outputs.argmax(axis=1), targets)

    def compute_metrics(self, mixed: Sequence[Floats], targets: NDArray[Any]) -> dict[str, float]:
        """Return the macro F1."""
        found = mixed[0].argmax(axis=1)[:, np.newaxis] == np.arange(len(self.classes))
        f1 = compute_macro_f1(found, targets[:, np.newaxis] == np.arange(len(self.classes)))
        return {} if f1 is None else {"macro_f1": f1}

    def read_target(self, value: Any, input_shape: tuple[int, ...]) -> NDArray[Any]:
        """Return the number of the class of this name; raise ConfigError if there is none."""
        if value not in self.classes:
            known = f"the label {str(value)[:100]!r} is not a class; there are {', '.join(self.classes)}"[:900]
            raise ConfigError(f"{known}; {HOW_TO_ADD}")
        return np.asarray(self.classes.index(value), np.int64)

    def check_targets(self, y: NDArray[Any], n: int, input_shape: tuple[int, ...]) -> None:
        """Check class numbers, (n,); raise ConfigError for others."""
        if y.shape != (n,) or ((y < 0) | (y >= len(self.classes))).any():
            raise ConfigError(f"give a class number from 0 to {len(self.classes) - 1} for each of the samples")

    def describe_target(self, target: NDArray[Any]) -> str:
        """Return the name of the class."""
        return self.classes[int(target)]

    def find_group(self, target: NDArray[Any]) -> int:
        """Return the class."""
        return int(target)

    def name_groups(self) -> tuple[str, ...]:
        """Return the names of the classes."""
        return self.classes

    def grade_samples(self, answers: Sequence[Floats], targets: NDArray[Any]) -> Array | None:
        """Return 1 where the most probable class is right, else 0."""
        return np.asarray(answers[0].argmax(axis=1) == targets, np.float64)

    def get_promise(self, answers: Sequence[Floats]) -> Floats:
        """Return the largest probabilities."""
        return np.asarray(answers[0].max(axis=1))

    def get_shares(self, answers: Sequence[Floats]) -> Floats:
        """Return the probabilities."""
        return answers[0]

    def find_answered(self, answers: Sequence[Floats], outlier: NDArray[np.bool_]) -> NDArray[np.int64] | None:
        """Return the most probable classes."""
        return np.asarray(answers[0].argmax(axis=1), np.int64)

    def list_results(self, input_shape: tuple[int, ...]) -> tuple[Result, ...]:
        """Return probabilities, and the most probable class by number and by name."""
        classes = (len(self.classes),)
        return Result("probabilities", "FP32", classes), Result("class", "INT64", ()), Result("class_name", "BYTES", ())

    def make_results(self, answers: Sequence[Floats], usual: tuple[float, float]) -> dict[str, Any]:
        """Return these."""
        numbers = np.asarray(answers[0].argmax(axis=1), np.int64)
        return {"probabilities": answers[0], "class": numbers, "class_name": self.name_answers(answers)}

    def make_record(self, answers: Sequence[Floats], usual: tuple[float, float]) -> dict[str, Any]:
        """Return the most probable classes by number and name, and their probabilities."""
        numbers, names = answers[0].argmax(axis=1).tolist(), self.name_answers(answers)
        return {"predictions": numbers, "class_names": names, "probability": answers[0].max(axis=1).tolist()}

    def make_columns(self, answers: Sequence[Floats], usual: tuple[float, float]) -> tuple[Column, ...]:
        """Return the most probable classes and their probabilities."""
        sure = tuple(f"{p:.4f}" for p in answers[0].max(axis=1))
        names = Column("class", self.name_answers(answers), max(map(len, self.classes)))
        return names, Column("probability", sure, left=False)

    def make_figures(self, answers: Sequence[Floats], targets: NDArray[Any] | None) -> dict[str, Any]:
        """Return the accuracy, and that of each class that occurs with its number of samples."""
        if targets is None:
            return {"accuracy": None, "by_class": {}}
        right = answers[0].argmax(axis=1) == targets
        own = {name: targets == number for number, name in enumerate(self.classes)}
        by_class = {
            name: {"n": int(those.sum()), "accuracy": float(right[those].mean())}
            for name, those in own.items()
            if those.any()
        }
        return {"accuracy": float(right.mean()), "by_class": by_class}

    def compute_nonconformity(self, answers: Sequence[Floats], targets: NDArray[Any]) -> Array:
        """Return 1 - p(y), the score of LAC (conformal.md, equation 3)."""
        return np.asarray(1 - np.asarray(answers[0], np.float64)[np.arange(len(targets)), targets])

    def find_covered(self, answers: Sequence[Floats], targets: NDArray[Any], threshold: float) -> NDArray[np.bool_]:
        """Return whether each class is in its sample's set."""
        return np.asarray(self._find_sets(answers, threshold)[np.arange(len(targets)), targets])

    def _find_sets(self, answers: Sequence[Floats], threshold: float) -> NDArray[np.bool_]:
        """Return the classes that are probable enough, and always the most probable one, (n, C)."""
        found = ~(1 - np.asarray(answers[0], np.float64) > threshold)
        found[np.arange(len(found)), answers[0].argmax(axis=1)] = True
        return np.asarray(found)

    def list_set_results(self) -> tuple[Result, ...]:
        """Return the classes in the set, their names, and whether they are several."""
        classes = (len(self.classes),)
        return Result("set", "BOOL", classes), Result("set_names", "BYTES", ()), Result("abstains", "BOOL", ())

    def make_sets(self, answers: Sequence[Floats], threshold: float) -> dict[str, Any]:
        """Return these."""
        found = self._find_sets(answers, threshold)
        names = tuple(",".join(self.classes[k] for k in np.flatnonzero(row)) for row in found)
        return {"set": found, "set_names": names, "abstains": found.sum(axis=1) > 1}

    def make_set_columns(self, answers: Sequence[Floats], threshold: float) -> tuple[Column, ...]:
        """Return the names of the classes in the set, or that all are."""
        found = self.make_sets(answers, threshold)
        pairs = zip(found["set"].all(axis=1), found["set_names"], strict=True)
        return (Column("set", tuple("all" if every else names for every, names in pairs)),)

    def measure_sets(self, answers: Sequence[Floats], threshold: float) -> dict[str, Any]:
        """Return the mean number of classes in a set, and the share of sets with several."""
        sizes = self._find_sets(answers, threshold).sum(axis=1)
        return {"mean_set_size": float(sizes.mean()), "abstains": float((sizes > 1).mean())}

    def compute_details(self, mixed: Sequence[Floats], targets: NDArray[Any]) -> dict[str, float]:
        """Return the mean AUROC of each class against all others, beside macro F1."""
        found = compute_macro_auroc(mixed[0], targets[:, np.newaxis] == np.arange(len(self.classes)))
        return self.compute_metrics(mixed, targets) | ({} if found is None else {"auroc": found})

    def count_answers(self, mixed: Sequence[Floats], targets: NDArray[Any]) -> Counts:
        """Return the confusion matrix: a row for each class, a column for each answer."""
        table = compute_confusion(mixed[0].argmax(axis=1), targets, len(self.classes))
        return Counts.from_table("samples", self.classes, self.classes, table)


def mix_probabilities(components: Sequence[Floats], weights: Floats, unknown: float | None = None) -> Floats:
    """Return sum_k w_k p_k, (n, C, ...), from probabilities p_k of that shape and weights (n, K).

    Where all weights are 0 every probability is `unknown`, by default 1 / C.
    """
    shape = (len(weights),) + (1,) * (components[0].ndim - 1)
    total = np.zeros_like(components[0])
    for k, each in enumerate(components):
        share = weights[:, k].reshape(shape)
        total = total + np.where(share > 0, share * each, 0.0).astype(total.dtype)
    nothing = weights.sum(axis=1).reshape(shape) <= 0
    return np.where(nothing, total.dtype.type(1 / total.shape[1] if unknown is None else unknown), total)
