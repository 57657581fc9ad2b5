"""Decides how far a release may go, from the devices' reports alone.

A rollout goes through stages, each with a larger share of the fleet. The next stage begins when every present device of
the stage has served the release for a soak time and no measurement objects; otherwise the rollout is aborted, and its
devices revert. Everything here is a pure function; `service` acts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Final

from msgspec import Meta, Struct
from msgspec.structs import replace

from fedge.wire.messages import (
    Count,
    Digest,
    FileRef,
    Health,
    Id,
    NonNegative,
    Phase,
    Quality,
    Rollout,
    RolloutState,
    Share,
    Text,
)
from fedge.wire.rollout import compute_place, takes_part

MAX_REASONS: Final = 10
"""Most devices named when a rollout is aborted."""


MINIMUM_S: Final = 2.0
"""Time after which all messages sent before an abort have arrived."""


class Plan(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A release to roll out, and the limits that stop it.

    The first stage is that of the canaries. With named canaries its share is 0.
    """

    id: Id
    target: Text
    release: Count
    digest: Digest  # digest of the manifest
    canaries: tuple[Id, ...] = ()
    stages: Annotated[tuple[Share, ...], Meta(min_length=1)] = (0.1, 0.5, 1.0)
    soak_s: NonNegative = 60.0  # how long all must be well before the next stage
    absent_s: NonNegative = 600.0  # devices of which nothing is heard are not waited for after this time
    fewest: Annotated[int, Meta(ge=1)] = 1  # present devices in the first stage, but no more than half of them
    max_failures: Share = 0.05  # share of a stage's devices on which the release may be broken, slow or rolled back
    max_worse: Share = 0.5  # share of a stage's devices that may keep their present bundle because it is better
    accuracy_drop: NonNegative = 0.01  # mean over the devices that run it; more if few samples make it uncertain
    latency_ratio: NonNegative = 1.5  # ratio of the mean latencies
    latency_slack_ms: NonNegative = 1.0  # allowed in addition to the ratio
    free_energy_shift: NonNegative = 1.0  # mean, in deviations of the bundles' validation samples
    gate_entropy_shift: NonNegative = 0.3  # mean, as a share of the largest that is possible
    temperature_c: float = 85.0  # mean over the devices that run it


class Progress(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The state of a rollout. began: start of the stage, its resumption or its end; good_since: all is well since."""

    state: RolloutState = RolloutState.RUNNING
    stage: Count = 0
    share: Share = 0.0
    began: NonNegative
    good_since: NonNegative | None = None
    reasons: tuple[str, ...] = ()


class DeviceHealth(Struct, frozen=True, kw_only=True):
    """A device's last health message, and its time by our clock."""

    health: Health
    at: float


def decide(plan: Plan, progress: Progress, fleet: Mapping[str, DeviceHealth], now: float) -> Progress:
    """Return the rollout's next state: unchanged, one stage further, done, or aborted with the reasons.

    Args:
        plan: the release and its limits.
        progress: the present state.
        fleet: each device's last message, by its id.
        now: seconds since the epoch.
    """
    progress = _limit_times(now, progress)
    if progress.state is not RolloutState.RUNNING:
        return progress
    progress = replace(progress, share=compute_share(plan, progress, fleet, now))
    reasons = list_objections(plan, progress, fleet)
    if reasons:
        return abort(progress, reasons, now)
    if not _is_stage_healthy(plan, progress, fleet, now):
        return replace(progress, good_since=None)
    good_since = now if progress.good_since is None else progress.good_since
    if now - good_since < plan.soak_s:
        return replace(progress, good_since=good_since)
    if progress.stage + 1 == len(plan.stages):
        return replace(progress, state=RolloutState.DONE, good_since=good_since)
    further = replace(progress, stage=progress.stage + 1, began=now, good_since=None)
    return replace(further, share=compute_share(plan, further, fleet, now))


def _limit_times(now: float, progress: Progress) -> Progress:
    """Limit recorded times to now, so that a clock set back does not delay the rollout."""
    since = progress.good_since
    return replace(progress, began=min(progress.began, now), good_since=None if since is None else min(since, now))


def abort(progress: Progress, reasons: Sequence[str], now: float) -> Progress:
    """Abort the rollout, after which devices revert."""
    return replace(progress, state=RolloutState.ABORTED, began=now, reasons=tuple(reasons[:MAX_REASONS]))


def compute_share(plan: Plan, progress: Progress, fleet: Mapping[str, DeviceHealth], now: float) -> float:
    """Return the stage's share, enlarged until `plan.fewest` present devices take part, since few prove little.

    These are at most half of the present devices, and at least one.

    A device that disappeared while running the release counts as present, so that no other is put at risk instead.
    """
    share = max(plan.stages[progress.stage], progress.share)
    there = [
        device
        for device, seen in fleet.items()
        if is_running(plan, seen.health) or not _is_absent(plan, progress, seen, now)
    ]
    if plan.canaries or not there:
        return share
    n = max(1, min(plan.fewest, len(there) // 2))
    last = sorted(compute_place(plan.id, device) for device in there)[n - 1]
    return share if last < share else math.nextafter(last, 1.0)


def make_message(plan: Plan, progress: Progress, metadata: Mapping[str, FileRef]) -> Rollout:
    """Make the announcement to the fleet."""
    return Rollout(
        id=plan.id,
        state=progress.state,
        target=plan.target,
        release=plan.release,
        canaries=plan.canaries,
        share=progress.share,
        metadata=dict(metadata),
    )


def list_members(plan: Plan, progress: Progress, fleet: Mapping[str, DeviceHealth]) -> list[str]:
    """List the devices that take part at this stage, by ascending id."""
    rollout = make_message(plan, progress, {})
    return [device for device in sorted(fleet) if takes_part(rollout, device)]


def is_running(plan: Plan, health: Health) -> bool:
    """Return whether the device serves the release, on trial or for good."""
    return health.bundle_digest == plan.digest


def list_objections(plan: Plan, progress: Progress, fleet: Mapping[str, DeviceHealth]) -> list[str]:
    """List the reasons against continuing the rollout; empty without any."""
    healths = {device: fleet[device].health for device in sorted(fleet)}
    n = len(list_members(plan, progress, fleet))
    failed = [describe_verdict(device, health) for device, health in healths.items() if _has_failed(plan, health)]
    kept = [describe_verdict(device, health) for device, health in healths.items() if has_kept(plan, health)]
    return [
        *(failed if len(failed) > plan.max_failures * n else []),
        *(kept if len(kept) > plan.max_worse * n else []),
        *_compare_quality(plan, [*healths.values()]),
    ]


def describe_verdict(device: str, health: Health) -> str:
    """Describe why a device does not run the release, with the accuracies if it has reported them."""
    verdict = "kept its own" if health.phase is Phase.KEPT else health.phase
    return f"{device} {verdict}: {health.reason}{_format_loss(health.before, health.now)}"


def _format_loss(was: Quality | None, now: Quality | None) -> str:
    if was is None or now is None or was.accuracy is None or now.accuracy is None or now.accuracy >= was.accuracy:
        return ""
    return f" ({now.accuracy:.2f} < {was.accuracy:.2f} on {now.n} samples)"


def _compare_quality(plan: Plan, healths: list[Health]) -> list[str]:
    """Compare the mean measurements of the devices that run the release with those before it."""
    there = [health for health in healths if is_running(plan, health) and health.rollout == plan.id]
    pairs = [(h.before, h.now) for h in there if h.before is not None and h.now is not None]
    found = []
    accuracy = _compute_means(pairs, lambda quality: quality.accuracy)
    if accuracy is not None and accuracy[0] - accuracy[1] > max(plan.accuracy_drop, _estimate_accuracy_error(pairs)):
        found.append(f"score: {accuracy[1]:.3f} on average, {accuracy[0]:.3f} before")
    latency = _compute_means(pairs, lambda quality: quality.latency_ms)
    if latency is not None and latency[1] > plan.latency_ratio * latency[0] + plan.latency_slack_ms:
        found.append(f"latency: {latency[1]:.2f} ms on average, {latency[0]:.2f} ms before")
    free = _compute_means(pairs, lambda quality: quality.free_energy)
    if free is not None and abs(free[1] - free[0]) > plan.free_energy_shift:
        found.append(f"free energy: {free[1]:.2f} on average, {free[0]:.2f} before")
    entropy = _compute_means(pairs, lambda quality: quality.gate_entropy)
    if entropy is not None and abs(entropy[1] - entropy[0]) > plan.gate_entropy_shift:
        found.append(f"gate entropy: {entropy[1]:.2f} on average, {entropy[0]:.2f} before")
    warm = [health.temperature_c for health in there if health.temperature_c is not None]
    if warm and sum(warm) / len(warm) > plan.temperature_c:
        found.append(f"temperature: {sum(warm) / len(warm):.0f} C on average")
    return found


def _compute_means(
    pairs: list[tuple[Quality, Quality]], of: Callable[[Quality], float | None]
) -> tuple[float, float] | None:
    """Compute the mean before and now over the devices that measured both."""
    both = [(was, now) for was, now in ((of(a), of(b)) for a, b in pairs) if was is not None and now is not None]
    if not both:
        return None
    return sum(was for was, _ in both) / len(both), sum(now for _, now in both) / len(both)


def _estimate_accuracy_error(pairs: list[tuple[Quality, Quality]]) -> float:
    """Estimate an upper bound for the standard error of the mean difference of accuracy over devices.

    If the two bundles, each right with probability p, err independently, a device with n samples has the variance
    2 p (1 - p) / n. A score that is no share counts as if it varied as much as a share can.
    """
    variances = []
    for was, now in pairs:
        if was.accuracy is not None and now.accuracy is not None:
            p = (was.accuracy + now.accuracy) / 2
            variances.append(2 * (p * (1 - p) if 0 <= p <= 1 else 0.25) / max(now.n, 1))
    return math.sqrt(sum(variances)) / max(len(variances), 1)


def _has_failed(plan: Plan, health: Health) -> bool:
    return health.rollout == plan.id and health.phase in {Phase.REFUSED, Phase.ROLLED_BACK}


def has_kept(plan: Plan, health: Health) -> bool:
    """Return whether the device has examined the release, and kept its present bundle as the more accurate one."""
    return health.rollout == plan.id and health.phase is Phase.KEPT


def _awaits_signatures(plan: Plan, health: Health) -> bool:
    """Return whether a device would take the release if only its metadata were signed again."""
    return _has_failed(plan, health) and health.phase is Phase.REFUSED and health.reason.startswith("expired")


def _is_on_its_way(plan: Plan, health: Health) -> bool:
    """Return whether the device may be running the release by the time it learns of an end."""
    return health.rollout == plan.id and health.phase is Phase.FETCHING


def _is_absent(plan: Plan, progress: Progress, seen: DeviceHealth, now: float) -> bool:
    """Return whether to stop waiting for a device that was not heard of for too long or could not fetch the release."""
    if _is_settled(plan, seen.health):
        return False
    heard = progress.began if seen.health.phase is Phase.FAILED else max(progress.began, seen.at)
    return now - heard > plan.absent_s


def _is_stage_healthy(plan: Plan, progress: Progress, fleet: Mapping[str, DeviceHealth], now: float) -> bool:
    """Return whether all present devices of the stage serve the release for good or kept their own, at least one."""
    waited_for = [
        fleet[device].health
        for device in list_members(plan, progress, fleet)
        if not _is_absent(plan, progress, fleet[device], now) and not _has_failed(plan, fleet[device].health)
    ]
    return bool(waited_for) and all(_is_settled(plan, health) for health in waited_for)


def _is_settled(plan: Plan, health: Health) -> bool:
    return has_kept(plan, health) or (is_running(plan, health) and health.phase is Phase.SERVING)


def is_over(plan: Plan, progress: Progress, fleet: Mapping[str, DeviceHealth], now: float) -> bool:
    """Return whether no device is left to update or revert."""
    if progress.state is RolloutState.DONE:
        return all(
            (_has_failed(plan, seen.health) and not _awaits_signatures(plan, seen.health))
            or _is_settled(plan, seen.health)
            for seen in fleet.values()
        )
    if progress.state is RolloutState.ABORTED:
        since = now - progress.began
        busy = any(is_running(plan, s.health) or _is_on_its_way(plan, s.health) for s in fleet.values())
        return since > plan.absent_s or (since >= MINIMUM_S and not busy)
    return False
