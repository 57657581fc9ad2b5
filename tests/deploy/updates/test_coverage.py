import numpy as np
import pytest

from deploy.inference.engines import EngineOptions
from deploy.inference.runtime import load_update
from deploy.updates.coverage import FILE, AdaptiveCoverage
from fedge.bundle.conformal import GAMMA

from ..bundles import CLASSES, GOLDEN, variant

pytestmark = pytest.mark.torch_free

SCORES = [i / 20 for i in range(20)]
HOW = EngineOptions(coverage=0.9)
SURE, WRONG = (np.eye(CLASSES, dtype=np.float32)[:1],), np.array([1])
"""An answer that is sure of class 0, and a label that says otherwise."""


@pytest.fixture
def runtime(tmp_path):
    return load_update(variant(tmp_path / "bundle", release=2, scores=SCORES), HOW)


def test_each_label_moves_the_level_and_the_next_process_goes_on_from_there(tmp_path, runtime):
    adaptive = AdaptiveCoverage(tmp_path, runtime)
    assert (adaptive.now.n, adaptive.now.threshold) == (20, SCORES[18])
    adaptive.record(SURE, WRONG)
    assert adaptive.now.alpha == pytest.approx(0.1 - 0.9 * GAMMA)
    assert adaptive.now.threshold == SCORES[19], "the sets have grown"
    adaptive.record([np.repeat(SURE[0], 2, axis=0)], np.array([1, 1]))
    assert adaptive.now.alpha == pytest.approx(0.1 - 3 * 0.9 * GAMMA)
    assert adaptive.now.threshold == np.inf, "sets hold everything, and miss nothing any more"
    adaptive.record(SURE, WRONG)
    assert adaptive.now.alpha == pytest.approx(0.1 - (3 * 0.9 - 0.1) * GAMMA)
    assert (adaptive.level.n, adaptive.level.covered) == (4, 1)
    adaptive.record(SURE, np.array([0]), sensitive=True)
    assert adaptive.now.alpha == pytest.approx(0.1 - (3 * 0.9 - 0.2) * GAMMA)
    assert (adaptive.level.n, adaptive.level.covered) == (4, 1), "what may leave counts no marked sample"
    assert AdaptiveCoverage(tmp_path, runtime).now == adaptive.now


def test_another_bundle_or_coverage_and_a_damaged_file_begin_anew(tmp_path, runtime):
    begun = AdaptiveCoverage(tmp_path, runtime)
    first = begun.now
    begun.record(SURE, WRONG)
    other = load_update(variant(tmp_path / "other", release=3, scores=SCORES), HOW)
    assert AdaptiveCoverage(tmp_path, other).now == first
    half = load_update(tmp_path / "bundle", EngineOptions(coverage=0.5))
    assert AdaptiveCoverage(tmp_path, half).now.alpha == 0.5
    assert AdaptiveCoverage(tmp_path, runtime).now != first, "it is still there"
    (tmp_path / FILE).write_bytes(b'{"alpha": 7}')
    assert AdaptiveCoverage(tmp_path, runtime).now == first


def test_a_bundle_without_scores_holds_everything_and_nothing_moves(tmp_path):
    old = AdaptiveCoverage(tmp_path, load_update(GOLDEN, HOW))
    old.record(SURE, WRONG)
    assert (old.now.n, old.now.threshold, old.now.alpha) == (0, np.inf, pytest.approx(0.1))
    assert not (tmp_path / FILE).exists()
    assert AdaptiveCoverage(tmp_path, load_update(GOLDEN, EngineOptions())).now is None
