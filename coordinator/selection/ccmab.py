"""CICS: which devices of a cluster train in a round, by a contextual combinatorial bandit (CCMAB) under a deadline.

Source: Tang et al., "FedEPC", CMC 85(2), 2025, equations (9)-(12); specification docs/methods/fedepc.md. The model of
rewards is in `coordinator.selection.reward_model`. Departures: the deadline holds for each device separately (5.2), and
no device starves (5.5). kappa is measured once any device has answered (5.2), because a guess that is off by orders of
magnitude would make all new devices feasible, or none. A failed device counts as needing twice the deadline until it
answers again; otherwise a fast device that stops answering would always be feasible. Rule 5.5 still asks a failed
device now and then.

State is a frozen value: `select(state, ...) -> (Selection, state)`, then `observe(state, ...) -> state`. Nothing is
random here. Devices are ordered by ascending id; values closer than 1e-12 tie, and the lowest id wins.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, TypeGuard

import msgspec
import numpy as np
from msgspec import Struct

from coordinator.selection.reward_model import TIE, Vectors, compute_exploration, compute_posterior, select_greedily
from fedge.wire.messages import MAX_LEFT_S

RawContext = tuple[float, float, float, float, float]

FEATURES: Final = 5  # f GHz, free memory GB, samples, mean gradient norm, mean loss drop
DEADLINE_QUANTILE: Final = 0.7  # of the predicted times in a cluster
FAILED: Final = -1.0  # reward

# section 7, with the symbols of the specification
CYCLES_PER_SAMPLE: Final = 0.1  # kappa before any device has been measured, gigacycles
WINDOW: Final = 5  # tau, participations
HISTORY: Final = 100  # observations
MAX_SKIPS: Final = 3  # rounds in a row


class Arm(Struct, frozen=True, kw_only=True):
    """A device of the cluster in its present state; values are None if unknown.

    `work`: samples per round, E * n_i. `model_bytes`: B, size of the model that the device would be sent.
    """

    id: str
    n_samples: int
    work: float
    cpu_ghz: float | None = None
    free_ram_gb: float | None = None
    link_mbit_s: float | None = None
    model_bytes: int = 0


class Participation(Struct, frozen=True, kw_only=True):
    """The result of a participation. `loss_drop`: of the mean loss over D_L in training; `seconds`: with transfer."""

    gradient_norm: float
    loss_drop: float
    seconds: float


class State(Struct, frozen=True, kw_only=True):
    """The bandit of one cluster. Contexts are stored raw, and normalised again with the current ranges.

    `round` counts all rounds of the cluster, `selections` the rounds that were not skipped (t), `skipped` the last
    rounds skipped in a row. `last_asked`: the round of each device's last selection.
    """

    round: int = 0
    selections: int = 0
    skipped: int = 0
    lowest: tuple[float, ...] = (math.inf,) * FEATURES
    highest: tuple[float, ...] = (-math.inf,) * FEATURES
    contexts: tuple[RawContext, ...] = ()
    rewards: tuple[float, ...] = ()
    participations: dict[str, tuple[Participation, ...]] = {}
    last_asked: dict[str, int] = {}
    at_least: dict[str, float] = {}  # seconds that a failed device is assumed to need, until it answers
    learned: bytes = b""  # what a rule that learns knows (`coordinator.selection.contract`)


@dataclass(frozen=True, slots=True)
class Selection:
    """The devices that train. `ids`: ascending, empty in a skipped round; `overdue`: the devices included by 5.5.

    `contexts`: raw, of the chosen devices. `seconds`: predicted time of every selectable device. `deadline_s`: None if
    no device is selectable. `estimates`: of every selectable device, the expected reward mean_i and the exploration
    bonus sqrt(beta cov_ii), the terms of (11) for a device alone; empty if a rule chose. `learn`: (the outcomes, as
    `observe` gets them) -> what a rule that learns then knows.
    """

    ids: tuple[str, ...]
    overdue: tuple[str, ...]
    contexts: dict[str, RawContext]
    seconds: dict[str, float]
    deadline_s: float | None
    estimates: dict[str, tuple[float, float]]
    learn: Callable[[Mapping[str, Participation | None]], bytes] | None = None


# ------------------------------------------------------------------------------------------------ 5.1: contexts


def collect_contexts(arms: Sequence[Arm], participations: Mapping[str, Sequence[Participation]]) -> Vectors:
    """Collect raw contexts [f, m, n, gbar, dbar], (9): (n, 5), NaN where a value is missing or not finite."""
    rows = []
    for arm in arms:
        past = participations.get(arm.id, ())
        rows.append(
            [
                math.nan if arm.cpu_ghz is None else arm.cpu_ghz,
                math.nan if arm.free_ram_gb is None else arm.free_ram_gb,
                float(arm.n_samples),
                float(np.mean([p.gradient_norm for p in past])) if past else math.nan,
                float(np.mean([p.loss_drop for p in past])) if past else math.nan,
            ]
        )
    raw = np.array(rows, np.float64).reshape(len(rows), FEATURES)
    return np.where(np.isfinite(raw), raw, np.nan)


def fill_missing(raw: Vectors) -> Vectors:
    """Fill missing entries with the mean over the devices that have one; 0 if none has. (n, 5) -> (n, 5)."""
    known = np.isfinite(raw)
    counts = known.sum(axis=0)
    means = np.where(known, raw, 0.0).sum(axis=0) / np.maximum(counts, 1)
    return np.where(known, raw, means)


def normalise(raw: Vectors, lowest: Sequence[float], highest: Sequence[float]) -> Vectors:
    """Normalise contexts, clip((raw - lo) / (hi - lo), 0, 1), (n, 5); 0.5 for a constant or never seen feature."""
    lo, hi = np.asarray(lowest), np.asarray(highest)
    varies = hi - lo > TIE
    span = np.where(varies, hi - lo, 1.0)
    return np.where(varies, np.clip((raw - np.where(varies, lo, 0.0)) / span, 0.0, 1.0), 0.5)


# ------------------------------------------------------------------------------ 5.2: time, deadline, number


def estimate_transfer(arm: Arm) -> float:
    """Estimate 2 B / r_i, the seconds for sending the model there and back; 0 if the link rate is unknown."""
    rate = arm.link_mbit_s or 0.0
    return 2 * 8e-6 * arm.model_bytes / rate if rate > 0 else 0.0


def predict_seconds(arm: Arm, cpu_ghz: float, past: Sequence[Participation], cycles_per_sample: float) -> float:
    """Predict t_i = E n_i kappa / f_i + 2 B / r_i, seconds; or the mean of the device's own last tau times.

    A measured time runs from an order to its answer, so it includes the transfer. The result is at most a day, the
    longest time of an order, so that absurd rates of some devices do not make the quantile of all infinite or NaN.

    `cpu_ghz`: f_i with missing values filled; 0 if no device of the cluster reports its clock, which drops the first
    term.

    Example:
        >>> arm = Arm(id="a", n_samples=100, work=5 * 100, link_mbit_s=10.0, model_bytes=150_000)
        >>> round(predict_seconds(arm, 3.0, (), 0.02), 6)
        3.573333
    """
    if past:
        return min(float(np.mean([p.seconds for p in past])), MAX_LEFT_S)
    return min((arm.work * cycles_per_sample / cpu_ghz if cpu_ghz > 0 else 0.0) + estimate_transfer(arm), MAX_LEFT_S)


def estimate_cycles(
    arms: Sequence[Arm], cpu_ghz: Vectors, participations: Mapping[str, Sequence[Participation]]
) -> float:
    """Estimate kappa, the median over devices of (mean seconds - transfer) * f_i / work; a guess if none has answered.

    `cpu_ghz`: (n,) f_i of each arm, missing values filled.
    """
    found = [
        max(0.0, float(np.mean([p.seconds for p in participations[arm.id]])) - estimate_transfer(arm)) * f / arm.work
        for arm, f in zip(arms, cpu_ghz.tolist(), strict=True)
        if participations.get(arm.id) and arm.work > 0 and f > 0
    ]
    return float(np.median(found)) if found else CYCLES_PER_SAMPLE


def compute_quota(share: float, n_devices: int) -> int:
    """Compute the number of devices m = max(1, ceil(rho_c N_k - 1e-9)); 0 for an empty cluster."""
    return max(1, math.ceil(share * n_devices - 1e-9)) if n_devices else 0


# -------------------------------------------------------------------------------------- 5.4 and 5.5: the choice


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The settings of a bandit, as methods set them.

    Attributes:
        quota: rho_c in (0, 1], share of a cluster that trains in a round.
        deadline_s: T_max; the 0.7-quantile of the predicted times if None.
        budget_s: largest sum of t_i of a cohort (5.2); overdue devices are asked regardless.
        fairness: whether rule 5.5 holds.
        search: the algorithm that finds the cohort (5.4).
    """

    quota: float = 0.2
    deadline_s: float | None = None
    budget_s: float | None = None
    fairness: bool = True
    search: Callable[..., list[int]] = select_greedily


def find_overdue(waits: Sequence[int], m: int, n_devices: int) -> list[int]:
    """Find the devices, at most ceil(m/4), that waited for more than F = ceil(2 N_k / m) rounds, oldest first (5.5).

    Returns positions. `waits`: rounds since each selectable device's last participation, by ascending id.
    """
    limit = math.ceil(2 * n_devices / m)
    waiting = [i for i, wait in enumerate(waits) if wait > limit]
    return sorted(waiting, key=lambda i: -waits[i])[: math.ceil(m / 4)]


Rule = Callable[[Sequence[str], int, Mapping[str, float]], Sequence[str]]
"""A rule in place of the bandit's choice: (feasible devices' ids, n, their predicted seconds) -> at most n of them."""


def select(
    state: State, arms: Sequence[Arm], settings: Settings, *, size: int | None = None, rule: Rule | None = None
) -> tuple[Selection, State]:
    """Choose the devices of one cluster for its next round.

    Args:
        state: the cluster's bandit.
        arms: all reachable devices of the cluster. A device with f <= 0 or no samples is not selectable.
        settings: the parameters.
        size: m >= 1, in place of the quota.
        rule: chooses among the feasible devices in place of the bandit; deadline and fairness still apply, a budget
            does not.

    Returns:
        The selection, and the state in which this round was held; pass the latter to `observe`.

    Cost: O(h^3 + N_k h^2 + m N_k h) time, O(N_k h) memory, h <= 100.
    """
    arms = sorted(arms, key=lambda arm: arm.id)
    raw = collect_contexts(arms, state.participations)
    full = fill_missing(raw)
    state = msgspec.structs.replace(
        state,
        round=state.round + 1,
        lowest=tuple(np.fmin.reduce([*raw, state.lowest]).tolist()),
        highest=tuple(np.fmax.reduce([*raw, state.highest]).tolist()),
    )
    cycles = estimate_cycles(arms, full[:, 0], state.participations)
    able = [arm.n_samples >= 1 and (arm.cpu_ghz is None or not arm.cpu_ghz <= 0) for arm in arms]
    selectable = np.flatnonzero(able).tolist()
    ids = [arms[i].id for i in selectable]
    predicted = [
        predict_seconds(arms[i], float(full[i, 0]), state.participations.get(arms[i].id, ()), cycles)
        for i in selectable
    ]
    seconds = np.array([max(t, state.at_least.get(i, 0.0)) for i, t in zip(ids, predicted, strict=True)])
    m = compute_quota(settings.quota, len(arms)) if size is None else size
    waits = [state.round - state.last_asked.get(i, 0) for i in ids]
    late = find_overdue(waits, m, len(arms)) if settings.fairness and ids else []
    deadline = settings.deadline_s
    if deadline is None and ids:
        deadline = float(np.quantile(seconds, DEADLINE_QUANTILE))
    feasible = [] if deadline is None else np.flatnonzero(seconds <= deadline * (1 + TIE)).tolist()
    estimates: dict[str, tuple[float, float]] = {}
    if rule is not None and (late or feasible):
        others = {ids[i]: float(seconds[i]) for i in feasible if i not in late}
        chosen = [*late, *(ids.index(i) for i in rule(list(others), m - len(late), others))]
    elif late or feasible:
        chosen, terms = _choose(state, full[selectable], seconds, late=late, feasible=feasible, m=m, settings=settings)
        estimates = dict(zip(ids, terms, strict=True))
    else:
        chosen = []
    if ids and not chosen and state.skipped >= MAX_SKIPS:
        chosen = [int(np.argmin(seconds))]
    picked = sorted(ids[i] for i in chosen)
    selection = Selection(
        ids=tuple(picked),
        overdue=tuple(sorted(ids[i] for i in late)),
        contexts={ids[i]: _make_context(full[selectable[i]]) for i in sorted(chosen)},
        seconds=dict(zip(ids, seconds.tolist(), strict=True)),
        deadline_s=deadline,
        estimates=estimates,
    )
    return selection, msgspec.structs.replace(
        state,
        selections=state.selections + bool(chosen),
        skipped=0 if chosen else state.skipped + 1,
        last_asked=state.last_asked | dict.fromkeys(picked, state.round),
    )


def _make_context(row: Vectors) -> RawContext:
    f, memory, n, gradient, drop = row.tolist()
    return f, memory, n, gradient, drop


def _choose(
    state: State,
    full: Vectors,
    seconds: Vectors,
    *,
    late: list[int],
    feasible: list[int],
    m: int,
    settings: Settings,
) -> tuple[list[int], list[tuple[float, float]]]:
    """Choose devices; return their positions, and the terms of every device's own score."""
    seen = normalise(np.array(state.contexts).reshape(-1, FEATURES), state.lowest, state.highest)
    x = normalise(full, state.lowest, state.highest)
    of = compute_posterior(x, seen, np.array(state.rewards))
    beta = compute_exploration(state.selections + 1)
    budget_s = math.inf if settings.budget_s is None else settings.budget_s
    among = {"first": late, "allowed": feasible, "size": m, "seconds": seconds, "budget_s": budget_s}
    chosen = settings.search(of.mean, of.variance, of.compute_column, beta, **among)
    bonus = np.sqrt(beta * np.maximum(of.variance, 0.0))
    return chosen, [*zip(of.mean.tolist(), bonus.tolist(), strict=True)]


# ----------------------------------------------------------------------------------------- 5.3: what is observed


def compute_reward(outcome: Participation | None) -> float:
    """Compute r_i = clip(loss drop, -1, 1); -1 for a failed device or a non-finite result."""
    return min(1.0, max(-1.0, outcome.loss_drop)) if _has_succeeded(outcome) else FAILED


def _has_succeeded(outcome: Participation | None) -> TypeGuard[Participation]:
    return outcome is not None and all(map(math.isfinite, msgspec.structs.astuple(outcome)))


def observe(state: State, selection: Selection, outcomes: Mapping[str, Participation | None]) -> State:
    """Return the bandit after a round.

    Args:
        state: the state that `select` returned.
        selection: the selection that `select` returned.
        outcomes: of the chosen devices; None if the device failed or timed out. A device that is missing declined, and
            nothing is learned about it.
    """
    participants = [i for i in selection.ids if i in outcomes]
    deadline_s = math.inf if selection.deadline_s is None else selection.deadline_s
    participations = dict(state.participations)
    at_least = {i: seconds for i, seconds in state.at_least.items() if i not in participants}
    for i in participants:
        outcome = outcomes[i]
        if not _has_succeeded(outcome):
            at_least[i] = 2 * (deadline_s if math.isfinite(deadline_s) else selection.seconds[i])
        else:
            participations[i] = (*participations.get(i, ()), outcome)[-WINDOW:]
    return msgspec.structs.replace(
        state,
        contexts=(*state.contexts, *(selection.contexts[i] for i in participants))[-HISTORY:],
        rewards=(*state.rewards, *(compute_reward(outcomes[i]) for i in participants))[-HISTORY:],
        participations=participations,
        at_least=at_least,
        learned=selection.learn({i: outcomes[i] for i in participants}) if selection.learn else state.learned,
    )
