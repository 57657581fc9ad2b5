"""A bundle's quality on the device's validation samples, and its comparison on samples labelled later."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from deploy.inference.prediction import Floats, Prediction, join_predictions
from deploy.inference.runtime import Runtime
from deploy.updates.drift import POOR, HomeReference, compute_deviations, compute_home_reference
from fedge.bundle.energies import compute_free_energy, compute_gate_entropy, compute_strangeness
from fedge.data.problems.problem import Problem
from fedge.data.validation import Validation
from fedge.wire.messages import Quality

BATCH: Final = 64
"""Samples in one call; this bounds the memory."""
HOME_BATCH: Final = 8
"""Number of samples in one call while requests may wait for the processor."""
MAX_HOME: Final = 500
"""Most validation samples that are predicted to know the classes' shares at home."""
TIMED: Final = 30
"""Number of single samples that are timed."""
MAX_COMPARED: Final = 1000
"""Labelled samples after which the comparison with the previous bundle ends."""
LARGEST_SCORE: Final = 1e9
"""Bound of a score in a message (`fedge.wire.messages.Score`)."""
ERROR: Final = 0.01
"""Highest probability that a bundle as good as the previous one is ever judged worse."""


@dataclass(frozen=True, slots=True)
class Measurement:
    """A bundle's results on validation samples.

    `quality` is the reportable part, on non-sensitive samples. `grades` (n,) say how good each answer is, 1 and 0 for
    right and wrong classes; None without labels. `finite` is whether all answers and energies are finite.
    """

    quality: Quality
    grades: NDArray[np.float64] | None
    finite: bool


class Graded(NamedTuple):
    """The grades (n,) of answers to labelled samples, and the score on those of them that are not sensitive."""

    grades: NDArray[np.float64]
    n_told: int
    score: float | None


@dataclass(slots=True)
class PairedTest:
    """Compares two bundles on the same labelled samples, by the samples on which one has a better grade."""

    n: int = 0
    lost: int = 0  # the previous bundle is better, such as right where the new one is wrong
    won: int = 0  # the new one is better
    gap: float = 0.0  # by which the previous bundle's grades are larger in sum

    def observe(self, before: NDArray[Any], now: NDArray[Any]) -> None:
        """Add n samples, with the grades of the previous and the new bundle on each, (n,)."""
        self.n += len(now)
        self.lost += int((before > now).sum())
        self.won += int((now > before).sum())
        self.gap += float((before.astype(np.float64) - now).sum())

    def is_worse(self, accuracy_drop: float) -> bool:
        """Return whether the new bundle's mean grade (accuracy) is lower by more than `accuracy_drop`, beyond chance.

        If both bundles were equally good, a sample on which one is better would be lost or won with probability 1/2.
        The evidence against that is the likelihood ratio, averaged over all other probabilities p (Robbins 1970),

            E = 2^(l + w) ∫ p^l (1 - p)^w dp = 2^(l + w) l! w! / (l + w + 1)!,

        which exceeds 1/`ERROR` with probability `ERROR` at most, however often it is checked (Ville's inequality).
        """
        if self.gap <= accuracy_drop * self.n:
            return False
        log_e = (self.lost + self.won) * math.log(2) + math.lgamma(self.lost + 1) + math.lgamma(self.won + 1)
        return log_e - math.lgamma(self.lost + self.won + 2) > -math.log(ERROR)


def measure_quality(runtime: Runtime, validation: Validation) -> Measurement:
    """Predict all validation samples in batches, and time single ones; without samples, time a sample of zeros."""
    n, reportable = len(validation.x), validation.reportable
    answers = [runtime.predict_inputs(validation.x[i : i + BATCH]) for i in range(0, n, BATCH)]
    single = (
        validation.x[reportable][:TIMED] if reportable.any() else np.zeros((1, *runtime.task.input_shape), np.float32)
    )
    latency = _measure_median_ms(runtime, single)
    if not answers:
        finite = bool(all(np.isfinite(each).all() for each in runtime.predict_inputs(single).answers))
        return Measurement(Quality(n=0, latency_ms=latency), None, finite=finite)
    problem, whole = runtime.task.problem, join_predictions(answers)
    strange = compute_strangeness(problem, whole.answers, whole.weights, whole.energies)
    free = compute_free_energy(whole.weights, whole.energies)
    entropy, told = compute_gate_entropy(whole.weights), [each[reportable] for each in whole.answers]
    grades = grade_answers(whole, validation.y)
    score = None
    if validation.y is not None and grades is not None and reportable.any():
        score = _compute_score(problem, told, validation.y[reportable])
    return Measurement(
        Quality(
            n=int(reportable.sum()),
            accuracy=score,
            gate_entropy=_compute_indecision(entropy[reportable], len(runtime.manifest.candidates)),
            free_energy=_compute_shift(strange[reportable], runtime),
            latency_ms=latency,
        ),
        grades,
        finite=all(np.isfinite(each).all() for each in (free, strange, *whole.answers)),
    )


def measure_home(runtime: Runtime, validation: Validation) -> HomeReference | None:
    """Predict up to `MAX_HOME` unmarked validation samples, in small batches beside the requests; None without any."""
    (kept,) = np.nonzero(validation.reportable)
    kept = kept[np.linspace(0, len(kept) - 1, min(len(kept), MAX_HOME)).astype(int)] if len(kept) else kept
    if not len(kept):
        return None
    answers = [runtime.predict_inputs(validation.x[kept[i : i + HOME_BATCH]]) for i in range(0, len(kept), HOME_BATCH)]
    problem, whole = runtime.task.problem, join_predictions(answers)
    grades = grade_answers(whole, None if validation.y is None else validation.y[kept])
    usual = find_usual_grade(problem, grades)
    return compute_home_reference(
        problem.get_shares(whole.answers),
        whole.weights,
        whole.energies,
        None if grades is None or usual is None else grades >= usual,
        problem.get_surprise(whole.answers),
        usual,
    )


def explain_better(which: str, samples: str, *, right_or_wrong: bool) -> str:
    """Return that a bundle, such as the running one, has better grades on some samples, which is a reason."""
    word, how = ("accuracy", "more accurate") if right_or_wrong else ("score", "better")
    return f"{word}: the {which} bundle is {how} on {samples}"


def grade_answers(answers: Prediction, y: NDArray[Any] | None) -> NDArray[np.float64] | None:
    """Return the grade of each answer, (n,); None without targets, or if only the user's own code can grade."""
    return None if y is None else answers.problem.grade_samples(answers.answers, y)


def find_usual_grade(problem: Problem, grades: NDArray[np.float64] | None) -> float | None:
    """Return the grade from which on an answer counts as right; None without grades."""
    if grades is None or not len(grades):
        return None
    return 1.0 if problem.RIGHT_OR_WRONG else float(np.quantile(grades, POOR, method="lower"))


def grade_labelled(runtime: Runtime, samples: Validation) -> Graded | None:
    """Grade a bundle's answers to labelled samples; None without any, or if only the user's own code can grade."""
    assert samples.y is not None
    if not len(samples.y):
        return None
    found = [runtime.predict_inputs(samples.x[i : i + BATCH]) for i in range(0, len(samples.y), BATCH)]
    whole = join_predictions(found)
    grades, told = grade_answers(whole, samples.y), samples.reportable
    if grades is None:
        return None
    score = _compute_score(runtime.task.problem, [each[told] for each in whole.answers], samples.y[told])
    return Graded(grades, int(told.sum()), score)


def _compute_score(problem: Problem, answers: Sequence[Floats], y: NDArray[Any]) -> float | None:
    """Return the score as messages take it."""
    score = problem.compute_score(answers, y)
    return None if score is None else min(LARGEST_SCORE, max(-LARGEST_SCORE, score))


def _compute_shift(free: NDArray[np.floating], runtime: Runtime) -> float | None:
    """Return the shift of the samples' mean free energy from the reference, in deviations, or None if unknown."""
    reference, usable = runtime.reference, free[np.isfinite(free)]
    if reference is None or not len(usable):
        return None
    return compute_deviations(float(usable.mean()) - reference.free_energy_mean, reference.free_energy_std)


def _compute_indecision(entropy: NDArray[np.float64], n_candidates: int) -> float | None:
    """Return the mean gate entropy divided by log M, 0 to 1, or None for a single candidate or without samples."""
    return None if n_candidates == 1 or not len(entropy) else min(1.0, float(entropy.mean()) / math.log(n_candidates))


def _measure_median_ms(runtime: Runtime, x: NDArray[np.float32]) -> float:
    times = []
    for i in range(max(TIMED, len(x))):
        begin = time.perf_counter()
        runtime.predict_inputs(x[i % len(x)][np.newaxis])
        times.append((time.perf_counter() - begin) * 1000)
    return float(np.median(times[len(times) // 5 :]))
