"""Which accuracy is shown first, and of what it is: that of the bundle that answers comes before that of training.

Three are measured, each of something else, and none stands for another:

    at work        answers of the bundle in service that people labelled later
    of its bundle  the bundle in service, on the device's unmarked validation samples, when it was last examined
    in training    the shared model from which a device last trained, on its validation samples

The first two leave a device of a bundle of its own only if its owner allows it (docs/privacy.md).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from enum import StrEnum
from typing import Any, Final

from msgspec import Struct

from fedge.data.problems.scores import ACCURACY, Figure, get_figure

ENOUGH: Final = 20
"""Fewest labelled answers whose share comes before the accuracy on validation samples."""


SCORES: Final = {"accuracy": "score", "global_accuracy": "global_score", "sample_accuracy": "sample_score"}
"""Names of accuracies, and what they are called in files if the score is another one."""
OF_CLASSES: Final = ("macro_f1", "weighted_f1")
"""Figures of single-label classification, which files of other problems do not have."""
AS_THEY_ARE: Final = ("metrics", "details", "clusters", "values", "searched")
"""Entries whose names are not ours."""


class Measured(StrEnum):
    """What an accuracy is of."""

    AT_WORK = "at work"
    BUNDLE = "of its bundle"
    TRAINING = "in training"


class Accuracy(Struct, frozen=True, kw_only=True):
    """An accuracy and what it is of. share: in [0, 1]. n: the samples or answers on which it rests; None if unknown."""

    share: float
    of: Measured
    n: int | None = None


class FleetAccuracy(Accuracy, frozen=True, kw_only=True):
    """The mean over the `devices` that tell it, in which answers count alike, and otherwise devices do."""

    devices: int | None = None


def find_figure(told: Mapping[str, Any]) -> Figure:
    """Find how people read the score in a summary or an event, which is accuracy unless it names another one."""
    return get_figure(told.get("score_name", ACCURACY.name))


def rename_scores(value: Any) -> Any:
    """Rename what is called accuracy in JSON values, at any depth."""
    if isinstance(value, list | tuple):
        return [rename_scores(each) for each in value]
    if not isinstance(value, Mapping):
        return value
    kept = {key: each for key, each in value.items() if key not in OF_CLASSES or each is not None}
    return {SCORES.get(k, k): each if k in AS_THEY_ARE else rename_scores(each) for k, each in kept.items()}


def name_scores(told: Any, figure: Figure) -> Any:
    """Return JSON values for people's programs, in which a score that is no accuracy is called score."""
    return told if figure == ACCURACY else rename_scores(told)


def find_accuracy(device: Mapping[str, Any], trained: float | None) -> Accuracy | None:
    """Find the accuracy of a device that is shown first; None if none is known.

    Args:
        device: as in HOME/summary.json.
        trained: the last accuracy of a model in training on it.
    """
    work, bundle = find_at_work(device), find_of_bundle(device)
    if work is not None and (bundle is None or (work.n or 0) >= ENOUGH):
        return work
    if bundle is not None:
        return bundle
    return None if trained is None else Accuracy(share=trained, of=Measured.TRAINING)


def find_at_work(device: Mapping[str, Any]) -> Accuracy | None:
    """Find the share of right answers among the latest that were labelled later; None if there are none."""
    counts = device.get("at_work") or {"right": 0, "wrong": 0}
    n = counts["right"] + counts["wrong"]
    recent = counts.get("recent")
    return Accuracy(share=counts["right"] / n if recent is None else recent, of=Measured.AT_WORK, n=n) if n else None


def find_of_bundle(device: Mapping[str, Any]) -> Accuracy | None:
    """Find the accuracy of the bundle in service on validation samples; None if it is not told."""
    told = device.get("of_bundle")
    return None if told is None else Accuracy(share=told["accuracy"], of=Measured.BUNDLE, n=told["n"])


def summarise_accuracy(devices: Iterable[Mapping[str, Any]], trained: float | None) -> list[FleetAccuracy]:
    """Summarise the accuracies of a fleet, the one that is shown first at the beginning.

    Args:
        devices: as in HOME/summary.json.
        trained: mean over the last cohort.
    """
    known = list(devices)
    work = [found for device in known if (found := find_at_work(device)) is not None]
    bundles = [found for device in known if (found := find_of_bundle(device)) is not None]
    n = sum(found.n or 0 for found in work)
    all_work = _average(work, [found.n or 0 for found in work])
    of_bundles = _average(bundles, [1] * len(bundles))
    few = [all_work, of_bundles] if n >= ENOUGH else [of_bundles, all_work]
    last = None if trained is None else FleetAccuracy(share=trained, of=Measured.TRAINING)
    return [figure for figure in (*few, last) if figure is not None]


def _average(found: Sequence[Accuracy], weights: Sequence[int]) -> FleetAccuracy | None:
    if not found:
        return None
    share = sum(each.share * weight for each, weight in zip(found, weights, strict=True)) / sum(weights)
    n = None if any(each.n is None for each in found) else sum(each.n or 0 for each in found)
    return FleetAccuracy(share=share, of=found[0].of, n=n, devices=len(found))


def find_trained(history: Sequence[Mapping[str, Any]]) -> float | None:
    """Find the accuracy of the last cohort that told one. `history`: of a method's summary."""
    return next((line["accuracy"] for line in reversed(history) if line["accuracy"] is not None), None)


def describe_fleet_accuracy(figures: Sequence[FleetAccuracy]) -> list[str]:
    """Describe figures in lines, each with what it is of."""
    lines = []
    for figure in figures:
        n = "" if figure.n is None else f"{figure.n} "
        where = {
            Measured.AT_WORK: f"at work, {n}answers labelled later",
            Measured.BUNDLE: f"of the bundles that answer, {n}validation samples",
            Measured.TRAINING: "of the models in training, validation samples of the last cohort",
        }[figure.of]
        on = "" if figure.devices is None else f" on {figure.devices} device{'' if figure.devices == 1 else 's'}"
        lines.append(f"{figure.share:.3f} ({where}{on})")
    return lines
