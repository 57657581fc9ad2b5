"""The terms of a problem, over which rounds, guard, runtime and people's figures are written once.

A problem is plain data (it is a part of the task), and its methods are pure functions on arrays.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray

from fedge.data.problems.formulas import Formulas
from fedge.data.problems.maths import Array, Floats
from fedge.data.problems.results import Column, Result
from fedge.data.problems.scores import Counts, Figure, get_figure
from fedge.errors import ConfigError


class Problem(Formulas, frozen=True, forbid_unknown_fields=True, kw_only=True, tag_field="kind"):
    """A kind of question. What a subclass does not define is as in single-label classification.

    Attributes:
        NAME: the kind in plain words.
        SCORE: the name of the figure that people read; larger is better.
        SCORES: the least and the largest value that it can have.
        RAW: what the network's outputs are called.
        WIDTH: how a network's code names the number of its outputs, if the task knows it by name.
        OUTPUTS: names of what a mixture answers with, beside weights and energies.
        CLASSED: whether each sample is of one class, on which some methods rely.
        APART: whether `fedge.bundle.formula` computes its mixtures outside the graph, too.
        MIXED: whether answers of several candidates can be mixed; otherwise a device installs the one that is best.
        FOLDER: how a folder of images tells targets: by class folders, by masks, not at all since images alone are
            enough, or "" if it cannot.
        LABELLED: whether samples need targets; otherwise `make_targets` makes them.
        RIGHT_OR_WRONG: whether an answer is right or wrong, so that the share of right ones counts.
        COUNTED: whether `find_answered` names answers, so that right and wrong ones are counted at work.
        GROUPED: whether the number of a sample's group says its whole target.
        SHARED: whether a sample is of one class, whose shares among recent samples may be others than at home.
        SETS: whether answers can come with sets that hold the target as often as was promised (conformal.md).
        NETWORK: the built-in network that suits it; "" if one for vectors does.
        TARGET_KINDS: numpy's letters for the types of converted targets.
    """

    NAME: ClassVar[str]
    SCORE: ClassVar[str]
    SCORES: ClassVar[tuple[float, float]] = (0.0, 1.0)
    RAW: ClassVar[str] = "outputs"
    WIDTH: ClassVar[str] = ""
    OUTPUTS: ClassVar[tuple[str, ...]]
    CLASSED: ClassVar[bool] = False
    APART: ClassVar[bool] = False
    MIXED: ClassVar[bool] = True
    FOLDER: ClassVar[Literal["classes", "masks", "alone", ""]] = ""
    LABELLED: ClassVar[bool] = True
    RIGHT_OR_WRONG: ClassVar[bool] = False
    COUNTED: ClassVar[bool] = False
    GROUPED: ClassVar[bool] = False
    SHARED: ClassVar[bool] = False
    SETS: ClassVar[bool] = False
    NETWORK: ClassVar[str] = ""
    TARGET_KINDS: ClassVar[str] = "iu"

    @property
    def kind(self) -> str:
        """The kind by its name in a task's file."""
        return str(self.__struct_config__.tag)

    @property
    def request(self) -> str:
        """The word by which people ask for the problem (`--problem`)."""
        return self.kind

    @property
    def figure(self) -> Figure:
        """How people read the score."""
        return get_figure(self.SCORE)

    # ------------------------------------------------------------------------------------------- outputs and targets

    def get_output_shape(self, input_shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of the network's output for one sample."""
        raise NotImplementedError

    def describe_outputs(self) -> str:
        """Return as a clause what the network's outputs are for, for error messages."""
        raise NotImplementedError

    def get_target_shape(self, input_shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of one sample's target; () for a number."""
        raise NotImplementedError

    def get_answer_shapes(self, input_shape: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
        """Return the shapes of one sample's answers, in the order of `OUTPUTS`."""
        return (self.get_output_shape(input_shape),)

    def make_no_targets(self, input_shape: tuple[int, ...]) -> NDArray[Any]:
        """Return the targets of no samples, (0, ...)."""
        return np.zeros((0, *self.get_target_shape(input_shape)), np.int64)

    def make_targets(self, n: int, input_shape: tuple[int, ...]) -> NDArray[Any]:
        """Make targets of n samples to try a network with, in the type that training takes."""
        none = self.make_no_targets(input_shape)
        return np.zeros((n, *none.shape[1:]), none.dtype)

    def find_known(self, y: NDArray[Any]) -> NDArray[np.bool_]:
        """Return which samples can be learned, (n,): all, unless they are of classes that have not joined yet."""
        return np.ones(len(y), np.bool_)

    def find_usual(self, y: NDArray[Any]) -> NDArray[np.bool_]:
        """Return which samples a device may learn from and choose by, (n,): all but known anomalies."""
        return np.ones(len(y), np.bool_)

    def allow_unknown(self) -> Problem:
        """Return the problem that also takes samples which `find_known` leaves out."""
        return self

    def convert_targets(self, y: NDArray[Any], n: int, input_shape: tuple[int, ...], what: str) -> NDArray[Any]:
        """Check the targets of n samples, and return them in the type that training takes.

        Raises:
            ConfigError: they do not fit; the text begins with `what` and says how to convert them.
        """
        raise NotImplementedError

    def rotate_targets(self, y: NDArray[Any], quarters: int) -> NDArray[Any]:
        """Return the targets of images that are turned counter-clockwise by `quarters` times 90 degrees."""
        return y

    def move_targets(
        self,
        y: NDArray[Any],
        rows: NDArray[np.int64],
        columns: NDArray[np.int64],
        inside: NDArray[np.bool_],
    ) -> NDArray[Any]:
        """Return the targets of images whose pixels come from elsewhere: rows and columns (n, H, W) of each.

        `inside`: whether this was inside the image; outside of it the edge is repeated.
        """
        return y

    def group_targets(self, y: NDArray[Any]) -> NDArray[np.int64]:
        """Return a group 0, 1, ... for each sample, (n,), for draws that should be alike in all groups.

        Validation samples are drawn evenly over the groups, simulated devices get unequal shares of them, and the
        store of samples keeps some of each.
        """
        raise NotImplementedError

    def make_no_offset(self, input_shape: tuple[int, ...]) -> Array:
        """Return the offset that says nothing, zeros in the shape of every offset."""
        outputs = np.zeros((0, *self.get_output_shape(input_shape)))
        return np.zeros_like(self.fit_offset(self.make_no_targets(input_shape), lambda: outputs))

    # ------------------------------------------------------------------------------------- answers, as people read them

    def compute_metrics(self, mixed: Sequence[Floats], targets: NDArray[Any]) -> dict[str, float]:
        """Return further figures for people, by name."""
        raise NotImplementedError

    def compute_details(self, mixed: Sequence[Floats], targets: NDArray[Any]) -> dict[str, float]:
        """Return the figures of `compute_metrics`, and those that only reports on test samples have, by name."""
        return self.compute_metrics(mixed, targets)

    def count_answers(self, mixed: Sequence[Floats], targets: NDArray[Any]) -> Counts | None:
        """Count the samples by target and answer, as in a confusion matrix; None if there are no kinds to count."""
        return None

    def count_by_name(self, y: NDArray[Any]) -> dict[str, int]:
        """Count the samples of each class or label that has a name."""
        return {}

    def find_classes(self, answers: Sequence[Floats]) -> NDArray[np.integer] | None:
        """Return the class of each sample, (n,), if each has one and the score counts those that are right."""
        return None

    def name_answers(self, answers: Sequence[Floats]) -> tuple[str, ...]:
        """Return the answer to each sample in words, if the problem has words for it."""
        return ()

    def restore_units(self, values: Floats, *, spread: bool = False) -> Array:
        """Return values, or their spread, in the targets' own units."""
        return np.asarray(values, np.float64)

    def get_surprise(self, answers: Sequence[Floats]) -> Floats | None:
        """Return how surprising each sample is, (n,), if the answers say it themselves."""
        return None

    def get_alarms(self) -> float | None:
        """Return the share of usual samples that may count as strange, if the problem says one."""
        return None

    # --------------------------------------------------------------------------------- targets of samples, one by one

    def read_target(self, value: Any, input_shape: tuple[int, ...]) -> NDArray[Any]:
        """Return the converted target of one sample, as a person or a program tells it in JSON.

        Raises:
            ConfigError: it does not fit; the text says what to give.
        """
        try:
            found = np.asarray(value)
        except ValueError as error:  # lists of several lengths
            raise ConfigError(f"the target is no array: {error}") from error
        return np.asarray(self.convert_targets(found[np.newaxis], 1, input_shape, "the target")[0])

    def get_default_target(self) -> NDArray[Any] | None:
        """Return the target of a sample of which nothing is told, or None if such a sample has none."""
        return None

    def check_targets(self, y: NDArray[Any], n: int, input_shape: tuple[int, ...]) -> None:
        """Check converted targets of n samples.

        Raises:
            ConfigError: they are none of this problem.
        """
        shape = (n, *self.get_target_shape(input_shape))
        if y.shape != shape or y.dtype.kind not in self.TARGET_KINDS:
            raise ConfigError(f"the targets must be converted ones {shape}, not {y.dtype}{y.shape}")

    def restore_targets(self, y: NDArray[Any]) -> NDArray[Any]:
        """Return converted targets in their own units, as files have them."""
        return y

    def describe_target(self, target: NDArray[Any]) -> str:
        """Return a converted target of one sample in words."""
        return ", ".join(map(str, np.asarray(target).ravel()[:8].tolist()))

    def find_group(self, target: NDArray[Any]) -> int:
        """Return the group of one sample, of which a store keeps a bounded number; all are in one by default."""
        return 0

    def find_names(self, target: NDArray[Any]) -> tuple[str, ...]:
        """Return the names of the classes or labels that one sample has."""
        names = self.name_groups()
        return (names[self.find_group(target)],) if names else ()

    def list_names(self) -> tuple[str, ...]:
        """Return the names that `find_names` may return."""
        return self.name_groups()

    def name_groups(self) -> tuple[str, ...]:
        """Return the names of these groups, in order; none if they have none."""
        return ()

    # ------------------------------------------------------------------------------------------------ answers at work

    def grade_samples(self, answers: Sequence[Floats], targets: NDArray[Any]) -> Array | None:
        """Return how good each answer is, (n,), larger is better; None if only the user's own code can say.

        Bundles are compared by these figures, sample by sample, so a grade must not depend on other samples.
        """
        raise NotImplementedError

    def get_promise(self, answers: Sequence[Floats]) -> Floats:
        """Return the grade that each answer itself promises, (n,); zeros if it promises none."""
        return np.zeros(len(answers[0]))

    def get_shares(self, answers: Sequence[Floats]) -> Floats:
        """Return the probabilities of the classes of one sample, (n, C); by default all are of one class."""
        return np.ones((len(answers[0]), 1))

    def find_answered(self, answers: Sequence[Floats], outlier: NDArray[np.bool_]) -> NDArray[np.int64] | None:
        """Return the group that each answer names, (n,), to count right and wrong ones; None if answers name none."""
        return None

    def list_results(self, input_shape: tuple[int, ...]) -> tuple[Result, ...]:
        """Return the outputs of a model server, which `make_results` makes."""
        raise NotImplementedError

    def make_results(self, answers: Sequence[Floats], usual: tuple[float, float]) -> dict[str, Any]:
        """Return arrays (n, ...) or n strings by name, in the order of `list_results`.

        `usual` is the lowest and highest strangeness of a usual sample.
        """
        raise NotImplementedError

    def make_record(self, answers: Sequence[Floats], usual: tuple[float, float]) -> dict[str, Any]:
        """Return the answers as JSON has them, by name."""
        return {
            name: each if isinstance(each, tuple) else each.tolist()
            for name, each in self.make_results(answers, usual).items()
        }

    def make_columns(self, answers: Sequence[Floats], usual: tuple[float, float]) -> tuple[Column, ...]:
        """Return the answers as a table for people has them."""
        raise NotImplementedError

    def make_figures(self, answers: Sequence[Floats], targets: NDArray[Any] | None) -> dict[str, Any]:
        """Return the score and further figures of answers as JSON has them; None without targets."""
        if targets is None:
            return {self.SCORE: None, "metrics": {}}
        return {self.SCORE: self.compute_score(answers, targets), "metrics": self.compute_metrics(answers, targets)}

    # ------------------------------------------------------------------------------- prediction sets (conformal.md)

    def compute_nonconformity(self, answers: Sequence[Floats], targets: NDArray[Any]) -> Array:
        """Return how badly each target fits its answer, (n,)."""
        raise NotImplementedError

    def find_covered(self, answers: Sequence[Floats], targets: NDArray[Any], threshold: float) -> NDArray[np.bool_]:
        """Return whether each target is in its sample's set, (n,)."""
        return np.asarray(self.compute_nonconformity(answers, targets) <= threshold)

    def list_set_results(self) -> tuple[Result, ...]:
        """Return the outputs of a model server that tell the sets."""
        return ()

    def make_sets(self, answers: Sequence[Floats], threshold: float) -> dict[str, Any]:
        """Return arrays (n, ...) or n strings by name, in the order of `list_set_results`."""
        return {}

    def make_set_columns(self, answers: Sequence[Floats], threshold: float) -> tuple[Column, ...]:
        """Return the sets as a table for people has them."""
        return ()

    def measure_sets(self, answers: Sequence[Floats], threshold: float) -> dict[str, Any]:
        """Return how large the sets are on average, by name."""
        return {}

    def draw_masks(self, answers: Sequence[Floats]) -> NDArray[np.uint8] | None:
        """Return a picture of class numbers for each sample, (n, H, W), if the answers are pictures."""
        return None


def require_targets(y: NDArray[Any], shape: tuple[int, ...], kinds: str, what: str, wanted: str) -> None:
    """Check shape and type of targets.

    Raises:
        ConfigError: they are others; the text says what was wanted.
    """
    if y.shape != shape or y.dtype.kind not in kinds:
        raise ConfigError(f"{what} must be {wanted} {shape}, not {y.dtype}{y.shape}")
