"""Selections of who trains in a round: uniform, stratified, fastest, `ccmab` (a bandit), or a rule of one's own.

A method without clusters calls `draw_uniform` or `select_fastest` itself. A method with clusters calls `choose`, which
finds all rules by entry point (`contract.GROUP`). Deadline and overdue devices (FedEPC sections 5.2 and 5.5) always
follow the bandit's settings, so that selections differ only in the choice. `ccmab` itself chooses if no rule does.

Source: uniform: McMahan et al., "Communication-Efficient Learning of Deep Networks from Decentralized Data", AISTATS
2017, Algorithm 1; size of the cohort and stratified: Yang et al., "Cluster Federated Learning with Intra-Cluster
Correction" (CFIC), CMC 2025, Algorithm 1; docs/methods/cfic.md, section 5. Departure: the count per cluster is max, not
min, of 1 and the share; with fewer picks than clusters, clusters take turns (section 9, point 2). Fastest: a baseline
(docs/methods/fedepc.md, section 8.3), not a recommendation, since rounds are short but slow devices never train.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Final, cast

import numpy as np
from numpy.typing import NDArray

from coordinator.selection import ccmab
from coordinator.selection.contract import Candidates, Draw, Rule, draw_positions, load_rule

OURS: Final = ("ccmab", "uniform", "fastest", "stratified")
BANDIT: Final[object] = ccmab.select
"""The bandit, which the entry point ccmab names. It chooses by itself unless a rule chooses."""


def compute_cohort_size(n_clients: int, share: float) -> int:
    """Compute n_s = min(K, max(1, floor(K gamma + 0.5 + 1e-9))), K gamma rounded half up; 0 if K = 0.

    Args:
        n_clients: K >= 0.
        share: gamma, in (0, 1].

    Example:
        >>> [compute_cohort_size(n, 0.3) for n in (0, 1, 5, 100)]
        [0, 1, 2, 30]
    """
    return min(n_clients, max(1, math.floor(n_clients * share + 0.5 + 1e-9)))


def draw_uniform(ids: Sequence[str], n: int, rng: np.random.Generator) -> list[str]:
    """Draw min(n, len(ids)) different clients, uniformly without replacement; by ascending id."""
    return sorted(rng.permutation(ids)[:n].tolist()) if ids else []


def draw_stratified(
    clusters: Mapping[int, Sequence[str]],
    n: int,
    rng: np.random.Generator,
    *,
    others: Sequence[str] = (),
    last_visit: Mapping[int, int],
) -> list[str]:
    """Draw min(n, number of clients) different clients, uniformly without replacement in each cluster; ascending ids.

    With n >= m clusters: base_i = min(|G_i|, floor(n/m)) from each cluster, the rest from all clients not drawn yet.
    With n < m: one client each from the n clusters visited longest ago, ties at random. Without clusters: n of
    `others`.

    Args:
        clusters: G_i by key, ascending; members by ascending id, every client in at most one; none is empty.
        n: n_s >= 0.
        rng: random numbers of this round.
        others: clients without a cluster, by ascending id; only the rest is drawn from them, too.
        last_visit: by key, the last round in which a member was drawn; a cluster without an entry was never visited.
    """
    m = len(clusters)
    if n < m:
        order = rng.permutation(sorted(clusters)).tolist()
        chosen = sorted(order, key=lambda key: last_visit.get(key, 0))[:n]  # stable: ties stay at random
        return sorted(i for key in sorted(chosen) for i in draw_uniform(clusters[key], 1, rng))
    base = [i for key in sorted(clusters) for i in draw_uniform(clusters[key], n // m, rng)]
    drawn = set(base)
    rest = sorted(i for pool in (*clusters.values(), others) for i in pool if i not in drawn)
    return sorted(base + draw_uniform(rest, n - len(base), rng))


def select_fastest(ids: Sequence[str], n: int, seconds: Mapping[str, float], cpu_ghz: Mapping[str, float]) -> list[str]:
    """Select the min(n, len(ids)) devices with the shortest rounds; by ascending id, the lowest id on a tie.

    A device that was never measured is assumed to need c / f seconds. c is the median cycles of the measured devices (1
    if none was measured), f the device's clock. Devices with an unknown clock come after all these, and devices
    that did not answer their last order (infinity) come last.

    Args:
        ids: the devices to choose from.
        n: >= 0.
        seconds: time of each device's last round, >= 0, if there was one; infinity if the device did not answer.
        cpu_ghz: clock f of each device, > 0, if known.

    Example:
        >>> select_fastest(["a", "b", "c"], 2, {"a": 9.0, "b": 4.0}, {"a": 1.0, "b": 2.0, "c": 4.0})
        ['b', 'c']
    """
    cycles = [seconds[i] * cpu_ghz[i] for i in ids if i in cpu_ghz and math.isfinite(seconds.get(i, math.inf))]
    typical = float(np.median(cycles)) if cycles else 1.0

    def make_sort_key(device: str) -> tuple[bool, float, str]:
        guess = typical / cpu_ghz[device] if device in cpu_ghz else math.inf
        return seconds.get(device) == math.inf, seconds.get(device, guess), device

    return sorted(sorted(ids, key=make_sort_key)[:n])


def choose(
    how: str,
    arms: Mapping[int, Sequence[ccmab.Arm]],
    bandits: Mapping[int, ccmab.State],
    settings: ccmab.Settings,
    *,
    seed: tuple[int, ...],
    last_visit: Mapping[int, int],
) -> dict[int, tuple[ccmab.Selection, ccmab.State]]:
    """Choose devices in each cluster; return, by cluster, the choice and the bandit in which this round was held.

    Args:
        how: a selection by name or path (`coordinator.selection.contract.load_rule`). `ccmab`, `uniform` and `fastest`
            choose the quota of every cluster; `stratified` draws about equally many devices from each cluster, in all
            the sum of the quotas (CFIC section 5).
        arms: the reachable devices of each cluster, by its number >= 0.
        bandits: the bandit of each cluster; other selections use only the times and waits that the bandits know.
        settings: the settings of the bandits.
        seed: the seed of the round; every cluster has separate random numbers.
        last_visit: last round in which a device of the cluster was chosen (or any number that grows with it).

    Raises:
        ConfigError: there is no such selection, or it fails, or it chooses devices that it may not choose.
    """
    rule = load_rule(how)
    sizes: Mapping[int, int | None] = dict.fromkeys(arms)
    if isinstance(rule, Rule) and rule.CLUSTERS:
        present = {k: [arm.id for arm in of_cluster] for k, of_cluster in arms.items() if of_cluster}
        size = compute_cohort_size(sum(map(len, present.values())), settings.quota)
        sizes = rule.divide_cohort(present, size, np.random.default_rng(seed), last_visit)
    if rule is BANDIT:
        return {k: ccmab.select(bandits[k], arms[k], settings, size=size) for k, size in sizes.items()}
    return {
        k: _choose_by_rule(how, rule, arms[k], bandits[k], settings, size, np.random.default_rng((*seed, k)))
        for k, size in sizes.items()
    }


def _choose_by_rule(
    how: str,
    found: Draw | Rule,
    arms: Sequence[ccmab.Arm],
    bandit: ccmab.State,
    settings: ccmab.Settings,
    size: int | None,
    rng: np.random.Generator,
) -> tuple[ccmab.Selection, ccmab.State]:
    """Choose by a rule other than the bandit, in one cluster."""
    rule = found.load(bandit.learned) if isinstance(found, Rule) else None
    draw = rule.select if rule is not None else cast("Draw", found)

    def apply_rule(ids: Sequence[str], n: int, seconds: Mapping[str, float]) -> list[str]:
        devices = _make_candidates(ids, seconds, arms, bandit)
        return [ids[i] for i in draw_positions(how, lambda: draw(devices, n, rng), len(ids), n)] if n > 0 else []

    selection, held = ccmab.select(bandit, arms, settings, size=size, rule=apply_rule)
    return selection if rule is None else replace(
        selection, learn=lambda outcomes: rule.encode_after(how, outcomes)
    ), held


def _make_candidates(
    ids: Sequence[str], seconds: Mapping[str, float], arms: Sequence[ccmab.Arm], bandit: ccmab.State
) -> Candidates:
    """Return the devices `ids` of a cluster, as rules see them."""
    own = {arm.id: arm for arm in arms}
    past = [bandit.participations.get(i, ()) for i in ids]

    def read_known(name: str) -> NDArray[np.float64]:
        return np.array([getattr(own[i], name) for i in ids], np.float64)  # None becomes NaN

    def compute_mean(name: str) -> NDArray[np.float64]:
        return np.array([sum(getattr(p, name) for p in each) / len(each) if each else np.nan for each in past])

    return Candidates(
        ids=tuple(ids),
        n_samples=np.array([own[i].n_samples for i in ids], np.int64),
        seconds=np.array([seconds[i] for i in ids], np.float64),
        waited=np.array([bandit.round + 1 - bandit.last_asked.get(i, 0) for i in ids], np.int64),
        cpu_ghz=read_known("cpu_ghz"),
        free_ram_gb=read_known("free_ram_gb"),
        link_mbit_s=read_known("link_mbit_s"),
        loss_drop=compute_mean("loss_drop"),
        gradient_norm=compute_mean("gradient_norm"),
    )


# --------------------------------------------------------------------------------- ours, as entry points name them


def _find_positions(devices: Candidates, chosen: Sequence[str]) -> list[int]:
    place = {i: position for position, i in enumerate(devices.ids)}
    return [place[i] for i in chosen]


def by_lot(devices: Candidates, n: int, rng: np.random.Generator) -> list[int]:
    """Devices are drawn uniformly."""
    return _find_positions(devices, draw_uniform(devices.ids, n, rng))


def by_time(devices: Candidates, n: int, rng: np.random.Generator) -> list[int]:  # noqa: ARG001 - nothing is drawn
    """Those with the shortest rounds are chosen."""
    seconds = dict(zip(devices.ids, devices.seconds.tolist(), strict=True))
    return _find_positions(devices, select_fastest(devices.ids, n, seconds, {}))


class Stratified(Rule, frozen=True):
    """About equally many devices are drawn from each cluster."""

    CLUSTERS = True

    def select(self, devices: Candidates, n: int, rng: np.random.Generator) -> list[int]:
        """Draw by lot within a cluster."""
        return by_lot(devices, n, rng)

    def divide_cohort(
        self, clusters: Mapping[int, Sequence[str]], n: int, rng: np.random.Generator, last_visit: Mapping[int, int]
    ) -> dict[int, int]:
        """Return how many devices `draw_stratified` draws of each cluster; clusters with none are left out."""
        drawn = set(draw_stratified(clusters, n, rng, last_visit=last_visit))
        return {k: size for k, ids in clusters.items() if (size := len(drawn.intersection(ids)))}
