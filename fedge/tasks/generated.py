"""Devices whose samples are generated on demand from the device's number, so that none are held in memory."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from fedge.errors import ConfigError
from fedge.tasks.shares import Partitioning, Share, make_share

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from fedge.tasks.pool import Pool

NOISE: Final = 0.05
"""Standard deviation of the noise, as a share of the range of the samples' values."""
SHIFT: Final = 1
"""Largest shift in pixels, in each direction."""
_DEVICE = 3  # keeps these random numbers separate from other uses of the seed


def make_device_names(n_devices: int) -> list[str]:
    """Return `device-00`, `device-01`, ... in ascending order."""
    width = len(str(n_devices - 1))
    return [f"device-{i:0{width}}" for i in range(n_devices)]


class Generated(Mapping[str, Share]):
    """Shares of devices by id, generated on each access and identical each time.

    A device draws samples from the pool with replacement, with class shares from Dirichlet(alpha), shifts them by up to
    a pixel and adds noise. Square images are also turned by 90 degrees x (device number mod `n_groups`).

    Args:
        pool: the source samples; images of shape (n, height, width[, channels]).
        n_devices: N >= 1.
        how: settings, of which alpha, n_groups and marks count; `min_samples` is the number of samples of a device.
        seed: seed of all draws.

    Raises:
        ConfigError: the samples are not images.
    """

    def __init__(self, pool: Pool, n_devices: int, how: Partitioning, *, seed: int) -> None:
        if pool.x.ndim not in (3, 4):
            raise ConfigError(f"samples of shape {pool.x.shape[1:]} are not images: use --partition dirichlet")
        self._pool = pool
        self._number = {name: number for number, name in enumerate(make_device_names(n_devices))}
        self._how, self._seed = how, seed
        self._by_class = np.argsort(pool.y, kind="stable")
        self._of_class = np.bincount(pool.y, minlength=pool.spec.n_classes)
        self._range = float(pool.x.min()), float(pool.x.max())

    def __getitem__(self, device_id: str) -> Share:
        number = self._number[device_id]
        rng = np.random.default_rng((self._seed, _DEVICE, number))
        there = np.flatnonzero(self._of_class)
        portions = rng.dirichlet(np.full(len(there), self._how.alpha))
        classes = rng.choice(there, self._how.min_samples, p=portions)
        first = np.cumsum(self._of_class) - self._of_class
        own = self._pool.select(self._by_class[first[classes] + rng.integers(self._of_class[classes])])
        own = dataclasses.replace(own, x=self._change(own.x, rng), user=None, block=None)
        group = number % self._how.n_groups
        return make_share(own, group, group, self._how, rng)

    def __iter__(self) -> Iterator[str]:
        return iter(self._number)

    def __len__(self) -> int:
        return len(self._number)

    def _change(self, x: NDArray[Any], rng: np.random.Generator) -> NDArray[Any]:
        low, high = self._range
        down, right = rng.integers(-SHIFT, SHIFT + 1, (2, len(x), 1))
        rows, columns = ((np.arange(n) - by) % n for n, by in zip(x.shape[1:3], (down, right), strict=True))
        shifted: NDArray[Any] = x[np.arange(len(x))[:, None, None], rows[:, :, None], columns[:, None, :]]
        noisy: NDArray[Any] = np.clip(shifted + rng.normal(0.0, NOISE * (high - low), x.shape), low, high)
        return (np.rint(noisy) if np.issubdtype(x.dtype, np.integer) else noisy).astype(x.dtype)
