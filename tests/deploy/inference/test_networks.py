"""The networks of a bundle in memory and on the disk."""

import shutil
from pathlib import Path

import numpy as np
import pytest
from msgspec.structs import replace

from deploy.inference.networks import Networks
from deploy.inference.sessions import CPU
from fedge.bundle.manifest import read_bundle
from fedge.errors import UpdateRejected

pytestmark = pytest.mark.torch_free

BUNDLE = Path(__file__).parents[1] / "golden" / "engines" / "bundle"
X = np.random.default_rng(0).random((3, 1, 8, 8), np.float32)


@pytest.fixture
def opened(monkeypatch):
    """The candidates whose files are opened, in order."""
    found, usual = [], Networks._open
    monkeypatch.setattr(Networks, "_open", lambda self, k: found.append(k) or usual(self, k))
    return found


def networks(folder=BUNDLE):
    return Networks(read_bundle(folder), 1, [CPU])


def test_on_the_disk_or_in_memory_a_network_says_the_same():
    some, every = networks(), networks()
    every.hold(range(4))
    some.hold([0], [0, 1, 2])
    for k in range(3):
        np.testing.assert_array_equal(some.compute_logits(k, X), every.compute_logits(k, X))
    assert (some.used, some.providers) == ((0, 1, 2), (CPU,))


def test_only_what_is_not_in_memory_is_opened_and_the_last_one_stays_open(opened):
    some = networks()
    some.hold([0], [1, 2])
    for k in (0, 1, 1, 0, 1, 2, 1):
        some.compute_logits(k, X)
    assert opened == [0, 1, 2, 1]
    some.hold([0, 1])
    assert opened == [0, 1, 2, 1]


def test_equal_candidates_share_a_session(opened):
    bundle = read_bundle(BUNDLE)
    first, second, *others = bundle.manifest.candidates
    manifest = replace(bundle.manifest, candidates=(first, replace(second, part=first.part), *others))
    some = Networks(type(bundle)(manifest, bundle.digest, bundle.graph, bundle.folder, bundle.branch), 1, [CPU])
    some.hold([0, 1, 2])
    assert len(opened) == 2
    np.testing.assert_array_equal(some.compute_logits(0, X), some.compute_logits(1, X))


def test_a_file_that_has_changed_since_is_refused(tmp_path):
    folder = shutil.copytree(BUNDLE, tmp_path / "bundle")
    some = networks(folder)
    some.hold([0], [1])
    path = folder / some._bundle.manifest.candidates[1].part.file_name
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with pytest.raises(UpdateRejected, match="has changed since the bundle was loaded"):
        some.compute_logits(1, X)
    path.unlink()
    with pytest.raises(UpdateRejected, match="has changed since"):
        some.compute_logits(1, X)
