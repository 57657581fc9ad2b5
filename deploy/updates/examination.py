"""Decides on the device's own samples, in a separate process, whether a new bundle is fit for service.

A graph that crashes ONNX Runtime takes down only that process. Both bundles are measured there in turn, so their
latencies are comparable.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Annotated, Final

import numpy as np
from msgspec import Meta, Struct

from deploy.inference.engines import EngineOptions
from deploy.inference.runtime import load_update
from deploy.updates.quality import Measurement, measure_quality
from fedge.data.task import TaskSpec
from fedge.data.validation import Validation, load_validation
from fedge.errors import ConfigError, FedgeError
from fedge.system import child
from fedge.wire.messages import NonNegative, Quality

log = logging.getLogger("fedge.deploy")

TIMEOUT_S: Final = 300.0


class Limits(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Limits on a new bundle's loss of accuracy and on its latency, and the length of its trial."""

    accuracy_drop: NonNegative = 0.02  # share of the validation samples; more if few samples make it uncertain
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


def explain_refusal(before: Measurement | None, now: Measurement, limits: Limits) -> str:
    """Return why the new bundle must not serve, or "".

    The accuracy may fall by `accuracy_drop` or, if that is more, by one standard error of the mean difference (paired
    by sample); a single sample decides nothing. All samples count, including sensitive ones, from which the running
    bundle may have learned. Since the verdict is reported, it contains no figure.
    """
    if not now.finite:
        return "not-finite: the bundle gives numbers that are not finite on this device's samples"
    latency = now.quality.latency_ms or 0.0
    allowed = compute_allowed_ms(None if before is None else before.quality, limits)
    if allowed is not None and latency > allowed:
        return "latency: the bundle takes longer for a sample than this device allows"
    if before is None:
        return ""
    if before.correct is not None and now.correct is not None and len(now.correct):
        difference = before.correct.astype(np.float64) - now.correct
        error = float(difference.std() / np.sqrt(len(difference)))
        if difference.sum() > 1 and difference.mean() > max(limits.accuracy_drop, error):
            return "accuracy: the running bundle is more accurate on this device's samples"
    return ""


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
    return found


def examine_in_process(
    running: Path | None, staged: Path, home: Path, limits: Limits, how: EngineOptions
) -> Examination:
    """Measure and compare both bundles in this process, for `examine_bundle`."""
    try:
        new = load_update(staged, how, again=True)
        validation, warning = _load_samples(home, new.task)
        now = measure_quality(new, validation)
    except (FedgeError, OSError) as error:
        return Examination(reason=f"smoke-test: {error}"[:500])
    before = None
    if running is not None:
        try:
            before = measure_quality(load_update(running, how, again=True), validation)
        except (FedgeError, OSError):  # a broken running bundle is not a reference
            before = None
    return Examination(
        reason=explain_refusal(before, now, limits),
        before=None if before is None else before.quality,
        now=now.quality,
        warning=warning,
    )


def _load_samples(home: Path, task: TaskSpec) -> tuple[Validation, str]:
    """Load the validation samples; a damaged file counts as empty, since otherwise no release would pass."""
    try:
        return load_validation(home, task), ""
    except ConfigError as error:
        return Validation(np.zeros((0, *task.input_shape), np.float32), None), str(error)
