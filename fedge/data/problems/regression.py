"""Numbers: D targets, standardised by the task's own mean and deviation (docs/methods/problems.md section 2).

    m_k = o_k + kappa b_k;   b_k = n / (n + 10) mean residual of candidate k over the device's samples
    l = -1/2 sum_d [((y_d - m_d) / (T s_d))^2 + ln(2 pi T^2 s_d^2)]
    mean = sum_k alpha_k m_k;   spread^2 = sum_k alpha_k (T^2 s_k^2 + (m_k - mean)^2)

s_k is the pooled deviation of the candidate's residuals or, with `variance`, exp(h / 2) of a second half of outputs h.
Weights are those of a stack of predictors (Wolpert, 1992): they minimise the error of the mixture's mean.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Annotated, Any, ClassVar, Final, Literal

import numpy as np
from msgspec import UNSET, Meta, UnsetType, structs
from numpy.typing import NDArray

from fedge.data.problems.calibration import Calibration
from fedge.data.problems.formulas import Answers
from fedge.data.problems.maths import Array, Floats, minimise_on_simplex
from fedge.data.problems.names import Word
from fedge.data.problems.problem import Problem
from fedge.data.problems.results import Column, Result
from fedge.data.problems.scores import compute_r2
from fedge.errors import ConfigError

SHRINKAGE: Final = 10
"""Samples by which a device's mean residual is pulled towards 0."""
PULL: Final = 100
"""Samples of all devices together that count beside a device's own when it fits its weights."""
BINS: Final = 10
"""Groups of samples, by quantiles of the first target."""
SMALLEST: Final = 1e-12
"""Lower bound of a pooled variance, in squared deviations of the task."""
ROUNDED: Final = 4
"""Decimal places of log spreads that tell samples apart."""
LARGEST: Final = 60.0
"""Bound of |h|, so that exp(h) stays finite in single precision."""

_Positive = Annotated[float, Meta(gt=0)]


class Regression(Problem, frozen=True, kw_only=True, tag="regression"):
    """D numbers; outputs are means (D,) or, with `variance`, means and then log-variances (2 D,), standardised.

    `mean` and `std` (D,) are those of the targets, in their own units; the same on all machines. `loss` is what the
    network learns by: squared error, or Huber's.
    """

    NAME: ClassVar = "regression"
    SCORE: ClassVar = "r2"
    SCORES: ClassVar = (-math.inf, 1.0)
    OUTPUTS: ClassVar = ("mean", "spread")
    TARGET_KINDS: ClassVar = "f"
    SETS: ClassVar = True

    targets: Annotated[tuple[Word, ...], Meta(min_length=1, max_length=1000)]
    mean: tuple[float, ...]
    std: tuple[_Positive, ...]
    units: tuple[str, ...] | UnsetType = UNSET
    loss: Literal["squared", "huber"] = "squared"
    variance: bool = False

    def __post_init__(self) -> None:
        if not len(self.targets) == len(self.mean) == len(self.std):
            raise ValueError(f"{len(self.targets)} targets have {len(self.mean)} means and {len(self.std)} deviations")
        if not isinstance(self.units, UnsetType) and len(self.units) != len(self.targets):
            raise ValueError(f"{len(self.targets)} targets have {len(self.units)} units")

    @property
    def width(self) -> int:
        """D, the number of targets."""
        return len(self.targets)

    def get_output_shape(self, input_shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return (D,), or (2 D,) with log-variances."""
        return (2 * self.width if self.variance else self.width,)

    def describe_outputs(self) -> str:
        """Return them in words."""
        if self.width == 1:
            return "there is one number" + " and its log-variance" * self.variance
        return f"there are {self.width} numbers" + " and their log-variances" * self.variance

    def get_target_shape(self, input_shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return (D,)."""
        return (self.width,)

    def get_answer_shapes(self, input_shape: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
        """Return those of mean and spread, (D,)."""
        return (self.width,), (self.width,)

    def make_no_targets(self, input_shape: tuple[int, ...]) -> NDArray[Any]:
        """Return the targets of no samples, (0, D) float32."""
        return np.zeros((0, self.width), np.float32)

    def convert_targets(self, y: NDArray[Any], n: int, input_shape: tuple[int, ...], what: str) -> NDArray[Any]:
        """Return standardised targets, (n, D) float32; (n,) is taken for one target. Raise ConfigError for others."""
        values = y[:, np.newaxis] if y.shape == (n,) and self.width == 1 else y
        if values.shape != (n, self.width) or values.dtype.kind not in "buif":
            raise ConfigError(f"{what} must be numbers ({n}, {self.width}), not {y.dtype}{y.shape}")
        found = ((values.astype(np.float64) - self.mean) / self.std).astype(np.float32)
        if not np.isfinite(found).all():
            at = int(np.flatnonzero(~np.isfinite(found).all(axis=1))[0])
            raise ConfigError(
                f"{what} holds {values[at].tolist()} in row {at}: leave such samples out, or fill them in"
            )
        return found

    def restore_units(self, values: Floats, *, spread: bool = False) -> Array:
        """Return standardised values, or their spread, in the targets' own units."""
        scaled = np.asarray(values, np.float64) * self.std
        return np.asarray(scaled if spread else scaled + self.mean)

    def group_targets(self, y: NDArray[Any]) -> NDArray[np.int64]:
        """Return the tenth of these samples, by the first target, to which each belongs."""
        if not len(y):
            return np.zeros(0, np.int64)
        edges = np.quantile(y[:, 0], np.arange(1, BINS) / BINS)
        return np.searchsorted(edges, y[:, 0], side="right").astype(np.int64)

    def fit_offset(self, targets: NDArray[Any], predict: Callable[[], Floats]) -> Array:
        """Return b, the candidate's mean residual over a device's samples, shrunken by n / (n + 10), (D,)."""
        residuals = targets - self._split(predict())[0]
        kept = residuals[np.isfinite(residuals).all(axis=1)]
        return np.asarray(kept.sum(axis=0) / (len(kept) + SHRINKAGE))

    def calibrate(self, outputs: Floats, how: Calibration, offset: Array) -> Answers:
        """Return means m (n, D), and deviations T s, (n, D) or (D,)."""
        mean, spread = self._split(outputs)
        if spread is None:
            spread = np.ones(self.width) if how.deviation is UNSET else np.asarray(how.deviation)
        return Answers(mean + how.kappa * offset, how.temperature * spread)

    def _split(self, outputs: Floats) -> tuple[Array, Array | None]:
        """Return means, and deviations if the network gives them."""
        found = np.asarray(outputs, np.float64)
        if not self.variance:
            return found, None
        return found[..., : self.width], np.exp(np.clip(found[..., self.width :], -LARGEST, LARGEST) / 2)

    def compute_log_likelihood(self, answers: Answers, targets: NDArray[Any]) -> Array:
        """Return the Gaussian log-density of the targets."""
        assert answers.deviations is not None
        with np.errstate(over="ignore", invalid="ignore"):
            z = (targets - answers.values) / answers.deviations
            terms = -0.5 * (z**2 + np.log(2 * math.pi * answers.deviations**2))
        return np.asarray(terms.sum(axis=1))

    def compute_unknown(self, targets: NDArray[Any]) -> Array:
        """Return the log-density under the targets' own mean and deviation."""
        nothing = Answers(np.zeros((len(targets), self.width)), np.ones(self.width))
        return self.compute_log_likelihood(nothing, targets)

    def compute_energies(self, outputs: Floats, answers: Answers) -> Floats:
        """Return -1/2 sum h, the certainty that the network claims; zeros without variance."""
        if not self.variance:
            return np.zeros(len(outputs))
        return np.asarray(-0.5 * np.clip(outputs[:, self.width :], -LARGEST, LARGEST).sum(axis=1))

    def mix(self, components: Sequence[Answers], weights: Floats) -> tuple[Floats, ...]:
        """Return mean and spread, (n, D) each, standardised; 0 and 1 where nothing is usable."""
        share = weights.T[:, :, np.newaxis]
        used = share > 0
        means = np.where(used, np.stack([each.values for each in components]), 0)
        spreads = [np.broadcast_to(_get_deviations(each), each.values.shape) for each in components]
        mean = (share * means).sum(axis=0)
        variance = (share * np.where(used, np.stack(spreads) ** 2 + (means - mean) ** 2, 0)).sum(axis=0)
        nothing = ~used.any(axis=0)
        return mean, np.where(nothing, 1, np.sqrt(variance))

    def make_rows(self, calibrations: Sequence[Calibration], offsets: Sequence[Array]) -> dict[str, Array]:
        """Return the offsets kappa b, and the deviations T s (with variance T, which the graph multiplies)."""
        known = [np.ones(self.width) if how.deviation is UNSET else np.array(how.deviation) for how in calibrations]
        pairs = list(zip(calibrations, known, strict=True))
        prior = np.stack([how.kappa * offset for how, offset in zip(calibrations, offsets, strict=True)])
        return {"prior": prior, "deviation": np.stack([how.temperature * own for how, own in pairs])}

    def compute_score(self, mixed: Sequence[Floats], targets: NDArray[Any]) -> float | None:
        """Return R^2, at most 1; None if no target varies."""
        return compute_r2(mixed[0], targets)

    def compute_metrics(self, mixed: Sequence[Floats], targets: NDArray[Any]) -> dict[str, float]:
        """Return root mean squared and mean absolute error of each target, in its own units."""
        if not len(targets):
            return {}
        errors = self.restore_units(mixed[0] - targets, spread=True)
        rmse, mae = np.sqrt((errors**2).mean(axis=0)), np.abs(errors).mean(axis=0)
        names = [""] if self.width == 1 else [f" {name}" for name in self.targets]
        each = zip(names, rmse, mae, strict=True)
        return {kind + name: float(v) for name, *two in each for kind, v in zip(("rmse", "mae"), two, strict=True)}

    def list_choices(self, *, own: bool) -> tuple[Calibration, ...]:
        """Return one for each kappa, since the deviations follow from the residuals; with variance as elsewhere."""
        if self.variance:
            return super().list_choices(own=own)
        return tuple(Calibration(temperature=1.0, kappa=kappa) for kappa in self.list_kappas(own=own))

    def compute_choice_losses(self, statistics: Array, *, own: bool) -> Array:
        """Return 1/2 sum_d of squared residuals over the pooled variance of those without offset, (N, choices)."""
        if self.variance:
            return statistics
        squares = statistics.reshape(len(statistics), -1, self.width)
        variance = np.maximum(squares[:, 0].sum(axis=0), SMALLEST) / max(len(squares), 1)
        return np.asarray(0.5 * (squares / variance).sum(axis=2))

    def finish_choice(self, chosen: Calibration, index: int, means: Array) -> Calibration:
        """Return it with s_d, the root of the mean squared residual of each target."""
        if self.variance:
            return chosen
        squares = means.reshape(-1, self.width)[index]
        return structs.replace(chosen, deviation=tuple(np.sqrt(np.maximum(squares, SMALLEST)).tolist()))

    def count_statistics(self, *, own: bool) -> int:
        """Return 4 D: for each kappa, the sums of squared residuals; with variance as elsewhere."""
        return super().count_statistics(own=own) if self.variance else len(self.list_kappas(own=own)) * self.width

    def compute_statistics(
        self, outputs: Floats, targets: NDArray[Any], offset: Array, *, own: bool
    ) -> tuple[float, ...]:
        """Return, for each kappa, the sum of each target's squared residuals, in squared deviations of the task."""
        if self.variance:
            return super().compute_statistics(outputs, targets, offset, own=own)
        found = []
        for kappa in self.list_kappas(own=own):
            means = self.calibrate(outputs, Calibration(temperature=1.0, kappa=kappa), offset).values
            residuals = np.where(np.isfinite(means).all(axis=1, keepdims=True), targets - means, targets)
            found += (residuals.astype(np.float64) ** 2).sum(axis=0).tolist()
        return tuple(found)

    def sum_products(self, components: Sequence[Answers], targets: NDArray[Any]) -> Array:
        """Return R, (M, M), the sums over samples and targets of the products of the candidates' residuals."""
        means = np.stack([each.values for each in components])
        usable = np.isfinite(means).all(axis=2, keepdims=True)
        residuals = (targets - np.where(usable, means, 0)).reshape(len(means), -1)
        return np.asarray(residuals @ residuals.T, np.float64)

    def fit_weights(
        self,
        components: Sequence[Answers],
        targets: NDArray[Any],
        pooled: Array,
        shrinkage: float,
        products: Array | None = None,
    ) -> Array:
        """Fit the stack's weights to a device's samples, and to `PULL` further samples like those of all devices."""
        if products is None:
            return pooled
        return minimise_on_simplex(self.sum_products(components, targets) + PULL * products)

    def read_target(self, value: Any, input_shape: tuple[int, ...]) -> NDArray[Any]:
        """Return standardised numbers, (D,), of a number or a list of them in their own units; raise ConfigError."""
        return super().read_target(value if isinstance(value, list) or self.width > 1 else [value], input_shape)

    def restore_targets(self, y: NDArray[Any]) -> NDArray[Any]:
        """Return numbers in their own units."""
        return self.restore_units(y)

    def describe_target(self, target: NDArray[Any]) -> str:
        """Return each number with its name and unit."""
        pairs = zip(self.targets, self._format_numbers(self.restore_units(target)), strict=True)
        return ", ".join(f"{name} {number}" for name, number in pairs)

    def _format_numbers(self, values: Array, spread: Array | None = None) -> list[str]:
        """Return numbers (D,) in words, with their units and perhaps their spread."""
        units = [""] * self.width if isinstance(self.units, UnsetType) else [f" {unit}" for unit in self.units]
        errors = [""] * self.width if spread is None else [f" ± {number:.3g}" for number in spread]
        return [f"{v:.6g}{error}{unit}" for v, error, unit in zip(values, errors, units, strict=True)]

    def grade_samples(self, answers: Sequence[Floats], targets: NDArray[Any]) -> Array | None:
        """Return minus the mean squared error of each sample, in squared deviations of the task."""
        return np.asarray(-((np.asarray(answers[0], np.float64) - targets) ** 2).mean(axis=1))

    def compute_nonconformity(self, answers: Sequence[Floats], targets: NDArray[Any]) -> Array:
        """Return the largest error of a sample's targets, in spreads (conformal.md, equation 4)."""
        mean, spread = (np.asarray(each, np.float64) for each in answers)
        return np.asarray((np.abs(targets - mean) / spread).max(axis=1))

    def list_set_results(self) -> tuple[Result, ...]:
        """Return both ends of each target's interval in its own units."""
        return Result("low", "FP64", (self.width,)), Result("high", "FP64", (self.width,))

    def make_sets(self, answers: Sequence[Floats], threshold: float) -> dict[str, Any]:
        """Return these."""
        found = self.make_results(answers, (-math.inf, math.inf))
        reach = max(threshold, 0.0) * found["spread"]
        return {"low": found["values"] - reach, "high": found["values"] + reach}

    def make_set_columns(self, answers: Sequence[Floats], threshold: float) -> tuple[Column, ...]:
        """Return each target's interval with its unit."""
        found = self.make_sets(answers, threshold)
        ends = [[self._format_numbers(row) for row in found[end]] for end in ("low", "high")]
        pairs = [list(zip(low, high, strict=True)) for low, high in zip(*ends, strict=True)]
        return tuple(
            Column(f"{name} within", tuple(f"{row[d][0]} to {row[d][1]}" for row in pairs), left=False)
            for d, name in enumerate(self.targets)
        )

    def measure_sets(self, answers: Sequence[Floats], threshold: float) -> dict[str, Any]:
        """Return the mean width of each target's interval, in its own units."""
        found = self.make_sets(answers, threshold)
        return {"mean_width": (found["high"] - found["low"]).mean(axis=0).tolist()}

    def get_surprise(self, answers: Sequence[Floats]) -> Floats | None:
        """Return the mean log spread, which rises where the candidates disagree, (n,); rounded, for it may be constant.

        Disagreement shows inputs unlike those of training (Lakshminarayanan, Pritzel and Blundell, 2017).
        """
        return np.asarray(np.log(answers[1]).mean(axis=1).round(ROUNDED))

    def list_results(self, input_shape: tuple[int, ...]) -> tuple[Result, ...]:
        """Return values and spread in the targets' own units."""
        return Result("values", "FP64", (self.width,)), Result("spread", "FP64", (self.width,))

    def make_results(self, answers: Sequence[Floats], usual: tuple[float, float]) -> dict[str, Any]:
        """Return these."""
        return {"values": self.restore_units(answers[0]), "spread": self.restore_units(answers[1], spread=True)}

    def make_record(self, answers: Sequence[Floats], usual: tuple[float, float]) -> dict[str, Any]:
        """Return the names of the targets, their units if known, and values and spread."""
        units = {} if isinstance(self.units, UnsetType) else {"units": self.units}
        return {"targets": self.targets, **units, **super().make_record(answers, usual)}

    def make_columns(self, answers: Sequence[Floats], usual: tuple[float, float]) -> tuple[Column, ...]:
        """Return each target's values with their spread and unit."""
        found = self.make_results(answers, usual)
        rows = [self._format_numbers(*row) for row in zip(found["values"], found["spread"], strict=True)]
        return tuple(Column(name, tuple(row[d] for row in rows), left=False) for d, name in enumerate(self.targets))


def _get_deviations(answers: Answers) -> Floats:
    assert answers.deviations is not None
    return answers.deviations
