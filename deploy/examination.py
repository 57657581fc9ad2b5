"""Is a new bundle fit to answer on this device? Decided on the device's own samples, in a process of its own.

A graph that brings ONNX Runtime down takes only that process with it. Both bundles are measured there, one after the
other, so that their latencies are those of the same moment.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Annotated, Final

import numpy as np
from msgspec import Meta, Struct

from deploy.engines import How
from deploy.quality import Measured, measure
from deploy.runtime import load_update
from fedge import child
from fedge.errors import ConfigError, FedgeError
from fedge.messages import NonNegative, Quality
from fedge.task import TaskSpec
from fedge.validation import Validation, load_validation

log = logging.getLogger("fedge.deploy")

TIMEOUT_S: Final = 300.0


class Limits(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What a new bundle may cost, and how it has to prove itself when it answers."""

    accuracy_drop: NonNegative = 0.02  # share of the validation samples; more if so few samples cannot tell
    latency_ratio: Annotated[float, Meta(ge=1)] = 1.5  # to the running bundle's median of single samples
    latency_slack_ms: NonNegative = 1.0  # on top, for bundles that take next to nothing
    latency_ms: NonNegative | None = None  # whatever the running one takes
    probation_predictions: Annotated[int, Meta(ge=1)] = 20
    probation_s: NonNegative = 60.0


class Examination(Struct, frozen=True, kw_only=True):
    """reason: why the new bundle must not answer; empty: it may. before: None where nothing answered.

    warning: why it was measured on no samples though there is a file of them.
    """

    reason: str
    before: Quality | None = None
    now: Quality | None = None
    warning: str = ""


def verdict(before: Measured | None, now: Measured, limits: Limits) -> str:
    """Why the new bundle must not answer, or "".

    Its accuracy may fall by `accuracy_drop`, or by one standard error of the difference where that is more (of the
    differences per sample: the samples are the same); a single sample decides nothing. All samples count, sensitive
    ones too, and the running bundle may have learned from them: the verdict is told, and so names no figure.
    """
    if not now.finite:
        return "not-finite: it puts out numbers that are not finite on this device's samples"
    latency = now.quality.latency_ms or 0.0
    allowed = allowed_ms(None if before is None else before.quality, limits)
    if allowed is not None and latency > allowed:
        return "latency: it takes longer for a sample than this device allows"
    if before is None:
        return ""
    if before.correct is not None and now.correct is not None and len(now.correct):
        difference = before.correct.astype(np.float64) - now.correct
        error = float(difference.std() / np.sqrt(len(difference)))
        if difference.sum() > 1 and difference.mean() > max(limits.accuracy_drop, error):
            return "accuracy: the running bundle has a higher one on this device's samples"
    return ""


def allowed_ms(before: Quality | None, limits: Limits) -> float | None:
    """Median latency of single samples that a new bundle may have, given that of the running one; None: any."""
    bounds = [] if limits.latency_ms is None else [limits.latency_ms]
    if before is not None and before.latency_ms is not None:
        bounds.append(limits.latency_ratio * before.latency_ms + limits.latency_slack_ms)
    return min(bounds, default=None)


def examine(
    running: Path | None,
    staged: Path,
    home: Path,
    limits: Limits,
    how: How = How(),
) -> Examination:
    """Measure and compare in a child process, in the way that is to answer; what goes wrong is a reason."""
    try:
        found = child.call(
            "deploy.examination:examined",
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


def examined(running: Path | None, staged: Path, home: Path, limits: Limits, how: How) -> Examination:
    """`examine` in this process."""
    try:
        new = load_update(staged, how, again=True)
        validation, warning = _samples(home, new.task)
        now = measure(new, validation)
    except (FedgeError, OSError) as error:
        return Examination(reason=f"smoke-test: {error}"[:500])
    before = None
    if running is not None:
        try:
            before = measure(load_update(running, how, again=True), validation)
        except (FedgeError, OSError):  # a running bundle that is broken is no yardstick
            before = None
    return Examination(
        reason=verdict(before, now, limits),
        before=None if before is None else before.quality,
        now=now.quality,
        warning=warning,
    )


def _samples(home: Path, task: TaskSpec) -> tuple[Validation, str]:
    """What there is to measure on; a file that is damaged is none, or no release would ever be good enough here."""
    try:
        return load_validation(home, task), ""
    except ConfigError as error:
        return Validation(np.zeros((0, *task.input_shape), np.float32), None), str(error)
