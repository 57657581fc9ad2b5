"""What is picked for a budget: by costs that are told, and on a real bundle by a gauge whose figures are set."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from msgspec.structs import replace

import deploy
from deploy.inference.budget import Budget, Cost, Gauge, choose_plan, rank_candidates
from deploy.inference.engines import EngineOptions
from deploy.inference.runtime import Runtime
from fedge.bundle.manifest import MANIFEST, GuardInfo, read_bundle
from fedge.errors import ConfigError

from ..bundles import sha256

pytestmark = pytest.mark.torch_free

BUNDLE = Path(__file__).parents[1] / "golden" / "engines" / "bundle"
INF = np.inf
COSTS = [Cost(k, run_ms=2.0, open_ms=10.0, mb=4.0) for k in (0, 3, 1, 2)]


def plan_of(ms, mb, engine="auto", top=None):
    plan = choose_plan(COSTS, 1.0, Budget(ms, mb), engine, top)
    return plan.engine, plan.used, plan.in_memory, plan.ms, plan.mb, plan.fits


EVERY = (0, 1, 2, 3)


def test_all_candidates_in_memory_if_they_fit():
    assert plan_of(9, 16) == ("separate", EVERY, EVERY, 9, 16, True)


def test_without_time_those_of_the_smallest_share_are_left_out():
    assert plan_of(8.9, INF) == ("separate", (0, 1, 3), (0, 1, 3), 7, 12, True)
    assert plan_of(3, INF) == ("separate", (0,), (0,), 3, 4, True)


def test_without_memory_those_of_the_smallest_share_are_opened_one_at_a_time():
    assert plan_of(INF, 15) == ("lazy", EVERY, (0, 3), 9 + 2 * 10, 12, True)
    assert plan_of(INF, 4) == ("lazy", EVERY, (), 9 + 4 * 10, 4, True)


def test_without_both_what_cannot_be_opened_in_time_is_left_out():
    assert plan_of(28, 15) == ("separate", (0, 1, 3), (0, 1, 3), 7, 12, True)
    assert plan_of(27, 11) == ("lazy", (0, 1, 3), (0,), 7 + 2 * 10, 8, True)
    assert plan_of(26, 11) == ("separate", (0, 3), (0, 3), 5, 8, True)


def test_the_best_candidate_runs_alone_if_nothing_fits():
    assert plan_of(2, INF) == ("separate", (0,), (0,), 3, 4, False)
    assert plan_of(INF, 3) == ("separate", (0,), (0,), 3, 4, False)


def test_a_named_engine_stays():
    assert plan_of(INF, 15, "separate") == ("separate", (0, 1, 3), (0, 1, 3), 7, 12, True)
    assert plan_of(INF, INF, "lazy") == ("lazy", EVERY, EVERY, 9, 16, True)


def test_where_the_gate_alone_chooses_only_as_many_run_as_it_chooses():
    assert plan_of(5, INF, top=2) == ("lazy", EVERY, EVERY, 5, 16, True)
    assert plan_of(INF, 8, top=2) == ("lazy", EVERY, (0,), 5 + 2 * 10, 8, True)
    assert plan_of(5, INF, "separate", top=2) == ("separate", (0, 3), (0, 3), 5, 8, True)


def test_candidates_are_ranked_by_their_part_of_the_output():
    manifest = read_bundle(BUNDLE).manifest
    weights = (0.1, 0.3, 0.4, 0.2)
    manifest = replace(
        manifest, candidates=tuple(replace(c, weight=w) for c, w in zip(manifest.candidates, weights, strict=True))
    )
    assert rank_candidates(manifest) == [2, 1, 3, 0]
    told = tuple(replace(c, share=share) for c, share in zip(manifest.candidates, (0.1, 0.2, 0.3, 0.4), strict=True))
    assert rank_candidates(replace(manifest, candidates=told)) == [3, 2, 1, 0]
    guard = GuardInfo(candidate=0, temperature=1.0, kappa=0.0)
    assert rank_candidates(replace(manifest, fusion=replace(manifest.fusion, guard=guard))) == [0, 2, 1, 3]


# ------------------------------------------------------------------------------------------------- a real bundle


class Scripted(Gauge):
    """Warm runs take these times in turn; opening a file takes 10 ms, and whatever is loaded the same memory."""

    def __init__(self, *warm_ms, mb=4.0):
        self._warm_ms, self._each_mb, self._mb = iter(warm_ms), mb, 0.0

    def measure_ms(self, call):
        call()
        return 10.0

    def measure_warm_ms(self, call):
        call()
        return next(self._warm_ms)

    def read_mb(self):
        self._mb += self._each_mb
        return self._mb


WHOLE, EACH, FORMULA, INT8 = (8.0,), (2.0,) * 4, (0.5,), (5.0,)


def loaded(gauge, **how):
    return Runtime(read_bundle(BUNDLE), EngineOptions(**how), gauge)


def samples():
    with np.load(BUNDLE.parent / "expected.npz") as arrays:
        return arrays["x"]


def test_without_a_budget_nothing_is_measured():
    assert loaded(Scripted()).plan is None


def test_the_usual_engine_runs_if_it_fits():
    runtime = loaded(Scripted(*WHOLE), budget_ms=8.0)
    assert (runtime.engine, runtime.left_out, runtime.plan.ms, runtime.plan.fits) == ("fused", (), 8.0, True)


def test_int8_runs_before_a_candidate_is_left_out_but_after_all_in_float32():
    assert loaded(Scripted(*WHOLE, *FORMULA, *EACH, 6.5, *INT8), budget_ms=7.9).engine == "int8"
    separate = loaded(Scripted(9.0, *FORMULA, *EACH, 8.5), budget_ms=8.5)
    assert (separate.engine, separate.left_out) == ("separate", ())


def test_what_takes_longer_together_than_one_by_one_is_left_out():
    """4.5 ms one by one."""
    runtime = loaded(Scripted(*WHOLE, *FORMULA, *EACH, 4.6, 2.7, *INT8), budget_ms=4.5)
    assert (runtime.plan.used, runtime.plan.ms, runtime.plan.fits) == ((0,), 2.7, True)
    runtime = loaded(Scripted(*WHOLE, *FORMULA, *EACH, 2.7, *INT8), budget_ms=2.6)
    assert (runtime.plan.used, runtime.plan.ms, runtime.plan.fits) == ((0,), 2.7, False)


def test_a_candidate_that_is_left_out_counts_as_one_that_gives_no_numbers(tmp_path):
    """Which the fused graph drops, too: by it the others take the share."""
    runtime = loaded(Scripted(*WHOLE, *FORMULA, *EACH, 4.4, *INT8), budget_ms=4.5)
    assert (runtime.engine, runtime.plan.used) == ("separate", (0, 1))
    assert runtime.left_out == ("expert-2", "expert-3")
    folder = broken(tmp_path / "bundle", (2, 3))
    found, wanted = (each.predict(samples()) for each in (runtime, deploy.load(folder, engine="fused")))
    np.testing.assert_allclose(found.probabilities, wanted.probabilities, atol=2e-6)
    np.testing.assert_allclose(found.weights, wanted.weights, atol=2e-6)
    np.testing.assert_allclose(found.energies, wanted.energies, atol=1e-4)
    assert (found.weights[:, 2:] == 0).all()
    np.testing.assert_allclose(found.weights.sum(axis=1), 1, atol=1e-6)


def broken(folder, candidates):
    """The bundle with some candidates of NaN."""
    shutil.copytree(BUNDLE, folder)
    manifest = json.loads((folder / MANIFEST).read_bytes())
    for k in candidates:
        part = manifest["candidates"][k]["part"]
        data = (folder / f"{part['digest']}.safetensors").read_bytes()
        start = 8 + int.from_bytes(data[:8], "little")
        data = data[:start] + np.full((len(data) - start) // 4, np.nan, np.float32).tobytes()
        (folder / f"{sha256(data)}.safetensors").write_bytes(data)
        part["digest"] = sha256(data)
    (folder / MANIFEST).write_text(json.dumps(manifest))
    return folder


def test_candidates_on_the_disk_answer_as_those_in_memory():
    """There is memory for two, and none for a graph of all, which takes three times the weights."""
    runtime = loaded(Scripted(*FORMULA, *EACH, mb=0.02), budget_mb=0.05)
    assert (runtime.engine, runtime.plan.used, runtime.plan.in_memory) == ("lazy", EVERY, (0,))
    found, wanted = (each.predict(samples()[:6]) for each in (runtime, deploy.load(BUNDLE, engine="lazy")))
    np.testing.assert_array_equal(found.probabilities, wanted.probabilities)
    np.testing.assert_array_equal(found.energies, wanted.energies)
    assert runtime.plan.describe(runtime.manifest) == (
        "4 of 4 candidates by engine lazy, about 38.5 ms and 0.04 MB; "
        "on the disk until wanted: expert-1, expert-2, expert-3"
    )


def test_what_was_left_out_has_no_part_in_the_reference_for_drift():
    whole = loaded(Scripted(*WHOLE), budget_ms=8.0)
    assert whole.reference == read_bundle(BUNDLE).manifest.reference
    assert loaded(Scripted(*WHOLE, *FORMULA, *EACH, 4.4, *INT8), budget_ms=4.5).reference is None


def test_what_does_not_fit_is_used_and_told(caplog):
    caplog.set_level("INFO", logger="fedge.deploy")
    runtime = loaded(Scripted(*WHOLE, *FORMULA, *EACH, *INT8), budget_ms=1.0)
    assert (runtime.engine, runtime.plan.used, runtime.plan.fits) == ("separate", (0,), False)
    said = runtime.plan.describe(runtime.manifest)
    assert said == "over budget, but used: even private-0 alone by engine separate, about 2.5 ms and 4 MB"
    assert [(r.levelname, said in r.getMessage()) for r in caplog.records] == [("WARNING", True)]
    runtime = loaded(Scripted(*WHOLE), budget_ms=1.0, engine="fused")
    assert "over budget, but used: all candidates together by engine fused, about 8 ms" in runtime.plan.describe(
        runtime.manifest
    )


def test_what_was_picked_is_told_in_a_line():
    runtime = loaded(Scripted(*WHOLE, *FORMULA, *EACH, 4.4, *INT8), budget_ms=4.5)
    assert runtime.plan.describe(runtime.manifest) == (
        "2 of 4 candidates by engine separate, about 4.4 ms and 8 MB; left out: expert-2, expert-3"
    )


def test_a_budget_is_above_0():
    for name in ("budget_ms", "budget_mb"):
        with pytest.raises(ConfigError, match=f"{name} must be above 0, not 0"):
            deploy.load(BUNDLE, **{name: 0})
