"""The results of a simulated run: the figures of its JSON file, and how they are computed."""

from __future__ import annotations

import csv
import importlib
import io
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, Generic, TypeVar

import msgspec
import numpy as np
from msgspec import UNSET, Struct, UnsetType, field, structs
from numpy.typing import NDArray

from coordinator.simulation.reports.choices import Choice
from coordinator.watch.accuracy import AS_THEY_ARE, SCORES, rename_scores
from fedge.data.problems.problem import Problem
from fedge.data.problems.scores import ACCURACY, Counts, Figure, get_figure
from fedge.errors import ConfigError
from fedge.system.moved import alias_members
from fedge.system.text import escape_controls

Ints = NDArray[np.integer]
S = TypeVar("S", bound=Struct)
T = TypeVar("T")
ACCURACIES: Final[dict[str, str]] = {score: accuracy for accuracy, score in SCORES.items()}
UNDEFINED: Final = frozenset(
    ("accuracy", "std", "minimum", "percentile_10", "worst_decile", "sample_accuracy", "mean", "seeds")
)
"""Figures that are NaN, and null in JSON, if no test sample defines the score."""


class Scored(Struct, frozen=True, kw_only=True):
    """What has a score. `score_name` is the score's name, omitted if it is accuracy.

    The score is called accuracy in JSON (`encode_figures`), and in Python, too, where it is one.
    """

    score_name: str | UnsetType = UNSET

    @property
    def figure(self) -> Figure:
        """How people read the score."""
        return get_figure(self.score_name or ACCURACY.name)


class Accuracy(Generic[T]):
    """A property of what has a score: another field's value, where the score is an accuracy.

    Elsewhere reading it raises AttributeError, whose text says which score it is and what to read.
    """

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, scored: Scored | None, kind: type[Scored]) -> T:
        if scored is None:
            return self  # type: ignore[return-value]  # of the class itself, as properties are
        if scored.figure != ACCURACY:
            raise AttributeError(f"the score of this problem is {scored.figure.words}, no accuracy: read {self._name}")
        value: T = getattr(scored, self._name)
        return value


class Score(Scored, frozen=True, kw_only=True):
    """The scores of one model on n samples: `value`, of the score that people read, and further figures by name.

    NaN if the samples give no score, such as targets that do not vary.
    """

    n: int
    value: float = field(name="accuracy")
    macro_f1: float | None = None
    weighted_f1: float | None = None
    metrics: dict[str, float] = {}

    accuracy = Accuracy[float]("value")


class DeviceOutcome(Struct, frozen=True, kw_only=True):
    """The outcome of a device. `bundle`: whether it installed a bundle; otherwise `score` is of the model it is served.

    `problem`: why it has no bundle. `release`: the bundle's folder under bundles/; None if there is none, or it is
    unknown. `late_joiner`: whether it came when training was over. `private_weight`: weight of the private model in the
    bundle, mean over the test samples; None if there is none, or it is unknown.
    """

    id: str
    group: int
    n_train: int
    score: Score
    trained: int
    bundle: bool
    release: str | None = None
    late_joiner: bool = False
    private_weight: float | None = None
    problem: str = ""


class Point(Scored, frozen=True, kw_only=True):
    """A point of the learning curve: the devices' present score, and the costs so far.

    `score`: mean over the devices, each on its own test samples. `global_score`: as in `RunOutcome`.
    """

    round: int
    score: float = field(name="accuracy")
    global_score: float | None = field(name="global_accuracy", default=None)
    bytes_up: int
    bytes_down: int
    seconds: float

    accuracy = Accuracy[float]("score")
    global_accuracy = Accuracy[float | None]("global_score")


class Cost(Struct, frozen=True, kw_only=True):
    """The cost of reaching a score: rounds, bytes up and down together, simulated seconds."""

    round: int
    bytes: int
    seconds: float


@alias_members(rows="to_rows")
class RunOutcome(Scored, frozen=True, kw_only=True):
    """The outcome of a method on one seed. Scores are on test samples that no choice has seen; accuracies in [0, 1].

    `score` and the fields down to `weighted_f1`: over the devices, each on test samples of its own distribution, by its
    bundle in ONNX Runtime; `sample_score` is the mean by samples. `cold_start`: the same score over the late joiners,
    whom all other figures leave out. `global_score`: score of the served models on the global test set, mean over the
    devices. `max_abs_diff`: largest difference of a probability between torch and ONNX Runtime. `details`: numbers of
    the method's own summary, such as the silhouette of its clusters. `validation`: score by round of the received model
    on validation samples, as devices reported it. `evaluation_s`: the part of `wall_s` spent on measuring. `draws`:
    draws of the partition; `moved`: samples moved after the last draw, until each device had enough; both None if
    unknown. `experts`: models for all devices, without clusters. `diagnostics`: what the method found in each round, by
    name. `metrics`: further figures, means over the devices that have them. `counts`: the confusion matrix of all
    devices' bundles, if there is one of at most `MOST_COUNTED` classes. `choices`: who was asked to train, and why,
    where a bandit chose.

    `accuracy`, `global_accuracy` and `sample_accuracy` are these scores of a classification; elsewhere they raise
    AttributeError, which names the score.
    """

    method: str
    seed: int
    score: float = field(name="accuracy")
    std: float
    minimum: float
    percentile_10: float
    worst_decile: float
    sample_score: float = field(name="sample_accuracy")
    macro_f1: float | None = None
    weighted_f1: float | None = None
    global_score: float | None = field(name="global_accuracy")
    rounds: int
    bytes_up: int
    bytes_down: int
    seconds: float
    bundles: int
    max_abs_diff: float
    split: bool
    clusters: dict[str, tuple[str, ...]]
    curve: tuple[Point, ...]
    devices: tuple[DeviceOutcome, ...]
    wall_s: float
    evaluation_s: float
    details: dict[str, float] = {}
    validation: dict[int, float] = {}
    cold_start: float | None = None
    draws: int | None = None
    moved: int | None = None
    experts: int = 1
    diagnostics: tuple[dict[str, float], ...] = ()
    metrics: dict[str, float] = {}
    counts: Counts | None = None
    choices: tuple[Choice, ...] = ()

    accuracy = Accuracy[float]("score")
    global_accuracy = Accuracy[float | None]("global_score")
    sample_accuracy = Accuracy[float]("sample_score")

    def to_rows(self) -> list[dict[str, Any]]:
        """Return one row per device with its data, scores and further figures, for the CSV file and `to_pandas`."""
        further = dict.fromkeys(name for device in self.devices for name in device.score.metrics)
        return [
            {
                "device": device.id,
                "group": device.group,
                "n_train": device.n_train,
                "n_test": device.score.n,
                "trained": device.trained,
                "bundle": device.bundle,
                "late_joiner": device.late_joiner,
                **name_scores(device.score, self.figure),
                **{name: device.score.metrics.get(name) for name in further},
            }
            for device in self.devices
        ]

    def to_pandas(self) -> Any:
        """Return the rows as a `pandas.DataFrame`.

        Raises:
            ConfigError: pandas is not installed.
        """
        return make_data_frame(self.to_rows())

    def plot(self, axes: Any = None) -> Any:
        """Draw the score by round on matplotlib axes (default: new ones) and return them."""
        from coordinator.simulation.reports.plots import draw_by_round

        return draw_by_round([self], axes)


def find_score_name(figure: Figure) -> str | UnsetType:
    """Return the `score_name` of what has this score."""
    return UNSET if figure == ACCURACY else figure.name


def name_figures(point: Point, figure: Figure) -> dict[str, float]:
    """Return the known figures of a point by name, with the score by its own."""
    score = {figure.name: point.score, f"global_{figure.name}": point.global_score}
    found = score | {"bytes_up": point.bytes_up, "bytes_down": point.bytes_down, "seconds": point.seconds}
    return {name: float(value) for name, value in found.items() if value is not None}


def name_scores(score: Score, figure: Figure) -> dict[str, float | None]:
    """Return the scores of a device by name."""
    if figure == ACCURACY:
        return {"accuracy": score.value, "macro_f1": score.macro_f1, "weighted_f1": score.weighted_f1}
    return {figure.name: score.value}


def encode_figures(outcome: Any, figure: Figure, indent: int = 1) -> bytes:
    """Encode results as JSON, in which a score that is no accuracy is called score."""
    encoded = msgspec.json.encode(outcome, enc_hook=str)
    if figure != ACCURACY:
        encoded = msgspec.json.encode(rename_scores(msgspec.json.decode(encoded)))
    return msgspec.json.format(encoded, indent=indent)


def decode_figures(encoded: bytes, kind: type[S]) -> S:
    """Decode results that `encode_figures` has encoded, or msgspec.

    Raises:
        msgspec.DecodeError: the bytes are no such results.
    """
    found = _restore(msgspec.json.decode(encoded))
    return msgspec.convert(found, kind, str_keys=True, dec_hook=lambda given, text: given(text))


def _restore(value: Any, name: str = "") -> Any:
    """Undo `_rename`, at any depth, and make NaN of the figures that JSON cannot hold."""
    if value is None and name in UNDEFINED:
        return math.nan
    if isinstance(value, list):
        return [_restore(each, name) for each in value]
    if not isinstance(value, dict):
        return value
    names: dict[str, str] = {
        k: k if isinstance(each, dict) and "n" in each else ACCURACIES.get(k) or k for k, each in value.items()
    }
    found = {names[k]: each if k in AS_THEY_ARE else _restore(each, names[k]) for k, each in value.items()}
    if isinstance(metrics := found.get("metrics"), dict):
        found["metrics"] = {name: _restore(each, "mean") for name, each in metrics.items()}
    return found


def find_without_bundle(devices: Iterable[DeviceOutcome]) -> dict[str, str]:
    """Find the devices without a bundle, by id, and why."""
    return {device.id: device.problem for device in devices if not device.bundle}


SPENT: Final = "epsilon spent"
"""Prefix of the name of a detail: the largest epsilon that differential privacy has spent on a device's samples."""
MOST_COUNTED: Final = 100
"""Most classes of a confusion matrix in the results."""
COMPUTED: Final = ("=", "+", "-", "@")
"""First characters of cells that spreadsheets take for formulas."""


def make_data_frame(rows: list[dict[str, Any]]) -> Any:
    """Make a `pandas.DataFrame` of the rows.

    Raises:
        ConfigError: pandas is not installed.
    """
    try:
        pandas = importlib.import_module("pandas")
    except ModuleNotFoundError as error:
        raise ConfigError("to_pandas needs pandas, which fedge does not bring: pip install pandas") from error
    return pandas.DataFrame(rows)


def format_csv(rows: Sequence[Mapping[str, Any]]) -> str:
    """Format rows as comma-separated values with a header.

    A text that a spreadsheet would take for a formula, such as the name of a class, gets an apostrophe before it;
    control characters are escaped.
    """
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(map(_escape_cell, rows[0]))
    writer.writerows(map(_escape_cell, row.values()) for row in rows)
    return text.getvalue()


def _escape_cell(cell: object) -> object:
    if not isinstance(cell, str):
        return cell
    return ("'" if cell.startswith(COMPUTED) else "") + escape_controls(cell)


def compute_score(
    problem: Problem, answers: Sequence[NDArray[np.floating]], y: NDArray[Any], *, thorough: bool = True
) -> Score:
    """Compute the scores of a problem's answers for targets (n, ...), n >= 1.

    `thorough`: whether to compute also what a learning curve does not need.
    """
    details = problem.compute_details(answers, y) if thorough else problem.compute_metrics(answers, y)
    if (classes := problem.find_classes(answers)) is not None:
        found = compute_class_score(classes, y)
        return structs.replace(
            found, metrics={k: v for k, v in details.items() if k not in found.__struct_encode_fields__}
        )
    score = problem.compute_score(answers, y)
    return Score(
        n=len(y),
        value=math.nan if score is None else score,
        metrics=details,
        score_name=find_score_name(problem.figure),
    )


def compute_class_score(predicted: Ints, y: Ints) -> Score:
    """Compute accuracy and F1 of predicted classes (n,) against labels (n,), n >= 1.

    F1_c = 2TP / (2TP + FP + FN) over the classes that are among the labels or the predictions. Macro F1 is their mean,
    weighted F1 their mean by frequency of the class among the labels. Source: scmoe_pfl.md section 13.
    """
    classes = np.union1d(predicted, y)
    hits = np.array([np.count_nonzero((predicted == c) & (y == c)) for c in classes])
    true, said = (np.array([np.count_nonzero(z == c) for c in classes]) for z in (y, predicted))
    f1 = 2 * hits / (true + said)  # 2TP + FP + FN = true + said
    return Score(
        n=len(y),
        value=float(np.mean(predicted == y)),
        macro_f1=float(f1.mean()),
        weighted_f1=float((f1 * true).sum() / true.sum()),
    )


def compute_sample_score(scores: Sequence[Score]) -> float:
    """Compute the mean score by samples: of classes the share of right predictions, in [0, 1] (pm_moe.md, Eq. 31)."""
    known = [score for score in scores if math.isfinite(score.value)]
    return float(np.average([s.value for s in known], weights=[s.n for s in known])) if known else math.nan


def make_outcome(everybody: Sequence[DeviceOutcome], **known: Any) -> RunOutcome:
    """Compute a run's figures over its devices; `known`: its other fields."""
    devices = [device for device in everybody if not device.late_joiner]
    scores = [device.score.value for device in devices if math.isfinite(device.score.value)] or [math.nan]
    cold = [device.score.value for device in everybody if device.late_joiner]
    return RunOutcome(
        score=float(np.mean(scores)),
        std=float(np.std(scores)),
        minimum=min(scores),
        percentile_10=float(np.percentile(scores, 10)),
        worst_decile=compute_worst_decile(scores),
        sample_score=compute_sample_score([device.score for device in devices]),
        macro_f1=_average([device.score.macro_f1 for device in devices]),
        weighted_f1=_average([device.score.weighted_f1 for device in devices]),
        metrics=average_metrics([device.score for device in devices]),
        bundles=sum(device.bundle for device in everybody),
        devices=tuple(everybody),
        cold_start=float(np.mean(cold)) if cold else None,
        **known,
    )


def average_metrics(scores: Sequence[Score]) -> dict[str, float]:
    """Return the means of the further figures by name, each over the devices that have it."""
    names = dict.fromkeys(name for score in scores for name in score.metrics)
    return {name: float(np.mean([s.metrics[name] for s in scores if name in s.metrics])) for name in names}


def _average(values: Sequence[float | None]) -> float | None:
    """Return the mean of the values that are known; None without any."""
    known = [value for value in values if value is not None]
    return float(np.mean(known)) if known else None


def compute_worst_decile(scores: Sequence[float]) -> float:
    """Compute the mean score of the lowest tenth of the devices, rounded up to at least one device."""
    lowest = sorted(scores)[: math.ceil(len(scores) / 10)]
    return float(np.mean(lowest))


def compute_cost(curve: Sequence[Point], target: float) -> Cost | None:
    """Return the cost of the first point of a curve that reaches a score; None if none does."""
    point = next((point for point in curve if point.score >= target), None)
    if point is None:
        return None
    return Cost(round=point.round, bytes=point.bytes_up + point.bytes_down, seconds=point.seconds)


def compute_common_score(runs: Sequence[RunOutcome]) -> float:
    """Compute the highest score that all runs' curves reached before the installed bundles."""
    return min(max(point.score for point in run.curve[:-1]) for run in runs)


def format_megabytes(size_bytes: float) -> str:
    """Format bytes for people, in units of 10^6."""
    return f"{size_bytes / 1e6:.1f} MB"
