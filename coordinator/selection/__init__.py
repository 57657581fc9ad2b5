"""Who trains in a round: uniform, stratified (per cluster), the fastest, or `ccmab`, a bandit under a deadline.

A method without clusters calls `uniform` or `fastest` itself. A method with clusters calls `choose`, which offers all
four under one signature: deadline and overdue devices (FedEPC sections 5.2 and 5.5) always follow the bandit's
settings, so that selections differ only in the choice.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

import numpy as np

from coordinator.selection import ccmab
from coordinator.selection.fastest import fastest
from coordinator.selection.stratified import stratified
from coordinator.selection.uniform import cohort_size, uniform

__all__ = ["Selection", "choose", "cohort_size", "fastest", "stratified", "uniform"]

Selection = Literal["ccmab", "uniform", "fastest", "stratified"]


def choose(
    how: Selection,
    arms: Mapping[int, Sequence[ccmab.Arm]],
    bandits: Mapping[int, ccmab.State],
    settings: ccmab.Settings,
    *,
    seed: tuple[int, ...],
    last_visit: Mapping[int, int],
) -> dict[int, tuple[ccmab.Selection, ccmab.State]]:
    """Choose devices in each cluster; returns, by cluster, the choice and the bandit with which this round was held.

    Args:
        how: `ccmab`, `uniform` and `fastest` choose the quota of every cluster; `stratified` draws about equally many
            devices from each cluster, the quota of all together (CFIC section 5).
        arms: the reachable devices of each cluster, by its number >= 0.
        bandits: of each cluster; rivals use only what they know of times and waiting.
        settings: of the bandits.
        seed: of the round; every cluster has separate random numbers.
        last_visit: last round in which a device of the cluster was chosen (or any number that grows with it).
    """
    sizes: Mapping[int, int | None] = dict.fromkeys(arms)
    if how == "stratified":
        sizes = _about_equal(arms, settings.quota, np.random.default_rng(seed), last_visit)
    return {
        k: ccmab.select(bandits[k], arms[k], settings, size=size, rule=_rule(how, np.random.default_rng((*seed, k))))
        for k, size in sizes.items()
    }


def _about_equal(
    arms: Mapping[int, Sequence[ccmab.Arm]], quota: float, rng: np.random.Generator, last_visit: Mapping[int, int]
) -> dict[int, int]:
    """The number of devices from each cluster; clusters without any are left out."""
    present = {k: [a.id for a in of_cluster] for k, of_cluster in arms.items() if of_cluster}
    size = cohort_size(sum(map(len, present.values())), quota)
    drawn = set(stratified(present, size, rng, last_visit=last_visit))
    counts = {k: len(drawn.intersection(ids)) for k, ids in present.items()}
    return {k: count for k, count in counts.items() if count}


def _rule(how: Selection, rng: np.random.Generator) -> ccmab.Rule | None:
    if how == "ccmab":
        return None
    if how == "fastest":
        return lambda ids, n, seconds: fastest(ids, n, seconds, {})
    return lambda ids, n, _: uniform(ids, n, rng)
