"""A problem of the user's own: loss, score and decoding are a class in the user's code (docs/methods/problems.md).

Nothing is mixed, since nothing is known of the outputs: a device installs the one candidate with the smallest
validation loss, after the same rounds, clusters, trial and private model.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Annotated, Any, ClassVar

import numpy as np
from msgspec import Meta
from numpy.typing import NDArray

from fedge.data.problems.calibration import PLAIN, Calibration
from fedge.data.problems.maths import Array, Floats
from fedge.data.problems.names import PRINTABLE
from fedge.data.problems.problem import Answers, Problem, require_targets

Sizes = Annotated[tuple[Annotated[int, Meta(ge=1, le=2**24)], ...], Meta(min_length=1, max_length=4)]


class Own(Problem, frozen=True, kw_only=True, tag="own"):
    """`code` is the user's class, as package.module:Class; `outputs` and `targets` are shapes of one sample."""

    NAME: ClassVar = "a problem of the user's own"
    SCORE: ClassVar = "score"
    OUTPUTS: ClassVar = ("outputs",)

    code: Annotated[str, Meta(pattern=PRINTABLE)]
    outputs: Sizes
    targets: Annotated[tuple[Annotated[int, Meta(ge=1, le=2**24)], ...], Meta(max_length=4)] = ()

    def get_output_shape(self, input_shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape that the user's class names."""
        return self.outputs

    def describe_outputs(self) -> str:
        """Return them in words."""
        return f"numbers of the shape {self.outputs}"

    def get_target_shape(self, input_shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape that the user's class names."""
        return self.targets

    def convert_targets(self, y: NDArray[Any], n: int, input_shape: tuple[int, ...], what: str) -> NDArray[Any]:
        """Return targets of the shape that the user's class names, as float32 or int64."""
        require_targets(y, (n, *self.targets), "buif", what, "numbers")
        return y.astype(np.float32 if y.dtype.kind == "f" else np.int64)

    def group_targets(self, y: NDArray[Any]) -> NDArray[np.int64]:
        """Return one group for all."""
        return np.zeros(len(y), np.int64)

    def fit_offset(self, targets: NDArray[Any], predict: Callable[[], Floats]) -> Array:
        """Return zero."""
        return np.zeros(1)

    def calibrate(self, outputs: Floats, how: Calibration, offset: Array) -> Answers:
        """Return -loss, (n,), from the losses (n, 1) that the user's class computed."""
        return Answers(-np.asarray(outputs[:, 0], np.float64))

    def compute_log_likelihood(self, answers: Answers, targets: NDArray[Any]) -> Array:
        """Return -loss."""
        return np.asarray(answers.values)

    def compute_unknown(self, targets: NDArray[Any]) -> Array:
        """Return the worst that is finite, so that a candidate with losses that are not finite is never chosen."""
        return np.full(len(targets), -1e30)

    def compute_energies(self, outputs: Floats, answers: Answers) -> Floats:
        """Return zeros."""
        return np.zeros(len(outputs))

    def mix(self, components: Sequence[Answers], weights: Floats) -> tuple[Floats, ...]:
        """Return the losses of the one candidate that has all weight."""
        return (-components[int(weights.sum(axis=0).argmax())].values,)

    def make_rows(self, calibrations: Sequence[Calibration], offsets: Sequence[Array]) -> dict[str, Array]:
        """Return nothing: outputs are not calibrated."""
        return {}

    def list_choices(self, *, own: bool) -> tuple[Calibration, ...]:
        """Return the plain one, since nothing is calibrated."""
        return (PLAIN,)

    def fit_weights(
        self,
        components: Sequence[Answers],
        targets: NDArray[Any],
        pooled: Array,
        shrinkage: float,
        products: Array | None = None,
    ) -> Array:
        """Give all weight to the candidate with the smallest loss; without samples, to that of the largest share."""
        if not len(targets):
            return np.eye(len(pooled))[int(pooled.argmax())]
        sums = [self.sum_likelihood(each, targets) for each in components]
        return np.eye(len(pooled))[int(np.argmax(sums))]
