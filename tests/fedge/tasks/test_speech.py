"""Tones whose place in the picture is known, and a file in the form of the set."""

from pathlib import Path

import numpy as np
import pytest

from fedge.errors import ConfigError
from fedge.tasks import load_pool
from fedge.tasks.speech import N_BANDS, N_MOMENTS, compute_mel_bands, compute_spectrogram

RATE = 8000


def tone(hertz: float, seconds: float) -> np.ndarray:
    t = np.arange(round(seconds * RATE)) / RATE
    return (10_000 * np.sin(2 * np.pi * hertz * t)).astype(np.int16)


def band_of(hertz: float) -> int:
    """The band whose middle is nearest on the mel scale."""
    mel = [2595 * np.log10(1 + f / 700) for f in (80, RATE / 2, hertz)]
    return round((mel[2] - mel[0]) / (mel[1] - mel[0]) * (N_BANDS + 1)) - 1


@pytest.mark.parametrize("hertz", [400.0, 1000.0, 3000.0])
def test_a_tone_lights_its_band(hertz: float) -> None:
    found = compute_spectrogram(tone(hertz, 0.5), RATE)
    assert found.shape == (1, N_BANDS, N_MOMENTS)
    assert set(found[0].argmax(axis=0)) == {band_of(hertz)}


def test_time_runs_from_left_to_right_whatever_the_length() -> None:
    for seconds in (0.3, 2.0):
        both = np.concatenate([tone(400, seconds / 2), tone(3000, seconds / 2)])
        found = compute_spectrogram(both, RATE)[0].argmax(axis=0)
        assert set(found[:5]) == {band_of(400)}
        assert set(found[-5:]) == {band_of(3000)}


def test_loudness_is_gone() -> None:
    wave = tone(700, 0.4) + tone(2000, 0.4) // 3
    np.testing.assert_allclose(compute_spectrogram(wave, RATE), compute_spectrogram(wave / 16, RATE), atol=1e-5)
    found = compute_spectrogram(wave, RATE)
    assert (found.mean(), found.std()) == (pytest.approx(0, abs=1e-6), pytest.approx(1, abs=1e-6))


@pytest.mark.parametrize("wave", [np.zeros(1), np.zeros(4000), np.ones(50), tone(500, 0.02)])
def test_silence_and_very_short_recordings_have_finite_pictures(wave: np.ndarray) -> None:
    found = compute_spectrogram(wave, RATE)
    assert found.shape == (1, N_BANDS, N_MOMENTS)
    assert np.isfinite(found).all()


def test_bands_cover_the_spectrum_without_a_gap() -> None:
    weights = compute_mel_bands(256, RATE)
    assert (weights >= 0).all()
    bins = np.fft.rfftfreq(256, 1 / RATE)
    inside = (bins > 200) & (bins < 3400)
    assert (weights.sum(axis=0)[inside] > 0.9).all()


def write(file: Path, **changes: np.ndarray) -> Path:
    waves = [tone(200 + 100 * i, 0.2 + 0.01 * i) for i in range(12)]
    table = {
        "audio": np.concatenate(waves),
        "offset": np.cumsum([0, *map(len, waves)]).astype(np.int32),
        "y": np.arange(12).astype(np.uint8) % 10,
        "speaker": np.repeat([2, 5], 6).astype(np.uint8),
        "rate": np.int32(RATE),
    }
    np.savez(file, **(table | changes))
    return file


def test_recordings_labels_and_speakers(tmp_path: Path) -> None:
    found = load_pool("spoken-digits", write(tmp_path / "fsdd.npz").parent)
    assert found.x.shape == (12, 1, N_BANDS, N_MOMENTS)
    assert found.y.tolist() == [*range(10), 0, 1]
    assert found.user is not None
    assert found.user.tolist() == [0] * 6 + [1] * 6
    np.testing.assert_array_equal(found.x[3], compute_spectrogram(tone(500, 0.23), RATE))


def test_other_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"fsdd\.npz is not at"):
        load_pool("spoken-digits", tmp_path)
    for offset in (np.arange(12), np.zeros(13, np.int32), np.arange(13)):
        with pytest.raises(ConfigError, match="one recording for each label"):
            load_pool("spoken-digits", write(tmp_path / "bad.npz", offset=offset))
