"""UCI HAR: activities of 30 people with a phone at the waist, as 108 features per window of 2.56 s.

Source: Anguita et al., "A Public Domain Dataset for Human Activity Recognition Using Smartphones", ESANN 2013. The file
is an .npz with the arrays x (n, 9, 128) (body acceleration, angular velocity and total acceleration, three axes each,
50 readings a second), y (n,) 0..5, subject (n,) and bout (n,). A bout is an uninterrupted recording, numbered per
subject. Windows are cut from bouts and overlap by half.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from fedge.errors import ConfigError
from fedge.tasks import arrays

N_SIGNALS: Final = 9
N_READINGS: Final = 128
BANDS: Final = ((1, 2), (2, 3), (3, 5), (5, 9), (9, 17), (17, 33), (33, 65))
"""Bins [first, end) of the spectrum, 0.39 Hz each: octaves up to 25 Hz, without the mean."""
SILENCE: Final = 1e-6
"""Energy, in g^2 or (rad/s)^2, that is added before the logarithm: that of a phone on a table."""


def read_har(data: Path) -> arrays.Arrays:
    """Read features `x` (n, 108), labels `y` (n,), person `user` (n,), bout `block` (n,), numbered from 0.

    Args:
        data: the file, or a folder that holds it as uci_har.npz or uci-har/uci_har.npz.

    Raises:
        ConfigError: there is no such file, or it is not in this format.
    """
    file = arrays.find_file(data, "uci-har/uci_har.npz")
    table = arrays.read_columns(file, ("x", "y", "subject", "bout"))
    x, y, subject, bout = (table[name] for name in ("x", "y", "subject", "bout"))
    if x.shape != (len(y), N_SIGNALS, N_READINGS) or subject.shape != y.shape or bout.shape != y.shape:
        raise ConfigError(f"{file}: x must be (n, {N_SIGNALS}, {N_READINGS}), with y, subject and bout of each window")
    _, user = np.unique(subject, return_inverse=True)
    _, block = np.unique(np.stack([user, bout]), axis=1, return_inverse=True)
    return {"x": compute_features(x)} | {
        n: v.ravel().astype(np.int64) for n, v in (("y", y), ("user", user), ("block", block))
    }


def compute_features(windows: NDArray[Any]) -> NDArray[np.float32]:
    """Compute twelve features per signal, (n, 9, 128) -> (n, 108), of order 1, window by window.

    The features are mean, standard deviation, minimum, maximum, root mean square of the differences between neighbours,
    and the energies in seven frequency bands as (3 + log10(energy + 1e-6)) / 2.
    """
    x = windows.astype(np.float64)
    spectrum = np.abs(np.fft.rfft(x, axis=2)) ** 2 * (2 / N_READINGS**2)  # Parseval: the bins sum to the variance
    energies = np.stack([spectrum[:, :, first:end].sum(axis=2) for first, end in BANDS], axis=2)
    roughness = np.sqrt((np.diff(x, axis=2) ** 2).mean(axis=2))
    moments = [x.mean(axis=2), x.std(axis=2), x.min(axis=2), x.max(axis=2), roughness]
    found = np.concatenate([np.stack(moments, axis=2), (3 + np.log10(energies + SILENCE)) / 2], axis=2)
    return found.reshape(len(x), -1).astype(np.float32)
