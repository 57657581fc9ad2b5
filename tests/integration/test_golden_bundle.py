"""The committed bundles of tests/deploy are what their script makes."""

import numpy as np
from msgspec import UNSET
from msgspec.structs import replace

import deploy
from deploy.inference.engines import ENGINES
from fedge.bundle.manifest import MANIFEST, decode_manifest
from tests.deploy.make_golden import GOLDEN, make, make_engines


def test_the_golden_bundle_is_what_the_script_makes(tmp_path):
    """Parts are equal byte for byte; the graph may come from another exporter, but must predict alike."""
    make(tmp_path)
    ours, committed = (decode_manifest((folder / "bundle" / MANIFEST).read_bytes()) for folder in (tmp_path, GOLDEN))
    # the committed one was written before largest energies were recorded: such bundles stay readable
    assert tuple(replace(c, energy_max=UNSET, share=UNSET) for c in ours.candidates) == committed.candidates
    assert (ours.task, ours.fusion, ours.gate) == (committed.task, committed.fusion, committed.gate)
    with np.load(GOLDEN / "expected.npz") as expected:
        found = deploy.load(tmp_path / "bundle").predict(expected["x"])
        np.testing.assert_allclose(found.probabilities, expected["probabilities"], atol=1e-6)
        np.testing.assert_allclose(found.weights, expected["weights"], atol=1e-6)


def test_the_bundle_for_all_engines_is_what_the_script_makes(tmp_path):
    """Training need not come to the same bits with another torch, but to nearly the same mixture."""
    make_engines(tmp_path)
    ours, committed = (decode_manifest((f / "bundle" / MANIFEST).read_bytes()) for f in (tmp_path, GOLDEN / "engines"))
    assert (ours.task, ours.fusion, ours.gate) == (committed.task, committed.fusion, committed.gate)
    assert [c.name for c in ours.candidates] == [c.name for c in committed.candidates]
    with np.load(tmp_path / "expected.npz") as found, np.load(GOLDEN / "engines" / "expected.npz") as expected:
        assert set(found) == set(expected)
        for engine in ENGINES:
            one, other = found[f"{engine}_probabilities"], expected[f"{engine}_probabilities"]
            assert (one.argmax(axis=1) == other.argmax(axis=1)).mean() >= 0.95


def test_they_are_small():
    assert sum(path.stat().st_size for path in GOLDEN.rglob("*") if path.is_file()) < 200_000
