"""Segmentation: a class for each pixel (docs/methods/problems.md section 2).

q = log-softmax(o / T + kappa pi) along the classes;   l = mean of q[y] over the counted pixels
pi = log shares of the classes among the device's counted pixels;   E = mean over pixels of logsumexp(o)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Annotated, Any, ClassVar, Final

import numpy as np
from msgspec import Meta
from numpy.typing import NDArray

from fedge.data.problems.calibration import Calibration
from fedge.data.problems.classification import mix_probabilities
from fedge.data.problems.formulas import Answers
from fedge.data.problems.maths import Array, Floats, log_softmax, logsumexp
from fedge.data.problems.names import Word
from fedge.data.problems.problem import Problem
from fedge.data.problems.results import Column, Result
from fedge.data.problems.scores import Counts, compute_confusion, compute_mean_iou
from fedge.errors import ConfigError

IGNORED: Final = 255
"""Target of a pixel that counts nowhere."""
BACKGROUND: Final = 0
ONLY_IGNORED: Final = f"masks have only 0 and {IGNORED}, and {IGNORED} counts nowhere: write 1 in its place"
"""Refusal of masks of black and white, from which nothing can be learned."""


class Segmentation(Problem, frozen=True, kw_only=True, tag="segmentation"):
    """One of C classes for each pixel; outputs are logits (C, H, W), targets (H, W), 255 where none counts."""

    NAME: ClassVar = "segmentation"
    SCORE: ClassVar = "mean_iou"
    RAW: ClassVar = "logits"
    NETWORK: ClassVar = "unet"
    OUTPUTS: ClassVar = ("probabilities",)
    FOLDER: ClassVar = "masks"

    classes: Annotated[tuple[Word, ...], Meta(min_length=2, max_length=IGNORED)]

    def get_output_shape(self, input_shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return (C, H, W)."""
        return (len(self.classes), *input_shape[1:])

    def describe_outputs(self) -> str:
        """Return them in words."""
        return f"there are {len(self.classes)} classes for each pixel"

    def get_target_shape(self, input_shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return (H, W)."""
        return input_shape[1:]

    def convert_targets(self, y: NDArray[Any], n: int, input_shape: tuple[int, ...], what: str) -> NDArray[Any]:
        """Return masks, (n, H, W) int64; raise ConfigError for others."""
        if len(input_shape) != 3:
            raise ConfigError(f"segmentation takes images (channels, height, width), and the samples are {input_shape}")
        shape, last = (n, *input_shape[1:]), len(self.classes) - 1
        if y.shape != shape or y.dtype.kind not in "bui":
            raise ConfigError(f"{what} must be a class number for each pixel {shape}, not {y.dtype}{y.shape}")
        if not ((y >= 0) & ((y <= last) | (y == IGNORED))).all():
            wrong = y[(y < 0) | ((y > last) & (y != IGNORED))]
            raise ConfigError(
                f"{what} holds {wrong.min()}..{wrong.max()}: a pixel is 0..{last}, or {IGNORED} if it does not count"
            )
        return y.astype(np.int64)

    def rotate_targets(self, y: NDArray[Any], quarters: int) -> NDArray[Any]:
        """Return the masks turned like their images."""
        return np.ascontiguousarray(np.rot90(y, quarters, axes=(1, 2)))

    def move_targets(
        self,
        y: NDArray[Any],
        rows: NDArray[np.int64],
        columns: NDArray[np.int64],
        inside: NDArray[np.bool_],
    ) -> NDArray[Any]:
        """Return the masks moved like their images; a pixel from outside counts nowhere."""
        return np.where(inside, y[np.arange(len(y))[:, np.newaxis, np.newaxis], rows, columns], IGNORED)

    def group_targets(self, y: NDArray[Any]) -> NDArray[np.int64]:
        """Return each sample's most frequent class but the background, or the background if it has no other."""
        n_classes = len(self.classes)
        counts = np.stack([(y == c).sum(axis=(1, 2)) for c in range(1, n_classes)], axis=1)
        return np.where(counts.any(axis=1), counts.argmax(axis=1) + 1, BACKGROUND).astype(np.int64)

    def fit_offset(self, targets: NDArray[Any], predict: Callable[[], Floats]) -> Array:
        """Return pi, (C, 1, 1), with half a pixel added for each class."""
        counts = np.bincount(targets[targets != IGNORED].ravel(), minlength=len(self.classes)) + 0.5
        return np.asarray(np.log(counts / counts.sum()))[:, np.newaxis, np.newaxis]

    def calibrate(self, outputs: Floats, how: Calibration, offset: Array) -> Answers:
        """Return log-probabilities, (n, C, H, W)."""
        with np.errstate(invalid="ignore"):
            return Answers(log_softmax(np.asarray(outputs, np.float64) / how.temperature + how.kappa * offset, axis=1))

    def compute_log_likelihood(self, answers: Answers, targets: NDArray[Any]) -> Array:
        """Return the mean of q[y] over a sample's counted pixels; 0 for a sample without any."""
        counted = targets != IGNORED
        picked = np.take_along_axis(answers.values, np.where(counted, targets, 0)[:, np.newaxis], axis=1)[:, 0]
        total = np.where(counted, picked, 0).sum(axis=(1, 2))
        return np.asarray(total / np.maximum(counted.sum(axis=(1, 2)), 1), np.float64)

    def compute_unknown(self, targets: NDArray[Any]) -> Array:
        """Return -log C, that of equal shares."""
        return np.full(len(targets), -math.log(len(self.classes)))

    def compute_energies(self, outputs: Floats, answers: Answers) -> Floats:
        """Return the mean over pixels of logsumexp(o)."""
        with np.errstate(invalid="ignore"):
            return np.asarray(logsumexp(np.asarray(outputs, np.float64), axis=1).mean(axis=(1, 2)))

    def mix(self, components: Sequence[Answers], weights: Floats) -> tuple[Floats, ...]:
        """Return probabilities (n, C, H, W); equal shares where nothing is usable."""
        return (mix_probabilities([np.exp(each.values) for each in components], weights),)

    def compute_score(self, mixed: Sequence[Floats], targets: NDArray[Any]) -> float | None:
        """Return the mean IoU over the classes that these targets have."""
        return compute_mean_iou(mixed[0].argmax(axis=1), targets, len(self.classes), IGNORED)

    def compute_metrics(self, mixed: Sequence[Floats], targets: NDArray[Any]) -> dict[str, float]:
        """Return the share of counted pixels that are right."""
        counted = targets != IGNORED
        right = (mixed[0].argmax(axis=1) == targets)[counted]
        return {"pixel_accuracy": float(right.mean())} if right.size else {}

    def describe_target(self, target: NDArray[Any]) -> str:
        """Return the classes of the mask with their shares of the counted pixels."""
        counts = np.bincount(target[target != IGNORED].ravel(), minlength=len(self.classes))
        shares = zip(self.classes, counts / max(int(counts.sum()), 1), strict=True)
        return ", ".join(f"{name} {100 * share:.0f} %" for name, share in shares if share > 0) or "no pixel counts"

    def find_names(self, target: NDArray[Any]) -> tuple[str, ...]:
        """Return the names of all classes in the mask."""
        return tuple(self.classes[c] for c in np.unique(target[target != IGNORED]))

    def find_group(self, target: NDArray[Any]) -> int:
        """Return the most frequent class but the background."""
        return int(self.group_targets(target[np.newaxis])[0])

    def name_groups(self) -> tuple[str, ...]:
        """Return the names of the classes."""
        return self.classes

    def grade_samples(self, answers: Sequence[Floats], targets: NDArray[Any]) -> Array | None:
        """Return the mean IoU of each sample, over the classes of its mask; 0 where no pixel counts."""
        found, n_classes = answers[0].argmax(axis=1), len(self.classes)
        grades = [compute_mean_iou(f[None], y[None], n_classes, IGNORED) for f, y in zip(found, targets, strict=True)]
        return np.array([0.0 if grade is None else grade for grade in grades], np.float64)

    def list_results(self, input_shape: tuple[int, ...]) -> tuple[Result, ...]:
        """Return the mask of class numbers, and the probabilities of the classes for each pixel."""
        shape = self.get_output_shape(input_shape)
        return Result("mask", "UINT8", shape[1:]), Result("probabilities", "FP32", shape)

    def make_results(self, answers: Sequence[Floats], usual: tuple[float, float]) -> dict[str, Any]:
        """Return these."""
        return {"mask": self.draw_masks(answers), "probabilities": answers[0]}

    def make_record(self, answers: Sequence[Floats], usual: tuple[float, float]) -> dict[str, Any]:
        """Return the names of the classes and the masks, without probabilities, which are many."""
        return {"classes": self.classes, "mask": self.draw_masks(answers).tolist()}

    def make_columns(self, answers: Sequence[Floats], usual: tuple[float, float]) -> tuple[Column, ...]:
        """Return the shares of the classes in each mask."""
        return (Column("mask", tuple(self.describe_target(mask) for mask in self.draw_masks(answers))),)

    def draw_masks(self, answers: Sequence[Floats]) -> NDArray[np.uint8]:
        """Return the most probable class of each pixel."""
        return np.asarray(answers[0].argmax(axis=1), np.uint8)

    def count_answers(self, mixed: Sequence[Floats], targets: NDArray[Any]) -> Counts:
        """Return the confusion matrix of the counted pixels."""
        counted = targets != IGNORED
        table = compute_confusion(mixed[0].argmax(axis=1)[counted], targets[counted], len(self.classes))
        return Counts.from_table("pixels", self.classes, self.classes, table)
