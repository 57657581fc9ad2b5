"""Engines against each other on real mixtures' graphs: separate is fused, lazy is nearly so and runs less."""

import shutil
import tempfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("torch", reason="bundles are written with it")

from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace as replace_struct

import deploy
from deploy.commands.infer import infer
from deploy.inference.engines import LARGE_PART_BYTES, NEGLIGIBLE, choose_engine
from export import GateWeights, Guard
from fedge.bundle.manifest import BRANCH, MANIFEST, read_bundle
from fedge.data.problems.calibration import Calibration
from fedge.errors import ConfigError, UpdateRejected
from fedge.wire.messages import Role
from tests.support.problem_bundles import KINDS, make_kind
from tests.support.tables import inputs, mixture_of, write

GOLDEN = Path(__file__).parents[1] / "golden" / "bundle"
N = 12
SHAPE = (5, N, 4)


def random_mixture(seed, *, top=2, guard=False, broken=0.0, clip=3.0):
    """Logits (M, n, C) with some that are not finite, and a mixture of all that the formula knows."""
    rng = np.random.default_rng(seed)
    m, _, n_classes = SHAPE
    logits = rng.normal(size=SHAPE) * rng.choice([1, 10])
    logits[rng.random(SHAPE) < broken] = rng.choice([np.nan, np.inf, -np.inf])
    if broken:
        logits[:, 0] = np.nan  # a sample for which nothing is usable
    gate = GateWeights(*(rng.normal(size=shape) * 0.3 for shape in ((16, 1), (16,), (m, 16), (m,))))
    return logits, mixture_of(
        logits,
        roles=[Role.PRIVATE, Role.GLOBAL, Role.EXPERT, Role.EXPERT, Role.LOCAL],
        weights=[0.3, 0.2, 0.3, 0.2, 0.0 if guard else 0.2],
        temperature=rng.uniform(0.5, 2, m).tolist(),
        kappa=rng.uniform(0, 1, m).tolist(),
        mean=rng.normal(2, 1, m).tolist(),
        std=rng.uniform(0.01, 1, m).tolist(),
        beta=0.5,
        energy_clip=clip,
        log_prior=np.log(rng.dirichlet(np.ones(n_classes))),
        gate=gate,
        guard=Guard(int(rng.integers(m)), Calibration(temperature=1.4, kappa=0.6)) if guard else None,
        top=top,
    )  # fmt: skip


@pytest.fixture(scope="module")
def folder():
    with tempfile.TemporaryDirectory() as name:
        yield Path(name)


def written(folder, logits, mixture):
    path = folder / "bundle"
    shutil.rmtree(path, ignore_errors=True)
    write(path, logits, mixture)
    return path


def outputs(path, x, **how):
    found = deploy.load(path, **how).predict_inputs(x)
    return found.probabilities, found.weights, found.energies


def assert_same(found, wanted, atol=1e-6):
    for one, other in zip(found[:2], wanted[:2], strict=True):
        np.testing.assert_allclose(one, other, atol=atol)
    np.testing.assert_allclose(found[2], wanted[2], rtol=1e-4, atol=1e-4)


@settings(max_examples=15, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    top=st.integers(1, 3),
    guard=st.booleans(),
    broken=st.sampled_from([0.0, 0.1]),
    mode=st.sampled_from(["normal", "shift"]),
)
def test_separate_is_fused(folder, seed, top, guard, broken, mode):
    path = written(folder, *random_mixture(seed, top=top, guard=guard, broken=broken))
    x = inputs(N)
    fused = outputs(path, x, engine="fused", mode=mode)
    assert_same(outputs(path, x, engine="separate", mode=mode), fused)
    for i in range(N):
        assert_same(outputs(path, x[i : i + 1], engine="separate", mode=mode), [o[i : i + 1] for o in fused])
        break  # one sample alone, as well as the batch


@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), guard=st.booleans())
def test_other_weights_are_those_of_a_bundle_with_other_biases(folder, seed, guard):
    """And the factors 1 change nothing."""
    logits, mixture = random_mixture(seed, guard=guard)
    ratio = np.exp(np.random.default_rng(seed).normal(size=len(logits)))
    path, x = written(folder, logits, mixture), inputs(N)
    runtime = deploy.load(path, engine="separate")
    own, same = runtime.predict_reweighed(x, np.ones(len(logits)))
    _, other = runtime.predict_reweighed(x, ratio)
    moved = replace(mixture.gate, out_bias=mixture.gate.out_bias + np.log(ratio))
    wanted = outputs(written(folder, logits, replace(mixture, gate=moved)), x, engine="fused")

    np.testing.assert_array_equal(own.probabilities, runtime.predict_inputs(x).probabilities)
    np.testing.assert_array_equal(same.probabilities, own.probabilities)
    np.testing.assert_allclose(other.probabilities, wanted[0], atol=1e-6)
    np.testing.assert_array_equal(other.weights, own.weights)
    assert (own.adapted, same.adapted, other.adapted) == (False, True, True)


def test_only_separate_can_predict_with_other_weights(folder):
    path = written(folder, *random_mixture(0))
    assert [deploy.load(path, engine=engine).can_reweigh for engine in ("fused", "separate", "lazy")] == [
        False, True, False,
    ]  # fmt: skip


@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), top=st.integers(1, 3), guard=st.booleans())
def test_lazy_leaves_out_what_is_negligible(folder, seed, top, guard):
    """On the samples that the bounds come from, they hold; then little is missing."""
    path = written(folder, *random_mixture(seed, top=top, guard=guard))
    p, weights, _ = outputs(path, inputs(N), engine="fused")
    lazy_p, lazy_weights, lazy_energies = outputs(path, inputs(N), engine="lazy")
    left_out = np.isnan(lazy_energies)
    assert not left_out[:, 0].any()  # the private model is always run
    assert np.where(left_out, weights, 0).sum(axis=1).max() <= NEGLIGIBLE + 1e-6
    assert (lazy_weights[left_out] == 0).all()
    assert np.abs(lazy_p - p).max() <= 2 * NEGLIGIBLE


def test_lazy_runs_less():
    """A private model that is far ahead: nothing else is run. Candidates on a par: all are."""
    with tempfile.TemporaryDirectory() as name:
        logits = np.random.default_rng(0).normal(size=SHAPE) * 0.01
        sure = written(Path(name), logits, mixture_of(logits, weights=[0.996, 0.001, 0.001, 0.001, 0.001]))
        assert np.isnan(outputs(sure, inputs(N), engine="lazy")[2]).sum(axis=1).tolist() == [4] * N
        even = written(Path(name), logits, mixture_of(logits, top=4))
        assert not np.isnan(outputs(even, inputs(N), engine="lazy")[2]).any()


def test_lazy_is_labelled_approximate(folder):
    path = written(folder, *random_mixture(0))
    np.save(folder / "x.npy", inputs(2))
    for engine, label in (("lazy", "engine lazy (approximate)"), ("separate", "engine separate, ")):
        said = CliRunner().invoke(infer, [str(path), str(folder / "x.npy"), "--runtime", engine])
        assert (said.exit_code, label in said.stdout) == (0, True), said.output


def test_an_energy_above_its_bound_makes_the_sample_exact_and_raises_the_bound():
    """The validation's tables say energy 0 at most; then another table takes the place of the private one."""
    logits = np.random.default_rng(0).normal(size=SHAPE) * 0.01
    logits[0, 0] += 5  # sample 0 is strange: the largest energy of the private model
    mixture = mixture_of(logits, weights=[0.996, 0.001, 0.001, 0.001, 0.001])
    with tempfile.TemporaryDirectory() as name:
        path = written(Path(name), logits, mixture)
        text = (path / MANIFEST).read_text()
        recorded = read_bundle(path).manifest.candidates[0].energy_max
        assert recorded == pytest.approx(5 + np.log(4), abs=0.1)
        (path / MANIFEST).write_text(text.replace(repr(recorded), "1.4"))
        runtime = deploy.load(path, engine="lazy")
        first, again = runtime.predict_inputs(inputs(1)), runtime.predict_inputs(inputs(1))
        np.testing.assert_allclose(first.probabilities, outputs(path, inputs(1))[0], atol=1e-6)
        assert not np.isnan(first.energies).any()  # all were run
        assert np.isnan(again.energies).sum() == 4  # the bound has been raised


def test_without_recorded_energies_lazy_is_exact():
    """A bundle without validation samples and with unbounded energy."""
    logits = np.random.default_rng(0).normal(size=SHAPE)
    with tempfile.TemporaryDirectory() as name:
        path = written(Path(name), logits, mixture_of(logits, top=4))
        text = (path / MANIFEST).read_text()
        for candidate in read_bundle(path).manifest.candidates:
            text = text.replace(f',\n      "energy_max": {candidate.energy_max!r}', "")
        (path / MANIFEST).write_text(text)
        assert_same(outputs(path, inputs(N), engine="lazy"), outputs(path, inputs(N), engine="fused"))


def test_shift_flattens_the_prior_and_nothing_else():
    """Weights are then those of the energies alone; a candidate of weight 0 stays without."""
    logits, mixture = random_mixture(3, top=4, guard=True)
    with tempfile.TemporaryDirectory() as name:
        path = written(Path(name), logits, mixture)
        runtime = deploy.load(path, mode="shift")
        found = runtime.predict_inputs(inputs(N))
    score = 0.5 * np.clip(found.energies, -3, 3)
    score[:, 4] = -np.inf
    share = np.exp(score) / np.exp(score).sum(axis=1, keepdims=True)
    np.testing.assert_allclose(found.weights, share, atol=1e-6)
    assert runtime.mode == "shift"


def test_the_golden_bundle_knows_shift_and_not_the_rest():
    """Bundles that were written before there were engines."""
    x = np.zeros((1, 1, 8, 8), np.float32)
    normal, shift = deploy.load(GOLDEN), deploy.load(GOLDEN, mode="shift")
    assert normal.engine == "fused"
    assert np.abs(normal.predict_inputs(x).weights - shift.predict_inputs(x).weights).max() > 0.01
    for engine in ("separate", "lazy", "int8"):
        with pytest.raises(ConfigError, match=engine):
            deploy.load(GOLDEN, engine=engine)
    with pytest.raises(ConfigError, match="no engine"):
        deploy.load(GOLDEN, engine="fast")


def test_auto_takes_separate_for_large_candidates(folder):
    logits = np.zeros(SHAPE)
    bundle = read_bundle(written(folder, logits, mixture_of(logits)))
    assert choose_engine(bundle, "auto") == "fused"
    text = (bundle.folder / MANIFEST).read_text()
    size = bundle.manifest.candidates[0].part.size_bytes
    large = type(bundle)(
        type(bundle.manifest)(
            **{
                name: getattr(bundle.manifest, name)
                for name in bundle.manifest.__struct_fields__
                if name != "candidates"
            },
            candidates=tuple(_enlarged(c) for c in bundle.manifest.candidates),
        ),
        bundle.digest, bundle.graph, bundle.folder, bundle.branch,
    )  # fmt: skip
    assert str(size) in text
    assert choose_engine(large, "auto") == "separate"


def _enlarged(candidate):
    return replace_struct(candidate, part=replace_struct(candidate.part, size_bytes=LARGE_PART_BYTES))


@pytest.mark.parametrize("name", [name for name in KINDS if name != "classification"])
def test_mixtures_without_a_formula_of_their_own_run_fused_alone(tmp_path, name):
    bundle = read_bundle(make_kind(name).write_bundle(tmp_path / "1", release=1, steps=1))
    large = replace_struct(bundle.manifest, candidates=tuple(_enlarged(c) for c in bundle.manifest.candidates))
    assert choose_engine(replace(bundle, manifest=large), "auto") == "fused"
    for engine in ("separate", "lazy"):
        with pytest.raises(ConfigError, match=f"engine {engine} does not run .*no classification.*: use fused"):
            choose_engine(bundle, engine)


def test_an_altered_branch_is_refused(folder):
    logits = np.zeros(SHAPE)
    path = written(folder, logits, mixture_of(logits))
    data = bytearray((path / BRANCH).read_bytes())
    data[-1] ^= 1
    (path / BRANCH).write_bytes(data)
    with pytest.raises(UpdateRejected, match=BRANCH):
        read_bundle(path)
    (path / BRANCH).unlink()
    with pytest.raises(UpdateRejected, match=BRANCH):
        read_bundle(path)
