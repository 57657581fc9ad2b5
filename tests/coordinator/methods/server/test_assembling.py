"""Bundles that the coordinator makes; mixtures of several models are in test_learning."""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np
import pytest

import deploy
from coordinator.methods.server.assembling import make_child_bundle, make_files, make_mixture
from export import parity
from fedge.data import preprocessing
from fedge.errors import ConfigError
from fedge.models import build
from fedge.tasks import load_pool, load_task
from fedge.wire.messages import Role

TASK = load_task("digits")


def test_the_child_makes_what_this_process_would_make_and_it_predicts_what_the_model_does(tmp_path: Path) -> None:
    layout, model = build.make_initial_model(TASK, 3)
    files = make_child_bundle(TASK, layout, model, release=2, method="fedavg")
    none = np.zeros((0, *TASK.input_shape), np.float32)
    own = make_files(
        make_mixture(TASK, [model], [1.0], None), none, task=TASK, layout=layout, release=2, method="fedavg"
    )
    assert files == own
    (tmp_path / "bundle").mkdir()
    for name, data in files.items():
        (tmp_path / "bundle" / name).write_bytes(data)
    runtime = deploy.load(tmp_path / "bundle")
    assert (runtime.manifest.release, runtime.manifest.method) == (2, "fedavg")
    assert [(c.role, c.kappa) for c in runtime.manifest.candidates] == [(Role.GLOBAL, 0.0)]
    x = load_pool("digits", seed=0, limit=50).x
    (logits,) = parity.compute_logits(TASK, layout, [model], preprocessing.preprocess(TASK, x))
    expected = np.exp(logits - logits.max(axis=1, keepdims=True))
    expected /= expected.sum(axis=1, keepdims=True)
    np.testing.assert_allclose(runtime.predict(x).probabilities, expected, atol=1e-4)


def test_a_network_that_cannot_be_built_says_why() -> None:
    layout, model = build.make_initial_model(TASK, 3)
    strange = msgspec.structs.replace(TASK, model="no_such_package:net")
    with pytest.raises(ConfigError, match=r"no bundle of the network of task digits.*no_such_package"):
        make_child_bundle(strange, layout, model, release=1, method="fedavg")
