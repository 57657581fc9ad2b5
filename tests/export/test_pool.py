"""PM-MoE's graph against the float64 formula and the specification's worked numbers (pm_moe.md section 12)."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import deploy
from export import Pool, PoolGate, write_bundle
from export.parity import compute_features, compute_logits
from export.pool import WIDTHS, compute_gate_logits, compute_pool_reference, select_top_weights
from fedge.bundle.manifest import read_bundle
from fedge.data.task import TaskSpec
from fedge.models import build
from fedge.tensors.layout import HEAD, unflatten

TASK = TaskSpec(name="toy", classes=("a", "b", "c"), input_shape=(6,), model="mlp", model_options={"hidden": 8})
LAYOUT, TRUNK = build.make_initial_model(TASK, 0)
X = np.random.default_rng(0).normal(size=(20, 6)).astype(np.float32)


def gate_of(rng, n_inputs, m, scale=0.5):
    sizes = (n_inputs, *WIDTHS, m)
    return PoolGate(
        weights=tuple(rng.normal(size=(b, a)) * scale / np.sqrt(a) for a, b in pairwise(sizes)),
        biases=tuple(rng.normal(size=b) for b in sizes[1:]),
        mean=rng.normal(size=n_inputs),
        scale=rng.uniform(0.5, 2, n_inputs),
    )


def pool_of(m=5, kind="head", seed=0, **changes):
    rng = np.random.default_rng(seed)
    modules = tuple(
        {"weight": rng.normal(size=(3, 8)).astype(np.float32), "bias": rng.normal(size=3).astype(np.float32)}
        if kind == "head"
        else build.make_initial_model(TASK, 10 + k)[1]
        for k in range(m)
    )
    fields = {
        "kind": kind,
        "trunk": TRUNK if kind == "head" else None,
        "modules": modules,
        "rest": np.zeros(3) if kind == "head" else rng.normal(size=3),
        "gate": gate_of(rng, 8 if kind == "head" else 6, m),
        "keep": np.ones(m, bool),
        "own": 1,
        "top": min(3, m),
        "anchored": True,
    }
    return Pool(**(fields | changes))


def write(tmp_path, pool):
    write_bundle(
        tmp_path / "b", task=TASK, layout=LAYOUT, mixture=pool, validation=X, release=1, method="pm-moe", metrics={}
    )
    return deploy.load(tmp_path / "b")


def oracle(pool, x):
    """Sections 3 and 5 sample by sample, in loops."""
    if pool.kind == "head":
        f, rest = compute_features(TASK, LAYOUT, pool.trunk, x)
        added = [[module["weight"] @ row + module["bias"] for module in pool.modules] for row in f]
        g = f
    else:
        logits = compute_logits(TASK, LAYOUT, pool.modules, x)
        rest = np.tile(pool.rest, (len(x), 1))
        added = [[logits[m][n] - pool.rest for m in range(len(pool.modules))] for n in range(len(x))]
        g = x
    z = compute_gate_logits(pool.gate, g)
    p = []
    for n in range(len(x)):
        e = np.where(pool.keep, np.exp(z[n] - z[n].max()), 0)
        alpha = e / e.sum()
        order = sorted(np.flatnonzero(pool.keep), key=lambda m, a=alpha: (-a[m], m))[: pool.top]
        if pool.anchored and pool.own not in order:
            order[-1] = pool.own
        w = {m: alpha[m] / (sum(alpha[k] for k in order) if pool.anchored else 1) for m in order}
        total = rest[n] + sum(w[m] * added[n][m] for m in order)
        p.append(np.exp(total) / np.exp(total).sum())
    return np.array(p)


@pytest.mark.parametrize("kind", ["head", "base"])
@pytest.mark.parametrize("anchored", [True, False])
def test_the_graph_is_the_formula(tmp_path, kind, anchored) -> None:
    keep = np.array([True, True, False, True, True])
    pool = pool_of(kind=kind, anchored=anchored, keep=keep)
    found = write(tmp_path, pool).predict(X)
    np.testing.assert_allclose(found.probabilities, oracle(pool, X), atol=1e-5)
    assert (found.weights[:, 2] == 0).all(), "what did not survive has weight exactly 0"
    assert (np.count_nonzero(found.weights, axis=1) == 3).all()
    if anchored:
        np.testing.assert_allclose(found.weights.sum(axis=1), 1, atol=1e-6)
        assert (found.weights[:, 1] > 0).all()
    else:
        assert (found.weights.sum(axis=1) < 1).all()


@given(seed=st.integers(0, 100), m=st.integers(1, 6), top=st.integers(1, 6))
@settings(max_examples=10, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_pool(tmp_path, seed, m, top) -> None:
    pool = pool_of(m=m, seed=seed, own=seed % m, top=min(top, m))
    np.testing.assert_allclose(write(tmp_path, pool).predict(X).probabilities, oracle(pool, X), atol=1e-5)


def test_worked_top_weights() -> None:
    alpha = np.array([[0.1, 0.3, 0.3, 0.05, 0.25]])
    np.testing.assert_allclose(select_top_weights(alpha, 2), [[0, 0.3, 0.3, 0, 0]])
    np.testing.assert_allclose(select_top_weights(alpha, 2, own=4), [[0, 0.545455, 0, 0, 0.454545]], atol=1e-6)


def test_equal_modules_predict_like_one(tmp_path) -> None:
    """Section 12: if all modules are equal, anchored predictions equal the base's."""
    head = pool_of().modules[0]
    pool = pool_of(modules=(head,) * 5)
    f, rest = compute_features(TASK, LAYOUT, TRUNK, X)
    logits = rest + f @ head["weight"].T + head["bias"]
    expected = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
    np.testing.assert_allclose(write(tmp_path, pool).predict(X).probabilities, expected, atol=1e-5)


@pytest.mark.parametrize("anchored", [True, False])
def test_a_one_hot_gate_over_the_whole_pool_gives_the_base_back(tmp_path, anchored) -> None:
    """Section 12: k = M, nothing dropped, all weight on the own expert."""
    own = 1
    pool = pool_of(anchored=anchored, top=5, own=own, keep=np.ones(5, bool))
    bias = np.full(5, -200.0)
    bias[own] = 200.0
    gate = PoolGate(
        (*pool.gate.weights[:-1], np.zeros_like(pool.gate.weights[-1])),
        (*pool.gate.biases[:-1], bias),
        pool.gate.mean,
        pool.gate.scale,
    )
    f, rest = compute_features(TASK, LAYOUT, TRUNK, X)
    head = pool.modules[own]
    logits = rest + f @ head["weight"].T + head["bias"]
    expected = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
    found = write(tmp_path, pool_of(anchored=anchored, top=5, own=own, keep=np.ones(5, bool), gate=gate)).predict(X)
    np.testing.assert_allclose(found.probabilities, expected, atol=1e-5)


def test_permuting_experts_and_gate_outputs_together_permutes_nothing(tmp_path) -> None:
    pool = pool_of()
    order = [3, 1, 4, 0, 2]
    *weights, last = pool.gate.weights
    *biases, last_bias = pool.gate.biases
    gate = PoolGate((*weights, last[order]), (*biases, last_bias[order]), pool.gate.mean, pool.gate.scale)
    other = pool_of(modules=tuple(pool.modules[k] for k in order), gate=gate, own=order.index(1))
    found = [write(tmp_path / str(k), p).predict(X).probabilities for k, p in enumerate((pool, other))]
    np.testing.assert_allclose(found[0], found[1], atol=1e-6)


def test_a_module_that_overflows_is_dropped(tmp_path) -> None:
    broken = {"weight": np.full((3, 8), 3e38, np.float32), "bias": np.zeros(3, np.float32)}
    modules = (*pool_of().modules[:4], broken)
    runtime = write(tmp_path, pool_of(modules=modules, keep=np.array([True] * 4 + [False])))
    found = runtime.predict(np.full((1, 6), 100, np.float32))
    assert np.isfinite(found.probabilities).all()
    assert found.weights[0, 4] == 0


def test_the_skeleton_is_the_same_for_all_devices_and_heads_are_small_files(tmp_path) -> None:
    digests = []
    for own in (0, 1):
        keep = np.arange(5) != 2 + own
        write(tmp_path / str(own), pool_of(own=own, keep=keep, seed=own))
        bundle = read_bundle(tmp_path / str(own) / "b")
        digests.append(bundle.manifest.skeleton.digest)
        assert all(c.part.size_bytes < 400 for c in bundle.manifest.candidates)
        assert bundle.manifest.pool.own == own
        assert bundle.manifest.candidates[own].role == "private"
    assert digests[0] == digests[1]


def test_the_head_alone_is_the_difference_of_the_layout() -> None:
    head = LAYOUT.select(HEAD)
    assert [t.shape for t in head.tensors] == [(3, 8), (3,)]
    assert set(unflatten(TRUNK, LAYOUT)) - {t.name for t in head.tensors} == {
        t.name for t in LAYOUT.without(HEAD).tensors
    }


def test_reference_rows_sum_to_one() -> None:
    pool = pool_of()
    rng = np.random.default_rng(1)
    p, w = compute_pool_reference(pool, rng.normal(size=(7, 5, 3)), rng.normal(size=(7, 3)), rng.normal(size=(7, 8)))
    np.testing.assert_allclose(p.sum(axis=1), 1)
    np.testing.assert_allclose(w.sum(axis=1), 1)


def test_reference_drops_what_is_not_finite_in_float32_sample_by_sample() -> None:
    pool = pool_of()
    rng = np.random.default_rng(1)
    modules, rest, g = rng.normal(size=(7, 5, 3)), rng.normal(size=(7, 3)), rng.normal(size=(7, 8))
    other = next(k for k in np.flatnonzero(pool.keep) if k != pool.own)
    modules[2, other, 0], modules[3, other, 0] = np.nan, 1e39
    p, w = compute_pool_reference(pool, modules, rest, g)
    np.testing.assert_allclose(p.sum(axis=1), 1)
    assert (w[[2, 3], other] == 0).all()


@pytest.mark.parametrize("above", [1e-9, -1e-9])
def test_modules_that_are_level_may_win_either_way(tmp_path, above) -> None:
    """One of two counts that the gate holds for equal: the graph takes the first, float64 sees the larger bias."""
    gate = gate_of(np.random.default_rng(0), 8, 5)
    *hidden, last = gate.weights
    level = PoolGate(
        (*hidden, np.zeros_like(last)), (*gate.biases[:-1], np.array([0, 0, above, -9, -9])), gate.mean, gate.scale
    )
    write(tmp_path, pool_of(gate=level, top=1, own=0, anchored=False))
