"""Drift: whether a device's recent samples are still those that its bundle is for, and if not, in which way.

Three kinds can be told apart:

- shares: the classes come in other shares. The mean of the calibrated probabilities moves; free energies do not, and
  the bundle is as sure of each class as it was.
- inputs: the samples look different. Free energies move, or the gate's entropy does though the shares do not, or the
  shares do and the bundle is less sure.
- labels: samples whose true class is known contradict the bundle although it is sure of its answers.

A problem without classes has samples of a single class, so there are no shares. Where answers are not right or wrong,
one counts as right if its grade (`Problem.grade_samples`) is not below those of all but the worst `POOR` at home.

An alarm goes out only when recent answers fit again. A new bundle takes over the alarm of the one before, since its own
reference may be made of the samples of former times.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass
from typing import Final

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from fedge.bundle.energies import compute_free_energy, compute_gate_entropy, summarise_strangeness
from fedge.bundle.manifest import Reference
from fedge.wire.messages import Count, DriftKind

Floats = NDArray[np.floating]

WINDOW: Final = 200
"""Number of samples in the window of the exponential mean that averages drift."""
CERTAINTY: Final = 4.0
"""Standard errors of the window's mean that a shift must exceed to count as drift, so that chance alone hardly does."""
NEGLIGIBLE: Final = 0.5
"""Largest shift, in deviations of single samples, that never counts as drift, however certain it is."""

NEGLIGIBLE_AMONG_OTHERS: Final = 0.8
"""As `NEGLIGIBLE`, while classes come in other shares: free energies by class are known from few samples."""
LESS_SURE: Final = 0.1
"""Fall of the mean largest probability that never counts as drift, while classes come in other shares."""
SHARES_CERTAINTY: Final = 3.0
"""As `CERTAINTY`, for the classes' shares: few validation samples tell little of them, and a false alarm costs less."""
NEGLIGIBLE_SHARES: Final = 0.15
"""Largest share of the samples with another class than at home that never counts as drift."""
PSEUDO_SAMPLES: Final = 0.5
"""Samples, of all classes and candidates equally, that are added to those at home, so that no share is 0."""

LABELS: Final = 60
"""Number of latest labelled answers that are compared with what the bundle promises."""
MIN_LABELS: Final = 10
"""Fewest labelled answers that can contradict."""
MIN_FITTING: Final = 30
"""Fewest labelled answers that can clear an alarm. Where inputs or shares moved, they are among the last `WINDOW`
answers; where labels contradicted, they may come as slowly as labels do."""
FALSE_ALARM: Final = 1e-3
"""Highest probability that labelled answers contradict a bundle that is as good as it promises."""
PROMISE_MARGIN: Final = 0.05
"""Accuracy by which a bundle may stay below what it promises."""
POOR: Final = 0.2
"""Share of the answers at home that are poor, where answers have grades and are neither right nor wrong."""


class Alarm(Struct, frozen=True, forbid_unknown_fields=True):
    """Drift of a kind, seen in the answers of the bundle with this release. Also the content of HOME/drift.json."""

    kind: DriftKind
    release: Count


@dataclass(frozen=True, slots=True)
class HomeReference:
    """What a bundle answers on the device's own validation samples.

    Attributes:
        n: the number of samples.
        shares: the classes' shares by the calibrated probabilities, (C,), all above 0, sum 1.
        weights: the candidates' mean weights, (M,), all above 0, sum 1.
        accuracy: the share of right answers, drawn towards one half as by two more samples; None without labels.
        energies: as in the manifest, for bundles whose manifest has no reference; None with fewer than 2 samples.
        by_class: the mean free energy of each class, (C,), drawn towards the mean of all as by one more sample.
        rest: the mean free energy that shares and `by_class` do not explain.
        sure_by_class, sure_rest: the same of the largest probability, in place of the free energy.
        sure_std: its deviation.
        usual_grade: grade from which on an answer counts as right; None without labels.
    """

    n: int
    shares: NDArray[np.float64]
    weights: NDArray[np.float64]
    accuracy: float | None
    energies: Reference | None
    by_class: NDArray[np.float64]
    rest: float
    sure_by_class: NDArray[np.float64]
    sure_rest: float
    sure_std: float
    usual_grade: float | None = None


def compute_home_reference(
    probabilities: Floats,
    weights: Floats,
    energies: Floats,
    correct: NDArray[np.bool_] | None,
    surprise: Floats | None = None,
    usual_grade: float | None = None,
) -> HomeReference | None:
    """Return the reference from answers (n, C), (n, M), (n, M) and whether they are right, (n,); None without any.

    `surprise` (n,) counts in place of free energies, if the problem says one.
    """
    n, free = len(probabilities), compute_free_energy(weights, energies) if surprise is None else surprise
    kept = np.isfinite(free) & np.isfinite(probabilities).all(axis=1)
    if not kept.any():
        return None
    found = summarise_strangeness(free, weights)
    free, p = np.asarray(free[kept], np.float64), probabilities[kept].astype(np.float64)
    sure = p.max(axis=1)
    (by_class, rest), (sure_by_class, sure_rest) = _explain_by_class(p, free), _explain_by_class(p, sure)
    return HomeReference(
        n=len(free),
        shares=_compute_shares(p),
        weights=_compute_shares(weights[kept].astype(np.float64)),
        accuracy=None if correct is None else float((correct.sum() + 1) / (n + 2)),
        energies=None if found is None else found[0],
        by_class=by_class,
        rest=rest,
        sure_by_class=sure_by_class,
        sure_rest=sure_rest,
        sure_std=float(sure.std()),
        usual_grade=usual_grade,
    )


def _explain_by_class(p: NDArray[np.float64], x: NDArray[np.float64]) -> tuple[NDArray[np.float64], float]:
    """Return the mean of x (n,) in each class, (C,), drawn towards that of all; and what this leaves of the mean."""
    by_class = (p.T @ x + x.mean()) / (p.sum(axis=0) + 1)
    return by_class, float((x - p @ by_class).mean())


def _compute_shares(p: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the mean of rows (n, K), with `PSEUDO_SAMPLES` added, so that it is above 0 everywhere."""
    total = p.sum(axis=0) + PSEUDO_SAMPLES / p.shape[1]
    return np.asarray(total / total.sum())


@dataclass(slots=True)
class _ExponentialMean:
    """Exponential mean of a stream, with its effective number of samples."""

    value: float = 0.0
    weight: float = 0.0  # Σ of the samples' weights
    square: float = 0.0  # Σ of their squares

    def observe(self, x: float) -> None:
        keep = 1 - 1 / WINDOW
        self.weight = self.weight * keep + 1
        self.square = self.square * keep**2 + 1
        self.value += (x - self.value) / self.weight

    @property
    def n_effective(self) -> float:
        return self.weight**2 / self.square if self.square else 0.0


@dataclass(slots=True)
class _MeanShares:
    """Exponential mean of probabilities (C,), with its effective number of samples."""

    value: NDArray[np.float64] | None = None
    weight: float = 0.0
    square: float = 0.0

    def observe(self, probabilities: Floats) -> None:
        """Add finite probabilities (n, C), oldest first."""
        n, keep = len(probabilities), 1 - 1 / WINDOW
        decay = keep ** np.arange(n - 1, -1, -1.0)
        added = decay @ probabilities
        before, lasting = self.weight, keep**n
        self.weight = before * lasting + float(decay.sum())
        self.square = self.square * lasting**2 + float((decay**2).sum())
        self.value = (added if self.value is None else self.value * before * lasting + added) / self.weight

    def differs(self, home: HomeReference) -> bool:
        """Return whether the shares are others than at home, beyond chance and by more than is negligible.

        Under equal shares Σ_c (p_c − h_c)² / (m_c (1/n + 1/n_home)), with the middle m of both, is at most about
        chi-square with C − 1 degrees of freedom, as probabilities vary less than classes. Its quantile is that of
        Wilson and Hilferty (1931).
        """
        if self.value is None:
            return False
        difference, middle = self.value - home.shares, (self.value + home.shares) / 2
        if np.abs(difference).sum() / 2 <= NEGLIGIBLE_SHARES:
            return False
        error = self.square / self.weight**2 + 1 / home.n
        chance = float((difference**2 / middle).sum()) / error
        free = max(1, len(difference) - 1)
        spread = 2 / (9 * free)
        return chance > free * (1 - spread + SHARES_CERTAINTY * math.sqrt(spread)) ** 3


@dataclass(frozen=True, slots=True)
class _Labelled:
    at: int  # number of answers before
    right: bool
    confidence: float


class Drift:
    """Detects whether recent samples differ from those of the bundle's reference; `observe` all predictions.

    Both the free energy and the gate's entropy are watched. A shift counts if it exceeds `NEGLIGIBLE` standard
    deviations of single samples and also `CERTAINTY` standard errors, including the reference's own error. `home` is
    set later, when it is known. Labelled answers that fit overrule energies. `release` is the bundle's, and `held` is
    the alarm of the bundle or process before.
    """

    def __init__(self, reference: Reference | None, release: int = 0, held: Alarm | None = None) -> None:
        self._own = reference
        self._release = release
        self.home: HomeReference | None = None
        self._held = held
        self._free, self._entropy, self._shares = _ExponentialMean(), _ExponentialMean(), _MeanShares()
        self._sure = _ExponentialMean()
        self._labelled: deque[_Labelled] = deque(maxlen=LABELS)
        self._seen = 0

    def observe(self, weights: Floats, energies: Floats, probabilities: Floats, surprise: Floats | None = None) -> None:
        """Add the outputs of a prediction, (n, M), (n, M), (n, C); samples without a usable candidate are ignored.

        `surprise` (n,) counts in place of free energies, if the problem says one.
        """
        free = compute_free_energy(weights, energies) if surprise is None else surprise
        entropy = compute_gate_entropy(weights)
        kept = np.isfinite(free) & np.isfinite(probabilities).all(axis=1)
        for free_energy, gate_entropy, sure in zip(free[kept], entropy[kept], probabilities[kept], strict=True):
            self._free.observe(float(free_energy))
            self._entropy.observe(float(gate_entropy))
            self._sure.observe(float(sure.max()))
        if kept.any():
            self._shares.observe(probabilities[kept])
        self._seen += int(kept.sum())
        self._release_alarm()

    def observe_labels(self, right: NDArray[np.bool_], confidence: Floats) -> None:
        """Add whether answers (n,) of this bundle were right, and the probabilities of the classes that it named."""
        for was_right, sure in zip(right.tolist(), confidence.tolist(), strict=True):
            self._labelled.append(_Labelled(self._seen, bool(was_right), float(sure)))
        self._release_alarm()

    def hold(self, alarm: Alarm | None) -> None:
        """Take over an alarm, such as that of a process before."""
        self._held = alarm

    @property
    def shift(self) -> tuple[float, float]:
        """Shift of free energy and gate entropy, in deviations of the reference's samples."""
        r = self._reference
        if r is None or not self._seen:
            return 0.0, 0.0
        return (
            compute_deviations(self._free.value - r.free_energy_mean, r.free_energy_std),
            compute_deviations(self._entropy.value - r.gate_entropy_mean, r.gate_entropy_std),
        )

    @property
    def alarm(self) -> Alarm | None:
        """The alarm, or None; only labels count before a whole window of samples."""
        kind = self._find_kind()
        return self._held if kind is None else Alarm(kind, self._release)

    @property
    def kind(self) -> DriftKind | None:
        """In which way recent samples differ, or None."""
        alarm = self.alarm
        return None if alarm is None else alarm.kind

    @property
    def _reference(self) -> Reference | None:
        return self._own or (None if self.home is None else self.home.energies)

    def _find_kind(self) -> DriftKind | None:
        """Return the kind by this bundle's own answers."""
        fits, whole = self._fits_labels(), self._seen >= WINDOW
        others = whole and self.home is not None and self._shares.differs(self.home)
        free, entropy = self._find_moved(NEGLIGIBLE_AMONG_OTHERS if others else NEGLIGIBLE) if whole else (False, False)
        if (free or (self._is_less_sure() if others else entropy)) and not fits:
            return DriftKind.INPUTS
        if self._is_contradicted():
            return DriftKind.LABELS
        return DriftKind.SHARES if others else None

    def _find_moved(self, negligible: float) -> tuple[bool, bool]:
        """Return whether free energy and gate entropy have moved, surely and by more than is negligible.

        Where it is known what is usual at home, of the free energy only what the classes' shares do not explain counts.
        """
        if self._reference is None:
            return False, False
        n, (free, entropy) = self._reference.n, self.shift
        if self.home is not None and self.home.energies is not None and self._shares.value is not None:
            rest = self._free.value - float(self._shares.value @ self.home.by_class) - self.home.rest
            n, free = self.home.n, compute_deviations(rest, self.home.energies.free_energy_std)
        error = CERTAINTY * math.sqrt(1 / self._free.n_effective + 1 / n)
        return abs(free) > max(negligible, error), abs(entropy) > max(NEGLIGIBLE, error)

    def _is_less_sure(self) -> bool:
        """Return whether answers are less sure than at home, by more than the classes' shares explain.

        Other shares of classes that look as at home leave the bundle as sure of each as it was.
        """
        if self.home is None or self._shares.value is None:
            return False
        fall = float(self._shares.value @ self.home.sure_by_class) + self.home.sure_rest - self._sure.value
        error = CERTAINTY * self.home.sure_std * math.sqrt(1 / self._sure.n_effective + 1 / self.home.n)
        return fall > max(LESS_SURE, error)

    def _compute_promise(self, labelled: list[_Labelled]) -> float:
        """Return the accuracy that the bundle promises: as sure as it was, but no less than on the device's samples."""
        sure = float(np.mean([one.confidence for one in labelled]))
        known = 0.0 if self.home is None or self.home.accuracy is None else self.home.accuracy
        return max(sure, known) - PROMISE_MARGIN

    def _is_contradicted(self) -> bool:
        """Return whether labelled answers are worse than promised, beyond chance.

        With n answers of which a share a is right and the promise b > a, the probability of so few right answers is at
        most exp(−n KL(a ‖ b)) (Chernoff 1952).
        """
        labelled = list(self._labelled)
        if len(labelled) < MIN_LABELS:
            return False
        right, promised = float(np.mean([one.right for one in labelled])), self._compute_promise(labelled)
        return right < promised and len(labelled) * _compute_divergence(right, promised) > -math.log(FALSE_ALARM)

    def _fits_labels(self) -> bool:
        """Return whether enough recent answers were labelled and are as good as promised."""
        return self._fits([one for one in self._labelled if one.at > self._seen - WINDOW])

    def _fits(self, labelled: list[_Labelled]) -> bool:
        """Return whether these labelled answers are enough, and as good as promised."""
        if len(labelled) < MIN_FITTING:
            return False
        return float(np.mean([one.right for one in labelled])) >= self._compute_promise(labelled)

    def _release_alarm(self) -> None:
        """Drop the alarm of the bundle before once this one's answers fit."""
        if self._held is None or self._find_kind() is not None:
            return
        if self._held.kind is DriftKind.LABELS:
            fits = self._fits(list(self._labelled))  # all are of this bundle
        else:
            fits = self._fits_labels() or (self._seen >= WINDOW and self._reference is not None)
        if fits:
            self._held = None


def compute_deviations(shift: float, std: float) -> float:
    """Return `shift` in units of `std`; `std` counts as at least 0.05, since few samples may be constant by chance."""
    return shift / max(std, 0.05)


def _compute_divergence(a: float, b: float) -> float:
    """Return KL(a ‖ b) of two probabilities with 0 < b < 1."""
    return sum(p * math.log(p / q) for p, q in ((a, b), (1 - a, 1 - b)) if p > 0)
