"""Features of signals whose features are known, and a file in the form of the set."""

from pathlib import Path

import numpy as np
import pytest

from fedge.errors import ConfigError
from fedge.tasks import Partitioning, load_pool, partition_pool
from fedge.tasks.har import N_SIGNALS, compute_features


def write(file: Path, **changes: np.ndarray | None) -> Path:
    """Three people, five bouts of eight windows each; bout b is activity b mod 6."""
    rng = np.random.default_rng(0)
    bout = np.tile(np.repeat(np.arange(5), 8), 3).astype(np.uint8)
    table = {
        "x": rng.normal(size=(120, 9, 128)).astype(np.float32),
        "y": (bout % 6).astype(np.uint8),
        "subject": np.repeat([4, 9, 11], 40).astype(np.uint8),
        "bout": bout,
    }
    file.parent.mkdir(parents=True, exist_ok=True)
    np.savez(file, **{name: array for name, array in (table | changes).items() if array is not None})
    return file


def test_features_of_a_sine() -> None:
    t = np.arange(128)
    window = np.zeros((1, N_SIGNALS, 128))
    window[0, 3] = 0.5 + 0.2 * np.sin(2 * np.pi * 6 * t / 128)  # bin 6: the fourth band, 5 to 8
    found = compute_features(window).reshape(N_SIGNALS, 12)
    mean, std, low, high, roughness, *bands = found[3]
    assert (mean, std) == (pytest.approx(0.5), pytest.approx(0.2 / np.sqrt(2), rel=1e-6))
    assert (low, high) == (pytest.approx(0.3, abs=1e-2), pytest.approx(0.7, abs=1e-2))
    assert roughness == pytest.approx(std * 2 * np.sin(np.pi * 6 / 128), rel=0.02)
    assert bands[3] == pytest.approx((3 + np.log10(0.2**2 / 2 + 1e-6)) / 2, rel=1e-5)
    np.testing.assert_allclose(np.delete(bands, 3), -1.5, atol=1e-5)  # silence
    np.testing.assert_allclose(found[0, :5], 0)


def test_bands_sum_to_the_variance() -> None:
    window = np.random.default_rng(0).normal(size=(2, N_SIGNALS, 128))
    window -= window.mean(axis=2, keepdims=True)
    found = compute_features(window).reshape(2, N_SIGNALS, 12).astype(np.float64)
    energies = 10 ** (2 * found[:, :, 5:] - 3) - 1e-6
    nyquist = np.abs(np.fft.rfft(window, axis=2))[:, :, 64] ** 2 / 128**2  # counted twice
    np.testing.assert_allclose(energies.sum(axis=2) - nyquist, found[:, :, 1] ** 2, rtol=1e-4)


def test_people_and_bouts_are_told(tmp_path: Path) -> None:
    for place, data in (("a/uci-har/uci_har.npz", "a"), ("b/uci_har.npz", "b"), ("c/any.npz", "c/any.npz")):
        write(tmp_path / place)
        found = load_pool("uci-har", tmp_path / data)
        assert found.x.shape == (120, 108)
        assert found.user is not None
        assert found.block is not None
        assert found.user.tolist() == np.repeat([0, 1, 2], 40).tolist()
        assert len(np.unique(found.block)) == 15
        assert found.spec.n_classes == 6


def test_no_bout_is_torn_between_training_and_test(tmp_path: Path) -> None:
    source = load_pool("uci-har", write(tmp_path / "har.npz"))
    assert source.block is not None
    numbers = {row.tobytes(): int(block) for row, block in zip(source.x, source.block, strict=True)}
    for how in ("natural", "iid"):
        for share in partition_pool(source, 3, Partitioning(partition=how), seed=1):
            parts = [{numbers[row.tobytes()] for row in x} for x in (share.x_train, share.x_val, share.x_test)]
            assert all(parts)
            assert len(set.union(*parts)) == sum(map(len, parts))


def test_other_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"uci_har\.npz is not at"):
        load_pool("uci-har", tmp_path)
    with pytest.raises(ConfigError, match="bout is missing"):
        load_pool("uci-har", write(tmp_path / "a.npz", bout=None))
    with pytest.raises(ConfigError, match=r"x must be \(n, 9, 128\)"):
        load_pool("uci-har", write(tmp_path / "b.npz", x=np.zeros((120, 9, 64))))
