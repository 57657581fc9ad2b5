"""A problem of the user's own: loss, score and decoding are a class in the user's code (docs/methods/problems.md).

    class Boxes:
        outputs = (14,)          # shape of the network's output for one sample
        targets = (5,)           # shape of one sample's target; () or left out for a number

        def loss(self, outputs, targets): ...    # torch tensors (n, ...) -> (n,)
        def score(self, outputs, targets): ...   # numpy arrays (n, ...) -> a number, larger is better
        def decode(self, outputs): ...           # numpy array (n, ...) -> what a caller wants; optional

Nothing is mixed, since nothing is known of the outputs: a device installs the one candidate with the smallest
validation loss, after the same rounds, clusters, trial and private model. A bundle names the class but never runs it:
only the owner of a machine says what code runs there.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Annotated, Any, ClassVar, Final

import numpy as np
from msgspec import Meta
from numpy.typing import NDArray

from fedge.data.problems.calibration import PLAIN, Calibration
from fedge.data.problems.formulas import Answers
from fedge.data.problems.maths import Array, Floats
from fedge.data.problems.names import PRINTABLE
from fedge.data.problems.problem import Problem, require_targets
from fedge.data.problems.results import Column, Result
from fedge.errors import ConfigError
from fedge.system.loading import FAILURES, describe_error, is_allowed, load_object

Extent = Annotated[int, Meta(ge=1, le=2**24)]
RESERVED: Final = -100
"""Whole number that marks padding samples in training, so no target may begin with it."""
UNKNOWN: Final = -1e30
"""Log-likelihood that counts in place of one that is not finite."""
SHOWN: Final = 8
"""Numbers of an output that a table for people shows."""


class Own(Problem, frozen=True, kw_only=True, tag="own"):
    """`code` is the user's class, as package.module:Class; `outputs` and `targets` are shapes of one sample.

    `whole`: whether targets are whole numbers (int64), and not floats (float32).
    """

    NAME: ClassVar = "a problem of the user's own"
    SCORE: ClassVar = "score"
    SCORES: ClassVar = (-math.inf, math.inf)
    OUTPUTS: ClassVar = ("outputs",)
    TARGET_KINDS: ClassVar = "if"
    MIXED: ClassVar = False

    code: Annotated[str, Meta(pattern=PRINTABLE)]
    outputs: Annotated[tuple[Extent, ...], Meta(min_length=1, max_length=4)]
    targets: Annotated[tuple[Extent, ...], Meta(max_length=4)] = ()
    whole: bool = False

    @property
    def request(self) -> str:
        """The user's class."""
        return self.code

    def get_output_shape(self, input_shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape that the user's class names."""
        return self.outputs

    def describe_outputs(self) -> str:
        """Return them in words."""
        return f"the problem asks for the shape {self.outputs}"

    def get_target_shape(self, input_shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape that the user's class names."""
        return self.targets

    def make_no_targets(self, input_shape: tuple[int, ...]) -> NDArray[Any]:
        """Return the targets of no samples, in the type that all have."""
        return np.zeros((0, *self.targets), np.int64 if self.whole else np.float32)

    def convert_targets(self, y: NDArray[Any], n: int, input_shape: tuple[int, ...], what: str) -> NDArray[Any]:
        """Return targets of the shape that the user's class names, as float32 or int64."""
        require_targets(y, (n, *self.targets), "buif", what, "numbers")
        if not np.isfinite(y).all():
            raise ConfigError(f"{what} holds a number that is not finite: leave such samples out, or fill them in")
        if not self.whole:
            return y.astype(np.float32)
        if y.dtype.kind == "f" and (y != np.rint(y)).any():
            raise ConfigError(f"{what} must be whole numbers, as those that describe the task")
        found = y.astype(np.int64)
        if (found.reshape(n, math.prod(self.targets))[:, :1] == RESERVED).any():
            raise ConfigError(f"{what} begins with {RESERVED} in a sample, which marks padding: take another number")
        return found

    def group_targets(self, y: NDArray[Any]) -> NDArray[np.int64]:
        """Return one group for all."""
        return np.zeros(len(y), np.int64)

    def reduce_outputs(self, outputs: Floats, inputs: Floats) -> Floats:
        """Return a loss, 0 until torch computes it (`fedge.models.problems`), and the outputs, (n, 1 + numbers)."""
        flat = np.asarray(outputs, np.float64).reshape(len(outputs), math.prod(self.outputs))
        return np.concatenate([np.zeros((len(flat), 1)), flat], axis=1)

    def fit_offset(self, targets: NDArray[Any], predict: Callable[[], Floats]) -> Array:
        """Return zero."""
        return np.zeros(1)

    def calibrate(self, outputs: Floats, how: Calibration, offset: Array) -> Answers:
        """Return loss and outputs as they are."""
        return Answers(np.asarray(outputs, np.float64))

    def compute_log_likelihood(self, answers: Answers, targets: NDArray[Any]) -> Array:
        """Return -loss."""
        return -np.asarray(answers.values[:, 0], np.float64)

    def compute_unknown(self, targets: NDArray[Any]) -> Array:
        """Return the worst that is finite, so that a candidate with losses that are not finite is never chosen."""
        return np.full(len(targets), UNKNOWN)

    def compute_energies(self, outputs: Floats, answers: Answers) -> Floats:
        """Return zeros."""
        return np.zeros(len(outputs))

    def mix(self, components: Sequence[Answers], weights: Floats) -> tuple[Floats, ...]:
        """Return the outputs, (n, *outputs), of the candidate with the largest share; zeros if none is usable."""
        values = np.stack([each.values[:, 1:] for each in components], axis=1)
        chosen = values[np.arange(len(values)), weights.argmax(axis=1)]
        found = np.where(weights.max(axis=1, keepdims=True) > 0, chosen, 0.0)
        return (found.reshape(len(values), *self.outputs),)

    def make_rows(self, calibrations: Sequence[Calibration], offsets: Sequence[Array]) -> dict[str, Array]:
        """Return nothing: outputs are not calibrated."""
        return {}

    def compute_score(self, mixed: Sequence[Floats], targets: NDArray[Any]) -> float | None:
        """Return what `score` of the user's class says; None without samples, or where that code may not run.

        Raises:
            ConfigError: the user's code fails, or returns no number.
        """
        if not len(targets) or not is_allowed(self.code):
            return None
        found = call_code(self.code, "score", np.asarray(mixed[0], np.float32), targets)
        try:
            score = float(found)
        except (TypeError, ValueError) as error:
            raise ConfigError(f"{self.code}.score must return a number, not {type(found).__name__}") from error
        return score if np.isfinite(score) else None

    def compute_metrics(self, mixed: Sequence[Floats], targets: NDArray[Any]) -> dict[str, float]:
        """Return nothing beside the score."""
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
            return np.asarray(np.eye(len(pooled))[pooled.argmax()])
        sums = [self.sum_likelihood(each, targets) for each in components]
        return np.asarray(np.eye(len(pooled))[np.argmax(sums)])

    def grade_samples(self, answers: Sequence[Floats], targets: NDArray[Any]) -> Array | None:
        """Return what `score` of the user's class says of each sample alone; None where that code may not run."""
        if not is_allowed(self.code):
            return None
        pairs = zip(np.asarray(answers[0], np.float32)[:, np.newaxis], targets[:, np.newaxis], strict=True)
        scores = [self.compute_score((outputs,), target) for outputs, target in pairs]
        return np.array([UNKNOWN if score is None else score for score in scores], np.float64)

    def list_results(self, input_shape: tuple[int, ...]) -> tuple[Result, ...]:
        """Return the outputs as the network gives them."""
        return (Result("outputs", "FP32", self.outputs),)

    def make_results(self, answers: Sequence[Floats], usual: tuple[float, float]) -> dict[str, Any]:
        """Return these."""
        return {"outputs": answers[0]}

    def make_columns(self, answers: Sequence[Floats], usual: tuple[float, float]) -> tuple[Column, ...]:
        """Return the first numbers of each output."""
        rows = [row.ravel() for row in answers[0]]
        words = [", ".join(f"{v:.4g}" for v in row[:SHOWN]) + ", ..." * (len(row) > SHOWN) for row in rows]
        return (Column("outputs", tuple(words)),)


def call_code(path: str, name: str, *arguments: object) -> Any:
    """Call a method of an object of the user's class.

    Raises:
        ConfigError: there is no such class or method, or the user's code fails; the text says where.
    """
    kind = load_object(path)
    if not callable(getattr(kind, name, None)):
        raise ConfigError(f"{path} has no method {name}")
    try:
        return getattr(kind(), name)(*arguments)
    except FAILURES as error:
        raise ConfigError(f"{path}.{name} fails with {describe_error(error)}") from error


def state_own(path: str, y: NDArray[Any]) -> Own:
    """Make the problem of a user's class, which the owner of this machine named; `y` are targets, (n, ...).

    Raises:
        ConfigError: the class lacks something, or a shape is none.
    """
    kind = load_object(path)
    if not isinstance(kind, type):
        raise ConfigError(f"{path} is {type(kind).__name__}, not a class: give the class, with loss, score and outputs")
    if missing := [name for name in ("loss", "score", "outputs") if not hasattr(kind, name)]:
        raise ConfigError(f"{path} lacks {', '.join(missing)}: a problem has loss, score and outputs")
    outputs = _read_shape(path, "outputs", kind.outputs)  # type: ignore[attr-defined]
    targets = _read_shape(path, "targets", getattr(kind, "targets", ()))
    if not outputs:
        raise ConfigError(f"{path}.outputs is (), but a network gives at least one number: write (1,)")
    return Own(code=path, outputs=outputs, targets=targets, whole=y.dtype.kind in "bui")


def _read_shape(path: str, name: str, shape: object) -> tuple[int, ...]:
    if not (isinstance(shape, tuple | list) and all(type(extent) is int and extent > 0 for extent in shape)):
        raise ConfigError(f"{path}.{name} must be a shape, such as (14,), not {shape!r:.100}")
    return tuple(shape)
