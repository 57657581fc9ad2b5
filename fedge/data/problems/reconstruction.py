"""Reconstruction: is a sample as usual? The network gives back its input (docs/methods/problems.md section 2).

    e_k = |x - o_k|^2 / D;   l = -1/2 [e / (T s)^2 + ln(2 pi T^2 s^2)];   E = l
    surprise = -ln sum_k alpha_k exp l_k;   a sample is anomalous above the threshold that its bundle holds

A device needs no labels. A target is a mark, 1 for a known anomaly. Marked samples are for figures alone: a device
neither learns from them nor chooses by them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Annotated, Any, ClassVar, Final

import numpy as np
from msgspec import UNSET, Meta, structs
from numpy.typing import NDArray

from fedge.data.problems.calibration import PLAIN, Calibration
from fedge.data.problems.formulas import Answers
from fedge.data.problems.labels import require_whole_numbers
from fedge.data.problems.maths import Array, Floats, logsumexp
from fedge.data.problems.problem import Problem
from fedge.data.problems.results import Column, Result
from fedge.data.problems.scores import compute_auroc
from fedge.errors import ConfigError

SMALLEST: Final = 1e-12
"""Lower bound of a pooled mean error."""
MARKS: Final = ("usual", "unusual")
"""Words of the marks 0 and 1."""
LARGEST: Final = 1e30
"""Bound of the surprise, which says that no candidate's output is finite."""


class Reconstruction(Problem, frozen=True, kw_only=True, tag="reconstruction"):
    """The input itself; outputs have its shape. `alarms` is the share of usual samples that may give an alarm."""

    NAME: ClassVar = "reconstruction"
    SCORE: ClassVar = "likelihood"
    SCORES: ClassVar = (-math.inf, math.inf)
    NETWORK: ClassVar = "autoencoder"
    COUNTED: ClassVar = True
    OUTPUTS: ClassVar = ("surprise",)
    LABELLED: ClassVar = False
    GROUPED: ClassVar = True
    FOLDER: ClassVar = "alone"

    alarms: Annotated[float, Meta(gt=0, lt=1)] = 0.05

    def get_output_shape(self, input_shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of an input."""
        return input_shape

    def describe_outputs(self) -> str:
        """Return them in words."""
        return "it is to give back its input"

    def get_target_shape(self, input_shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return (), since a mark is one number."""
        return ()

    def get_answer_shapes(self, input_shape: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
        """Return that of the surprise, (1,)."""
        return ((1,),)

    def convert_targets(self, y: NDArray[Any], n: int, input_shape: tuple[int, ...], what: str) -> NDArray[Any]:
        """Return marks, (n,) int64, also of whole floats; raise ConfigError for others."""
        if y.dtype.kind == "f" and (np.isfinite(y) & (y == np.rint(y))).all():
            y = y.astype(np.int64)
        return require_whole_numbers(y, n, 1, what)

    def find_usual(self, y: NDArray[Any]) -> NDArray[np.bool_]:
        """Return which samples are not marked: an anomaly in the validation samples would raise the threshold."""
        return np.asarray(y == 0)

    def group_targets(self, y: NDArray[Any]) -> NDArray[np.int64]:
        """Return the marks."""
        return y

    def reduce_outputs(self, outputs: Floats, inputs: Floats) -> Floats:
        """Return the mean squared error e of each sample, (n, 1)."""
        with np.errstate(over="ignore", invalid="ignore"):
            errors = (np.asarray(outputs, np.float64) - inputs) ** 2
        return np.asarray(errors.reshape(len(errors), math.prod(errors.shape[1:])).mean(axis=1, keepdims=True))

    def fit_offset(self, targets: NDArray[Any], predict: Callable[[], Floats]) -> Array:
        """Return zero: a device's own samples say nothing beside the model."""
        return np.zeros(1)

    def calibrate(self, outputs: Floats, how: Calibration, offset: Array) -> Answers:
        """Return l, (n,), from errors e (n, 1)."""
        s = how.temperature * (1.0 if how.deviation is UNSET else how.deviation[0])
        return Answers(-0.5 * (outputs[:, 0] / s**2 + math.log(2 * math.pi * s**2)))

    def compute_log_likelihood(self, answers: Answers, targets: NDArray[Any]) -> Array:
        """Return l, which needs no target."""
        return np.asarray(answers.values, np.float64)

    def compute_unknown(self, targets: NDArray[Any]) -> Array:
        """Return l of an error of 1 under a deviation of 1, which is that of standardised inputs not seen at all."""
        return np.full(len(targets), -0.5 * (1 + math.log(2 * math.pi)))

    def compute_energies(self, outputs: Floats, answers: Answers) -> Floats:
        """Return l."""
        return answers.values

    def mix(self, components: Sequence[Answers], weights: Floats) -> tuple[Floats, ...]:
        """Return the surprise -ln sum_k alpha_k exp l_k, (n, 1); `LARGEST` where nothing is usable."""
        found = np.stack([each.values for each in components], axis=1)
        with np.errstate(divide="ignore"):
            terms = np.where(weights > 0, found + np.log(weights), -np.inf)
        some = (weights > 0).any(axis=1, keepdims=True)
        found = -logsumexp(np.where(some, terms, 0.0))[:, np.newaxis]
        return (np.where(some, found, LARGEST),)

    def make_rows(self, calibrations: Sequence[Calibration], offsets: Sequence[Array]) -> dict[str, Array]:
        """Return 1 / (T s)^2 and ln(2 pi T^2 s^2), (K,) each."""
        spreads = [how.temperature * (1.0 if how.deviation is UNSET else how.deviation[0]) for how in calibrations]
        squares = np.array(spreads) ** 2
        return {"scale": 1 / squares, "prior": np.log(2 * math.pi * squares)}

    def compute_score(self, mixed: Sequence[Floats], targets: NDArray[Any]) -> float | None:
        """Return the mean log-likelihood of the samples that are not marked; None without any."""
        usual = mixed[0][targets == 0, 0]
        return -float(usual.mean()) if len(usual) else None

    def compute_metrics(self, mixed: Sequence[Floats], targets: NDArray[Any]) -> dict[str, float]:
        """Return the area under the ROC curve, if there are marked samples beside others."""
        found = compute_auroc(mixed[0][:, 0], targets > 0)
        return {} if found is None else {"auroc": found}

    def make_figures(self, answers: Sequence[Floats], targets: NDArray[Any] | None) -> dict[str, Any]:
        """Return the score and further figures as JSON has them; samples without marks count as usual ones."""
        return super().make_figures(answers, np.zeros(len(answers[0]), np.int64) if targets is None else targets)

    def get_surprise(self, answers: Sequence[Floats]) -> Floats | None:
        """Return the surprise, (n,)."""
        return answers[0][:, 0]

    def get_alarms(self) -> float | None:
        """Return the share of usual samples for which an alarm is accepted."""
        return self.alarms

    def list_choices(self, *, own: bool) -> tuple[Calibration, ...]:
        """Return the plain one, whose deviation follows from the errors."""
        return (PLAIN,)

    def finish_choice(self, chosen: Calibration, index: int, means: Array) -> Calibration:
        """Return it with s, the root of the mean error."""
        return structs.replace(chosen, deviation=(float(np.sqrt(max(means[0], SMALLEST))),))

    def count_statistics(self, *, own: bool) -> int:
        """Return 1, the sum of errors."""
        return 1

    def compute_statistics(
        self, outputs: Floats, targets: NDArray[Any], offset: Array, *, own: bool
    ) -> tuple[float, ...]:
        """Return the sum of the errors e; one that is not finite counts as 1."""
        return (float(np.where(np.isfinite(outputs), outputs, 1.0).sum()),)

    def read_target(self, value: Any, input_shape: tuple[int, ...]) -> NDArray[Any]:
        """Return the mark of one of the words `MARKS`, of 0 or 1, or of false or true; raise ConfigError."""
        if isinstance(value, str) and value in MARKS:
            return np.asarray(MARKS.index(value), np.int64)
        if not isinstance(value, int) or value not in (0, 1):
            raise ConfigError(f"the target must be {' or '.join(MARKS)}, or 0 or 1, not {str(value)[:100]!r}")
        return np.asarray(value, np.int64)

    def get_default_target(self) -> NDArray[Any] | None:
        """Return the mark of a usual sample."""
        return np.asarray(0, np.int64)

    def describe_target(self, target: NDArray[Any]) -> str:
        """Return the word."""
        return MARKS[int(target)]

    def find_group(self, target: NDArray[Any]) -> int:
        """Return the mark."""
        return int(target)

    def name_groups(self) -> tuple[str, ...]:
        """Return the words of the marks."""
        return MARKS

    def grade_samples(self, answers: Sequence[Floats], targets: NDArray[Any]) -> Array | None:
        """Return the log-likelihood of a usual sample; 0 for a marked one, which tells nothing of two models."""
        return np.where(targets > 0, 0.0, -np.asarray(answers[0][:, 0], np.float64))

    def find_answered(self, answers: Sequence[Floats], outlier: NDArray[np.bool_]) -> NDArray[np.int64] | None:
        """Return 1 for each alarm."""
        return outlier.astype(np.int64)

    def list_results(self, input_shape: tuple[int, ...]) -> tuple[Result, ...]:
        """Return whether each sample is an anomaly, its surprise, and the threshold above which it is one."""
        return Result("anomaly", "BOOL", ()), Result("surprise", "FP32", ()), Result("threshold", "FP32", ())

    def make_results(self, answers: Sequence[Floats], usual: tuple[float, float]) -> dict[str, Any]:
        """Return these."""
        surprise = answers[0][:, 0]
        threshold = np.full(len(surprise), usual[1], np.float32)
        return {"anomaly": ~(surprise <= usual[1]), "surprise": surprise, "threshold": threshold}

    def make_record(self, answers: Sequence[Floats], usual: tuple[float, float]) -> dict[str, Any]:
        """Return these, with the threshold once."""
        return super().make_record(answers, usual) | {"threshold": usual[1]}

    def make_columns(self, answers: Sequence[Floats], usual: tuple[float, float]) -> tuple[Column, ...]:
        """Return a word for each sample, its surprise, and the threshold."""
        found = self.make_results(answers, usual)
        words = tuple(MARKS[int(one)] for one in found["anomaly"])
        surprise, threshold = (tuple(f"{number:.4g}" for number in found[name]) for name in ("surprise", "threshold"))
        return (
            Column("sample", words),
            Column("surprise", surprise, left=False),
            Column("threshold", threshold, left=False),
        )
