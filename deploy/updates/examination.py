"""Decides on the device's own samples, in a separate process, whether a new bundle is fit for service.

A graph that crashes ONNX Runtime takes down only that process. Both bundles are measured there in turn, so their
latencies are comparable.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Annotated, Any, Final

import numpy as np
from msgspec import Meta, Struct
from msgspec.structs import replace
from numpy.typing import NDArray

from deploy.inference.engines import EngineOptions
from deploy.inference.runtime import load_update
from deploy.updates.quality import Graded, Measurement, explain_better, grade_labelled, measure_quality
from edge_agent.samples import SampleStore
from edge_agent.samples.database import FOLDER
from fedge.data.preprocessing import preprocess
from fedge.data.task import TRAIN, TaskSpec
from fedge.data.validation import Validation, load_validation
from fedge.errors import ConfigError, FedgeError, StoreError
from fedge.system import child
from fedge.system.loading import allow_code
from fedge.wire.messages import NonNegative, Quality

log = logging.getLogger("fedge.deploy")

TIMEOUT_S: Final = 300.0
NEWEST: Final = 200
"""Most of the newest labelled samples on which bundles are compared, beside the validation samples."""


class Limits(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Limits on a new bundle's loss of accuracy and on its latency, and the length of its trial.

    `accuracy_drop` is a difference of mean grades (`Problem.grade_samples`), more if few samples make it uncertain: a
    share of right answers, of F1 or of IoU; in regression of the targets' variance; in reconstruction nats.
    """

    accuracy_drop: NonNegative = 0.02
    latency_ratio: Annotated[float, Meta(ge=1)] = 1.5  # relative to the running bundle's median of single samples
    latency_slack_ms: NonNegative = 1.0  # allowed in addition, for very fast bundles
    latency_ms: NonNegative | None = None  # absolute limit, whatever the running bundle takes
    probation_predictions: Annotated[int, Meta(ge=1)] = 20
    probation_s: NonNegative = 60.0


class Examination(Struct, frozen=True, kw_only=True):
    """The result of an examination.

    `reason` says why the new bundle must not serve, or is "". `before` is the running bundle's quality, None without a
    running bundle. `warning` says why the device's samples were not used although there is a file of them.
    """

    reason: str
    before: Quality | None = None
    now: Quality | None = None
    warning: str = ""


Grades = tuple[NDArray[np.float64], NDArray[np.float64]]
"""How good the answers of the running and the new bundle to some samples are, (n,) each; 1 right and 0 wrong."""


def explain_refusal(
    before: Measurement | None,
    now: Measurement,
    limits: Limits,
    newest: Grades | None = None,
    *,
    right_or_wrong: bool = True,
) -> str:
    """Return why the new bundle must not serve, or "".

    Grades are compared as `compare_grades` says. If the newest samples favour one bundle, they decide, since
    they show what the device sees now; otherwise the validation samples do. All samples count, including sensitive
    ones, from which the running bundle may have learned. Since the verdict is reported, it contains no figure.
    """
    if not now.finite:
        return "not-finite: the bundle gives numbers that are not finite on this device's samples"
    latency = now.quality.latency_ms or 0.0
    allowed = compute_allowed_ms(None if before is None else before.quality, limits)
    if allowed is not None and latency > allowed:
        return "latency: the bundle takes longer for a sample than this device allows"
    if newest is not None and (favoured := compare_grades(*newest, limits)):
        worse = explain_better("running", "this device's newest samples", right_or_wrong=right_or_wrong)
        return "" if favoured > 0 else worse
    if before is None or before.grades is None or now.grades is None:
        return ""
    if compare_grades(before.grades, now.grades, limits) < 0:
        return explain_better("running", "this device's samples", right_or_wrong=right_or_wrong)
    return ""


def compare_grades(before: NDArray[Any], now: NDArray[Any], limits: Limits) -> int:
    """Return -1 if the running bundle is better, 1 if the new one is, 0 if neither clearly is.

    The mean grades, or accuracies, may differ by `accuracy_drop` or, if that is more, by one standard error of the mean
    difference (paired by sample); a single sample decides nothing.
    """
    if not len(now):
        return 0
    difference = now.astype(np.float64) - before
    error = float(difference.std() / np.sqrt(len(difference)))
    alone = float(np.abs(difference).max())
    clear = abs(difference.sum()) > alone and abs(difference.mean()) > max(limits.accuracy_drop, error)
    return int(np.sign(difference.sum())) if clear else 0


def compute_allowed_ms(before: Quality | None, limits: Limits) -> float | None:
    """Return the largest median latency in ms allowed for a new bundle, or None for no limit."""
    bounds = [] if limits.latency_ms is None else [limits.latency_ms]
    if before is not None and before.latency_ms is not None:
        bounds.append(limits.latency_ratio * before.latency_ms + limits.latency_slack_ms)
    return min(bounds, default=None)


def examine_bundle(
    running: Path | None, staged: Path, home: Path, limits: Limits, how: EngineOptions = EngineOptions()
) -> Examination:
    """Measure and compare both bundles in a child process, with the service's options; any failure is a reason."""
    try:
        found = child.call_once(
            "deploy.updates.examination:examine_in_process",
            running,
            staged,
            home,
            limits,
            how,
            returns=Examination,
            timeout_s=TIMEOUT_S,
        )
    except TimeoutError as error:
        return Examination(reason=f"smoke-test: {error}")
    except ConfigError as error:
        return Examination(reason=f"smoke-test: it cannot be run on this device ({error})"[:500])
    if found.warning:
        log.warning("event=no_validation reason=%r", found.warning)
    was, accuracy = (None if quality is None else quality.accuracy for quality in (found.before, found.now))
    n = 0 if found.now is None else found.now.n
    log.info("event=examined accuracy=%s before=%s of=%d reason=%r", accuracy, was, n, found.reason)
    return found


def examine_in_process(
    running: Path | None, staged: Path, home: Path, limits: Limits, how: EngineOptions
) -> Examination:
    """Measure and compare both bundles in this process, for `examine_bundle`."""
    allow_code(how.code)
    try:
        new = load_update(staged, how, again=True)
        validation, warning = _load_samples(home, new.task)
        now = measure_quality(new, validation)
    except (FedgeError, OSError) as error:
        return Examination(reason=f"smoke-test: {error}"[:500])
    before: Measurement | None = None
    newest: tuple[Graded | None, Graded | None] = (None, None)
    fresh, lost = _load_newest(home, new.task)
    if running is not None:
        try:
            old = load_update(running, how, again=True)
            before = measure_quality(old, validation)
            newest = grade_labelled(old, fresh), grade_labelled(new, fresh)
        except (FedgeError, OSError):  # a broken running bundle is not a reference
            before, newest = None, (None, None)
    was, is_now = None if before is None else before.quality, now.quality
    old_graded, new_graded = newest
    grades = None if old_graded is None or new_graded is None else (old_graded.grades, new_graded.grades)
    if was is not None and grades is not None and compare_grades(*grades, limits):
        was, is_now = _replace_score(was, old_graded), _replace_score(is_now, new_graded)
    reason = explain_refusal(before, now, limits, grades, right_or_wrong=new.task.problem.RIGHT_OR_WRONG)
    return Examination(reason=reason, before=was, now=is_now, warning=warning or lost)


def _replace_score(quality: Quality, newest: Graded | None) -> Quality:
    """Return the figures with the score on the newest samples, which were decisive; only unmarked ones count."""
    if newest is None or not newest.n_told:
        return quality
    return replace(quality, n=newest.n_told, accuracy=newest.score)


def _load_newest(home: Path, task: TaskSpec) -> tuple[Validation, str]:
    """Load the newest labelled samples on which nothing has trained, as model inputs, and why there are none."""
    nothing = Validation(np.zeros((0, *task.input_shape), np.float32), task.problem.make_no_targets(task.input_shape))
    if not (home / FOLDER).is_dir():
        return nothing, ""
    try:
        with SampleStore(home, task) as store:
            found = store.read_newest(NEWEST)
    except (ConfigError, StoreError) as error:
        return nothing, str(error)
    held_out = found.place != TRAIN
    if not held_out.any():
        return nothing, ""
    return Validation(preprocess(task, found.x[held_out]), found.y[held_out], found.sensitive[held_out]), ""


def _load_samples(home: Path, task: TaskSpec) -> tuple[Validation, str]:
    """Load the validation samples; a damaged file counts as empty, since otherwise no release would pass."""
    try:
        return load_validation(home, task), ""
    except ConfigError as error:
        return Validation(np.zeros((0, *task.input_shape), np.float32), None), str(error)
