"""Free Spoken Digit Dataset: ten digits, each spoken 50 times by 6 people, as 16 mel bands by 12 time steps.

Source: github.com/Jakobovski/free-spoken-digit-dataset. The file is an .npz with the arrays audio (all recordings
concatenated, int16), offset (n + 1,) such that recording i is audio[offset[i]:offset[i + 1]], y (n,) the digit,
speaker (n,) and rate, in samples per second.
"""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from fedge.errors import ConfigError
from fedge.tasks import arrays

N_BANDS: Final = 16
N_MOMENTS: Final = 12
WINDOW_S: Final = 0.032
STEP_S: Final = 0.010
LOWEST_HZ: Final = 80.0


def read_speech(data: Path) -> arrays.Arrays:
    """Read spectrograms `x` (n, 1, 16, 12), digits `y` (n,), speakers `user` (n,), from 0.

    Args:
        data: the file, or a folder that holds it as fsdd.npz or fsdd/fsdd.npz.

    Raises:
        ConfigError: there is no such file, or it is not in this format.
    """
    file = arrays.find_file(data, "fsdd/fsdd.npz")
    table = arrays.read_columns(file, ("audio", "offset", "y", "speaker", "rate"))
    audio, offset, y, speaker = (table[name] for name in ("audio", "offset", "y", "speaker"))
    if (
        offset.shape != (len(y) + 1,)
        or speaker.shape != y.shape
        or np.diff(offset).min() < 1
        or (offset[0], offset[-1]) != (0, len(audio))
    ):
        raise ConfigError(f"{file}: offset must cut audio into one recording for each label")
    rate = float(table["rate"])
    x = np.stack([compute_spectrogram(audio[a:b], rate) for a, b in pairwise(offset)])
    _, user = np.unique(speaker, return_inverse=True)
    return {"x": x, "y": y.astype(np.int64), "user": user.astype(np.int64)}


def compute_spectrogram(wave: NDArray[Any], rate: float) -> NDArray[np.float32]:
    """Turn a recording (samples,) of any length into (1, 16, 12): log energies by band and time.

    The steps are Hann windows of 32 ms every 10 ms, triangular bands of equal width on the mel scale from 80 Hz to rate
    / 2, mean energies in each twelfth of the recording, and the logarithm. Then the recording is normalised to mean 0
    and standard deviation 1, which removes loudness.
    """
    window, step = round(WINDOW_S * rate), round(STEP_S * rate)
    padded = np.pad(wave.astype(np.float64), (0, max(0, window + (N_MOMENTS - 1) * step - len(wave))))
    frames = np.lib.stride_tricks.sliding_window_view(padded, window)[::step] * np.hanning(window)
    energies = np.abs(np.fft.rfft(frames, axis=1)) ** 2 @ compute_mel_bands(window, rate).T
    moments = np.stack([part.mean(axis=0) for part in np.array_split(energies, N_MOMENTS)], axis=1)
    found = np.log(moments + 1e-6 * moments.max() + np.finfo(np.float64).tiny)
    standardised = (found - found.mean()) / max(float(found.std()), 1e-6)
    return np.asarray(standardised[np.newaxis], np.float32)


def compute_mel_bands(window: int, rate: float) -> NDArray[np.float64]:
    """Return each band's weights of the spectrum's bins, (16, window // 2 + 1); mel = 2595 log10(1 + f / 700)."""
    mel = np.linspace(_to_mel(LOWEST_HZ), _to_mel(rate / 2), N_BANDS + 2)
    edges = 700 * (10 ** (mel / 2595) - 1)
    bins = np.fft.rfftfreq(window, 1 / rate)
    low, middle, high = edges[:-2, None], edges[1:-1, None], edges[2:, None]
    weights: NDArray[np.float64] = np.minimum((bins - low) / (middle - low), (high - bins) / (high - middle))
    return np.maximum(weights, 0)


def _to_mel(hertz: float) -> float:
    return 2595 * float(np.log10(1 + hertz / 700))
