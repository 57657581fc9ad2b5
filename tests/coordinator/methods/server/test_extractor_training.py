"""The extractor of server data tells planted groups apart: the columns of table 8.1 (fedepc.md)."""

from __future__ import annotations

from functools import cache

import msgspec
import numpy as np
import pytest
from sklearn.metrics import adjusted_rand_score

from coordinator.clustering import aidc
from coordinator.methods.server.extractor_training import profile_classes, train_network
from edge_agent.learning.profile import measure_sparsity
from fedge.data import preprocessing
from fedge.models.training import Network
from fedge.tasks import load_pool

POOL = load_pool("digits")
TASK = msgspec.structs.replace(POOL.spec, model="mlp", model_options={"hidden": 64})
X, Y = preprocessing.preprocess(TASK, POOL.x), POOL.y
SEEDS = range(5, 10)  # 0 to 3 have chosen how it learns


@cache
def proxied(seed: int) -> tuple[Network, float, np.ndarray]:
    """Extractor and D_ref of 200 images, and which others there are."""
    order = np.random.default_rng(seed).permutation(len(Y))
    server_data, rest = order[:200], order[200:]
    network = train_network(TASK, X[server_data], Y[server_data], seed=seed)
    return network, aidc.compute_class_unit(profile_classes(network, X[server_data], Y[server_data])), rest


COLUMNS = {  # groups of classes, and the specification's index for 40 devices of 60 to 100 samples
    "five groups of two labels": ([(2 * k, 2 * k + 1) for k in range(5)], 0.97),
    "four groups": ([(0, 1, 2), (3, 4, 5), (6, 7), (8, 9)], 0.99),
    "ten groups of one label": ([(k,) for k in range(10)], 1.00),
}


def found(seed: int, classes: list[tuple[int, ...]], n: int = 40) -> tuple[np.ndarray, np.ndarray]:
    """True and found cluster of each device."""
    network, unit, rest = proxied(seed)
    rng = np.random.default_rng(seed)
    truth = np.arange(n) % len(classes)
    profiles = []
    for group in truth:
        mine = rest[np.isin(Y[rest], classes[group])]
        chosen = rng.choice(mine, min(len(mine), rng.integers(60, 101)), replace=False)
        profiles.append(measure_sparsity(network.module, X[chosen]).shares)
    labels = np.empty(n, np.int64)
    for k, members in enumerate(aidc.aidc(np.stack(profiles), unit=unit)):
        labels[list(members)] = k
    return truth, labels


@pytest.mark.parametrize("column", COLUMNS)
def test_planted_label_groups_are_found(column: str) -> None:
    classes, index = COLUMNS[column]
    assert np.mean([adjusted_rand_score(*found(seed, classes)) for seed in SEEDS]) >= index


def test_one_group_is_one_cluster() -> None:
    assert all(found(seed, [tuple(range(10))])[1].max() == 0 for seed in SEEDS)
