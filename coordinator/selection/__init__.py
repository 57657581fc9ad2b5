"""Who trains in a round: uniform, stratified (per cluster), the fastest, or `ccmab`, a bandit under a deadline.

A method without clusters calls `uniform` or `fastest` itself. One whose devices lie in clusters calls `choose`, which
has all four under one signature: the deadline and the care for overdue devices (FedEPC sections 5.2 and 5.5) are those
of the bandit's settings whoever chooses, so that selections differ in nothing but the choice.
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
    """Choose devices in each cluster: by cluster what is chosen, and its bandit in which this round was held.

    Args:
        how: `ccmab`, `uniform` and `fastest` choose the quota of every cluster; `stratified` draws about as many
            devices from each as from every other, the quota of all together (CFIC section 5).
        arms: the devices of each cluster that can be reached, by its number >= 0.
        bandits: of each cluster; rivals use nothing of it but what it knows of times and waiting.
        settings: of the bandits.
        seed: of the round; every cluster has random numbers of its own.
        last_visit: round in which some device of the cluster was chosen last (any number that grows with it will do).
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
    """How many devices each cluster sends; those that send none are left out."""
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
