"""What a runtime answers for n samples, whatever the problem."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, replace
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fedge.bundle.conformal import count_needed
from fedge.bundle.energies import compute_strangeness
from fedge.data.problems.own import call_code
from fedge.data.problems.problem import Problem
from fedge.system.loading import register_object

Floats = NDArray[np.float32]

SHOWN: Final = 5
"""Number of most frequent classes shown in the text of a prediction."""


class Coverage(NamedTuple):
    """How prediction sets are made (docs/methods/conformal.md).

    Attributes:
        wanted: the share of samples whose set must hold the target.
        n: the number of scores from which the threshold is.
        threshold: what has a score up to it is in the set; infinite if n is too small, and sets then hold everything.
        alpha: the level of the threshold, 1 - wanted until labels have moved it.
    """

    wanted: float
    n: int
    threshold: float
    alpha: float

    @property
    def enough(self) -> bool:
        """Whether n samples promise the wanted coverage."""
        return self.n >= count_needed(self.wanted)


@dataclass(frozen=True, slots=True, repr=False)
class Prediction:
    """Predictions for n samples, in their order.

    Which of the properties there are depends on the problem; the others raise an AttributeError that names it.

    Attributes:
        problem: the task's problem.
        answers: what the graph answers, (n, ...) each, in the order of the problem's `OUTPUTS`.
        weights: (n, M), each candidate's share in the mixture, 0 if dropped; a guard (see the manifest) comes on top.
        energies: (n, M), how familiar a sample looks to each candidate, standardised on its validation samples. NaN if
            the candidate's output was not finite, or if engine lazy did not run the candidate.
        latency_ms: wall time of preprocessing and graph together, for all n samples.
        usual: lowest and highest strangeness of a sample that is not flagged.
        adapted: whether the probabilities follow other class shares, or other weights of the candidates, than the
            bundle's (`deploy.inference.prior`).
        coverage: how the prediction sets are made, if there are any (`deploy.load(..., coverage=0.9)`).
    """

    problem: Problem
    answers: tuple[Floats, ...]
    weights: Floats
    energies: Floats
    latency_ms: float
    usual: tuple[float, float] = (-math.inf, math.inf)
    adapted: bool = False
    coverage: Coverage | None = None

    def __len__(self) -> int:
        """Return n."""
        return len(self.weights)

    def __repr__(self) -> str:
        """Describe the predictions in a line, however many samples there are."""
        counts = Counter(self.problem.name_answers(self.answers)).most_common()
        classes = [f"{name!r} {n}" for name, n in counts[:SHOWN]]
        classes += [f"{len(counts) - SHOWN} more"] * (len(counts) > SHOWN)
        n = len(self)
        parts = [f"{n} sample{'s' * (n != 1)}", *([", ".join(classes)] if classes else [])]
        return f"Prediction({'; '.join([*parts, f'{self.outlier.sum()} outliers', f'{self.latency_ms:.1f} ms'])})"

    @property
    def probabilities(self) -> Floats:
        """(n, C) of classes or labels; (n, C, H, W) of masks."""
        return self._get("probabilities")

    @property
    def class_index(self) -> NDArray[np.int64]:
        """The most probable class of each sample, (n,), or of each pixel, (n, H, W); the first on a tie."""
        return np.asarray(self.probabilities.argmax(axis=1), np.int64)

    @property
    def class_name(self) -> tuple[str, ...]:
        """The names of these classes, n strings, or of several labels with commas between them."""
        return self.problem.name_answers(self.answers)

    @property
    def values(self) -> NDArray[np.float64]:
        """The numbers of a regression in their own units, (n, D)."""
        return self.problem.restore_units(self._get("mean"))

    @property
    def spread(self) -> NDArray[np.float64]:
        """The standard deviations of these numbers, (n, D)."""
        return self.problem.restore_units(self._get("spread"), spread=True)

    @property
    def surprise(self) -> Floats:
        """How unusual each sample is, (n,), in nats; a sample is an outlier above the bundle's threshold."""
        return self._get("surprise")[:, 0]

    @property
    def outputs(self) -> Floats:
        """The network's outputs in a problem of one's own, (n, ...)."""
        return self._get("outputs")

    def decode(self, problem: type | str) -> Any:
        """Return what `decode` of the given class (or package.module:Class) makes of these outputs.

        The caller names the class, since a bundle's word for it runs nothing here.

        Raises:
            ConfigError: there is no such class, it has no `decode`, or that fails.
        """
        path = problem if isinstance(problem, str) else register_object(problem)
        return call_code(path, "decode", self.outputs)

    @property
    def sets(self) -> dict[str, Any]:
        """The prediction sets of a classification: `set` (n, C), `set_names` and `abstains` (n,), if it has several.

        Those of a regression are the ends `low` and `high` of intervals (n, D) in their own units, which may be
        infinite. Sets hold the targets of the wanted share of samples like the device's own.

        Raises:
            AttributeError: the bundle was loaded without `coverage`.
        """
        if self.coverage is None:
            raise AttributeError("there are no prediction sets: load the bundle with coverage=0.9 or the like")
        return self.problem.make_sets(self.answers, self.coverage.threshold)

    @property
    def outlier(self) -> NDArray[np.bool_]:
        """Whether each sample is unlike the device's own, (n,); True if its strangeness is not finite."""
        strange = compute_strangeness(self.problem, self.answers, self.weights, self.energies)
        flagged: NDArray[np.bool_] = ~((strange >= self.usual[0]) & (strange <= self.usual[1]))
        return flagged

    def select_rows(self, start: int, stop: int) -> Prediction:
        """Return the predictions for samples [start, stop); `latency_ms` is still that of all samples."""
        rows = slice(start, stop)
        answers = tuple(each[rows] for each in self.answers)
        return replace(self, answers=answers, weights=self.weights[rows], energies=self.energies[rows])

    def _get(self, name: str) -> Floats:
        if name not in self.problem.OUTPUTS:
            raise AttributeError(f"an answer of {self.problem.NAME} has {', '.join(self.problem.OUTPUTS)}, not {name}")
        return self.answers[self.problem.OUTPUTS.index(name)]


def join_predictions(parts: list[Prediction]) -> Prediction:
    """Return one prediction for the samples of all of them; its latency is the sum."""
    answers = tuple(np.concatenate(each) for each in zip(*(part.answers for part in parts), strict=True))
    weights, energies = (np.concatenate([getattr(p, name) for p in parts]) for name in ("weights", "energies"))
    latency_ms = sum(part.latency_ms for part in parts)
    return replace(parts[0], answers=answers, weights=weights, energies=energies, latency_ms=latency_ms)
