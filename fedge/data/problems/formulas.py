"""The formulas of a problem, over which candidates, weights, gate and bundles are written once.

Symbols are those of docs/methods/problems.md: candidate k of M gives outputs o_k(x); y is the target; T_k, kappa_k and
s_k are a candidate's calibration; b is the device's offset; n samples. `fedge.models.problems` has the losses in torch,
and `export.problems` the same formulas as graphs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from fedge.data.problems.calibration import PLAIN, Calibration, make_grid
from fedge.data.problems.maths import Array, Floats, log_softmax

SHARED_KAPPAS, OWN_KAPPAS = (0.0, 0.5, 1.0, 1.5), (0.0, 0.3, 0.6, 1.0)
"""Strengths of the offset to choose from, for models of all devices and for those that learned on the device alone,
which have a part of the offset in them (fedge.md section 7)."""
EM_STEPS = 60


class Answers(NamedTuple):
    """What one candidate says about n samples once it is calibrated.

    `values` (n, ...) are log-probabilities, logits, or means, as the problem says. `deviations` are the standard
    deviations of means, in a shape that fits `values`; None where values are no means.
    """

    values: Floats
    deviations: Floats | None = None


class Formulas(Struct, frozen=True):
    """What a problem says in symbols, as pure functions on arrays."""

    def reduce_outputs(self, outputs: Floats, inputs: Floats) -> Floats:
        """Return what the formulas below need of the network's outputs, (n, ...): here the outputs themselves."""
        return outputs

    def fit_offset(self, targets: NDArray[Any], predict: Callable[[], Floats]) -> Array:
        """Return b, what a device's own targets say beside a candidate.

        `predict` computes the candidate's outputs (n, ...) for these n samples; only some problems need them.
        """
        raise NotImplementedError

    def calibrate(self, outputs: Floats, how: Calibration, offset: Array) -> Answers:
        """Return what a candidate says, given its outputs (n, ...); not finite where an output is not finite."""
        raise NotImplementedError

    def compute_log_likelihood(self, answers: Answers, targets: NDArray[Any]) -> Array:
        """Return l, (n,), in nats; not finite where the answer is not."""
        raise NotImplementedError

    def compute_unknown(self, targets: NDArray[Any]) -> Array:
        """Return l of an answer that knows nothing, (n,), which counts where no candidate's answer is finite."""
        raise NotImplementedError

    def compute_energies(self, outputs: Floats, answers: Answers) -> Floats:
        """Return E(o), how familiar each sample looks, (n,), larger is more familiar; zeros if this cannot be said."""
        raise NotImplementedError

    def mix(self, components: Sequence[Answers], weights: Floats) -> tuple[Floats, ...]:
        """Return what the mixture answers with, in the order of `OUTPUTS`.

        Args:
            components: the answers of K candidates; those whose weight is 0 need not be finite.
            weights: their shares for each sample, (n, K), of sum 1 or, where nothing is usable, 0.
        """
        raise NotImplementedError

    def make_rows(self, calibrations: Sequence[Calibration], offsets: Sequence[Array]) -> dict[str, Array]:
        """Return the tensors of a bundle by which each row of outputs is calibrated, one row for each (K, ...)."""
        scale = np.array([1 / how.temperature for how in calibrations])
        prior = np.stack([how.kappa * offset for how, offset in zip(calibrations, offsets, strict=True)])
        return {"scale": scale.reshape(len(scale), *(1,) * (prior.ndim - 1)), "prior": prior}

    def compute_score(self, mixed: Sequence[Floats], targets: NDArray[Any]) -> float | None:
        """Return the score of a mixture's answers; None if these targets give none."""
        raise NotImplementedError

    def score_alone(self, outputs: Floats, targets: NDArray[Any]) -> float | None:
        """Return the score of a single model by its outputs (n, ...), without calibration."""
        answers = self.calibrate(outputs, PLAIN, np.zeros(()))
        shares = find_usable(answers)[:, np.newaxis].astype(np.float64)
        return self.compute_score(self.mix([answers], shares), targets)

    # ------------------------------------------------------------------------- choices that all devices make together

    def list_choices(self, *, own: bool) -> tuple[Calibration, ...]:
        """Return the calibrations to choose from, the first on a tie."""
        return make_grid(self.list_kappas(own=own))

    def compute_choice_losses(self, statistics: Array, *, own: bool) -> Array:
        """Return the loss of each choice on each device, (N, choices), from the devices' statistics (N, S)."""
        return statistics

    def finish_choice(self, chosen: Calibration, index: int, means: Array) -> Calibration:
        """Return the chosen calibration with its deviation, from the means of all statistics over samples, (S,)."""
        return chosen

    def list_kappas(self, *, own: bool) -> tuple[float, ...]:
        """Return the strengths of the offset to choose from, for a model that learned on the device alone or not."""
        return OWN_KAPPAS if own else SHARED_KAPPAS

    def count_statistics(self, *, own: bool) -> int:
        """Return the number of sums that a device reports for a candidate."""
        return len(self.list_choices(own=own))

    def compute_statistics(
        self, outputs: Floats, targets: NDArray[Any], offset: Array, *, own: bool
    ) -> tuple[float, ...]:
        """Return a device's sums over its validation samples, from which a candidate's calibration is chosen.

        These are the sums of losses -l for all points of the grid. A sum that is not finite counts as unknown.
        """
        choices = self.list_choices(own=own)
        return tuple(-self.sum_likelihood(self.calibrate(outputs, how, offset), targets) for how in choices)

    def sum_likelihood(self, answers: Answers, targets: NDArray[Any]) -> float:
        """Return the sum of l over samples; one that is not finite counts as unknown."""
        found = self.compute_log_likelihood(answers, targets)
        return float(np.where(np.isfinite(found), found, self.compute_unknown(targets)).sum())

    def sum_products(self, components: Sequence[Answers], targets: NDArray[Any]) -> Array | None:
        """Return what devices pool so that they can fit their weights, (M, M); None if the weights are pooled alone."""
        return None

    def fit_weights(
        self,
        components: Sequence[Answers],
        targets: NDArray[Any],
        pooled: Array,
        shrinkage: float,
        products: Array | None = None,
    ) -> Array:
        """Fit the candidates' weights omega, (M,), to a device's samples, pulled towards the pooled u (fedge.md 8).

        Args:
            components: the answers of M candidates.
            targets: those of n samples.
            pooled: u, (M,), sum 1.
            shrinkage: a > 0, in samples.
            products: the mean over the samples of all devices of what `sum_products` returns, if it does.
        """
        found = np.stack([self.compute_log_likelihood(each, targets) for each in components], axis=1)
        unknown = self.compute_unknown(targets)[:, np.newaxis]
        return fit_em_weights(np.where(np.isfinite(found), found, unknown), pooled, shrinkage)


def find_usable(answers: Answers) -> NDArray[np.bool_]:
    """Return for which samples all values that a candidate says are finite, (n,)."""
    found = np.isfinite(answers.values)
    return np.asarray(found.all(axis=tuple(range(1, found.ndim))))


def fit_em_weights(log_p: Array, pooled: Array, shrinkage: float) -> Array:
    """Fit omega, (M,), by EM from u to sum_n log sum_k omega_k p_nk + a sum_k u_k log omega_k (fedge.md section 8).

    Args:
        log_p: (n, M) log-likelihoods of the targets; n may be 0.
        pooled: u, (M,), sum 1.
        shrinkage: a > 0, in samples; every omega_k is at least a u_k / (n + a).
    """
    weights = pooled
    with np.errstate(divide="ignore"):
        for _ in range(EM_STEPS if len(log_p) else 0):
            responsibility = np.exp(log_softmax(np.log(weights) + log_p))
            weights = (responsibility.sum(axis=0) + shrinkage * pooled) / (len(log_p) + shrinkage)
    return weights
