"""Weighted means of models, one per cluster, computed while updates stream by.

Source: SCMoE-PFL, Eq. 5 (docs/methods/scmoe_pfl.md, section 8); FedAvg is the case of one cluster. A client in several
clusters counts fully in each. Every update is read once and can then be discarded: memory is that of the experts alone.

Numerics: sums are in float64, in the order of arrival (callers go by ascending client id). Sums of n_i * w_i are kept
and divided at the end. n_i * w_i is exact in float64 for float32 updates and n_i < 2^29, so a single client's mean is
its own model, bit for bit.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fedge.tensors.layout import Layout, Model
from fedge.tensors.rounding import get_threads, map_blocks

BLOCK = 262_144
"""Elements of a vector that are worked on at a time, so that they stay in the CPU's cache from one step to the next.

The best of 8 k to 256 k, as measured. With smaller blocks, numpy's overhead per call counts."""


class WeightedSums:
    """Running weighted sums of vectors of length d, one for each of K clusters; 8*K*d bytes.

    Long vectors are split over the processors. One thread sums each number, in order, so the sums are the same.
    """

    def __init__(self, n_clusters: int, d: int) -> None:
        self._sums = np.empty((n_clusters, d))  # a row is valid from the first addition on
        self._totals = [0.0] * n_clusters
        n_threads = max(1, min(len(os.sched_getaffinity(0)), d // BLOCK))
        bounds = [d * k // n_threads for k in range(n_threads + 1)]
        self._shares = [(start, end, np.empty(min(BLOCK, d))) for start, end in pairwise(bounds)]  # of each thread

    def add(
        self, vector: NDArray[np.floating[Any]], weight: float, clusters: Collection[int], factor: float = 1.0
    ) -> None:
        """Add weight * factor * vector, shape (d,), to some clusters; weight 0 adds nothing.

        Means are divided by the sum of the weights, without factors.

        Raises:
            ValueError: the shape is wrong, or the weight is negative or not finite.
        """
        if vector.shape != self._sums.shape[1:]:
            raise ValueError(f"vector has shape {vector.shape}, expected {self._sums.shape[1:]}")
        if not 0 <= weight < np.inf:
            raise ValueError(f"weight {weight} is negative or not finite")
        if weight == 0 or not clusters:
            return
        if vector.size:
            self._add(vector, weight * factor, clusters)
        for k in clusters:
            self._totals[k] += weight

    def _add(self, vector: NDArray[np.floating[Any]], weight: float, clusters: Collection[int]) -> None:
        def add_share(start: int, end: int, scratch: NDArray[np.float64]) -> None:
            for first in range(start, end, BLOCK):
                block = vector[first : min(first + BLOCK, end)]
                scaled = scratch[: len(block)]
                np.copyto(scaled, block)  # to float64 first: a multiplication that casts is slower than both
                np.multiply(scaled, weight, out=scaled)
                for k in clusters:
                    target = self._sums[k, first : first + len(block)]
                    if self._totals[k]:
                        np.add(target, scaled, out=target)
                    else:
                        target[...] = scaled

        others = [get_threads().submit(add_share, *share) for share in self._shares[1:]]
        add_share(*self._shares[0])
        for other in others:
            other.result()

    def compute_means(self) -> tuple[NDArray[np.float64] | None, ...]:
        """Compute the mean of each cluster, (d,), or None without addends.

        It divides in place, so call it once, last.
        """

        def divide(block: slice) -> None:
            np.divide(row[block], total, out=row[block])

        for total, row in zip(self._totals, self._sums, strict=True):
            if total > 0:
                map_blocks(len(row), divide, threaded=True)
        return tuple(row if total > 0 else None for total, row in zip(self._totals, self._sums, strict=True))


@dataclass(frozen=True, slots=True)
class Average:
    """Mean of some models or of some updates, as vectors like those of `Model`; `n_samples` is the sum of weights."""

    params: NDArray[np.float64]
    buffers: NDArray[np.float64]
    counters: NDArray[np.int64]
    n_samples: float

    def to_model(self) -> Model:
        """Return the mean as a model, when models were averaged."""
        return Model(self.params.astype(np.float32), self.buffers.astype(np.float32), self.counters)

    def add_to(self, start: Model) -> Model:
        """Return `start` plus the mean change, if updates were averaged; buffers, counters are the mean's own."""
        return Model((start.params + self.params).astype(np.float32), self.buffers.astype(np.float32), self.counters)


class Share(NamedTuple):
    """A model's share in the mean of a cluster: its weight, and the factors of its parameters and its buffers."""

    weight: float
    params: float = 1.0
    buffers: float = 1.0


Shares = Mapping[tuple[int, int], Share]
"""Shares by (cluster, model). A model without an entry has its size as weight and is multiplied by 1."""


def average_clusters(
    models: Iterable[Model | Average],
    sizes: Sequence[float],
    members: Sequence[Collection[int]],
    layout: Layout,
    shares: Shares = MappingProxyType({}),
) -> tuple[Average | None, ...]:
    """Average models (or updates) within clusters, each model read once (Eq. 5).

    Args:
        models: the models, by ascending client id; finite. An average counts as a model.
        sizes: n_i of each model, samples, >= 0. A model with n_i = 0 carries no weight.
        members: for each cluster k the positions of its members among the models; clusters may overlap or be empty.
        layout: the layout of the models.
        shares: of models that count in a cluster other than by their size; n_i is then the share's weight.

    Returns:
        omega_k = sum over members of (n_i / sum n) w_i; buffers likewise, counters by maximum. None if the weights of
        the cluster sum to 0; the caller then keeps the cluster's previous expert.

    Raises:
        ValueError: a model has the wrong shape (the message gives its position), or there are too many or too few.

    Cost: O(sum of cluster sizes * d) time, 8*K*d bytes beyond the model at hand.
    """
    clusters_of: list[list[int]] = [[] for _ in sizes]
    for k, of_cluster in enumerate(members):
        for i in set(of_cluster):
            clusters_of[i].append(k)
    n_buffers, n_counters = (sum(t.size for t in layout.select_kind(kind)) for kind in ("buffer", "counter"))
    params = WeightedSums(len(members), layout.n_params)
    buffers = WeightedSums(len(members), n_buffers)
    counters = np.full((len(members), n_counters), np.iinfo(np.int64).min)
    waiting = list(zip(range(len(sizes)), sizes, clusters_of, strict=True))[::-1]
    for model in models:
        if not waiting:
            raise ValueError(f"there are more models than the {len(sizes)} sizes")
        i, size, clusters = waiting.pop()
        if model.counters.shape != (n_counters,):
            raise ValueError(f"model {i}: counters have shape {model.counters.shape}, expected {(n_counters,)}")
        try:
            for share, together in _group_by_share(i, size, clusters, shares):
                params.add(model.params, share.weight, together, share.params)
                buffers.add(model.buffers, share.weight, together, share.buffers)
                for k in together if share.weight else ():
                    np.maximum(counters[k], model.counters, out=counters[k])
        except ValueError as error:
            raise ValueError(f"model {i}: {error}") from error
        del model  # before the next one is asked for
    if waiting:
        raise ValueError(f"there are fewer models than the {len(sizes)} sizes")
    totals = [sum(shares.get((k, i), Share(sizes[i])).weight for i in own) for k, own in enumerate(members)]
    return tuple(
        None if p is None or b is None else Average(p, b, c, n)
        for p, b, c, n in zip(params.compute_means(), buffers.compute_means(), counters, totals, strict=True)
    )


def _group_by_share(i: int, size: float, clusters: list[int], shares: Shares) -> list[tuple[Share, list[int]]]:
    """Group the clusters of a model by equal shares."""
    found: dict[Share, list[int]] = {}
    for k in clusters:
        found.setdefault(shares.get((k, i), Share(size)), []).append(k)
    return list(found.items())


def average_all(models: Iterable[Model], sizes: Sequence[float], layout: Layout) -> Average:
    """Average models (or updates) over all clients: FedAvg's mean. Arguments as in `average_clusters`.

    Raises:
        ValueError: the sizes sum to 0, or a model does not fit.

    Example:
        >>> from fedge.tensors.layout import TensorInfo
        >>> layout = Layout(tensors=(TensorInfo(name="w", shape=(2,)),))
        >>> models = [Model(np.float32([1, 2]), np.zeros(0, np.float32), np.zeros(0, np.int64)),
        ...           Model(np.float32([3, 6]), np.zeros(0, np.float32), np.zeros(0, np.int64))]
        >>> average_all(models, [1, 3], layout).params
        array([2.5, 5. ])
    """
    (average,) = average_clusters(models, sizes, [range(len(sizes))], layout)
    if average is None:
        raise ValueError("the weights sum to 0: there is nothing to average")
    return average
