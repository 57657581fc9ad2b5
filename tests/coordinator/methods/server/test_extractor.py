"""The extractor of the server data: the child's work arrives, and sets that will not do are refused."""

from __future__ import annotations

import subprocess
import sys

import msgspec
import numpy as np
import pytest

from coordinator.methods.server import extractor, extractor_training
from fedge.data import preprocessing
from fedge.errors import ConfigError
from fedge.tasks import load_pool

POOL = load_pool("digits", seed=0, limit=60)
TASK = POOL.spec
X, Y = preprocessing.preprocess(TASK, POOL.x), POOL.y


def test_the_child_makes_what_this_process_would_make() -> None:
    found = extractor.train_extractor(TASK, X, Y, seed=3)
    network = extractor_training.train_network(TASK, X, Y, seed=3)
    np.testing.assert_array_equal(found.model.params, network.dump().params)
    np.testing.assert_array_equal(found.class_profiles, extractor_training.profile_classes(network, X, Y))


def test_a_child_that_fails_says_why() -> None:
    with pytest.raises(ConfigError, match="unknown model transformer"):
        extractor.train_extractor(msgspec.structs.replace(TASK, model="transformer"), X, Y, seed=0)


@pytest.mark.parametrize(
    ("x", "y", "reason"),
    [
        (X[:0], Y[:0], "do not fit"),
        (X[:, 0], Y, "do not fit"),
        (X, Y + 1, "do not fit"),
        (X[:12], np.repeat([0, 1, 2], 4), "at least 5"),
        (X[:12], np.zeros(12, np.int64), "two or more classes"),
    ],
)
def test_samples_that_will_not_do_are_refused(x: np.ndarray, y: np.ndarray, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        extractor.require_samples(TASK, x, y)


def test_the_coordinator_holds_no_torch_for_it() -> None:
    modules = "coordinator.methods.server.extractor, coordinator.methods.papers.fedepc"
    code = f"import sys, {modules}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
