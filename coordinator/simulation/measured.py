"""The devices of a result with their test samples, for every figure that a user may want to compute."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
from numpy.typing import NDArray

from coordinator.simulation.evaluation import predict_samples
from coordinator.simulation.reports.outcome import DeviceOutcome
from fedge.errors import ConfigError

if TYPE_CHECKING:
    from deploy.inference.prediction import Prediction
    from fedge.tasks import Share


class MeasuredDevice(DeviceOutcome, frozen=True, kw_only=True):
    """The outcome of a device, with what it was tested on. `shares` and `home` are of all devices."""

    shares: Mapping[str, Share]
    home: Path

    @property
    def x_test(self) -> NDArray[Any]:
        """The device's raw test samples, (n, ...)."""
        return self.shares[self.id].x_test

    @property
    def y_test(self) -> NDArray[Any]:
        """Their targets, (n, ...), as the data have them."""
        return self.shares[self.id].y_test

    @property
    def predictions(self) -> Prediction:
        """What the device's bundle answers for its test samples, computed at each access.

        Raises:
            ConfigError: the device has no bundle, or the folder of the result is gone.
        """
        if self.release is None:
            raise ConfigError(f"{self.id} has no bundle: {self.problem or 'it was not measured'}")
        folder = self.home / self.id / "bundles" / self.release
        if not folder.is_dir():
            raise ConfigError(f"{folder} is gone with its result: keep the result of fedge.simulate, or give out")
        return predict_samples(folder, self.x_test)


def add_tests(device: DeviceOutcome, shares: Mapping[str, Share], home: Path) -> MeasuredDevice:
    """Return the outcome with the device's test samples."""
    return MeasuredDevice(**msgspec.structs.asdict(device), shares=shares, home=home)


def drop_training(shares: Mapping[str, Share]) -> Mapping[str, Share]:
    """Return shares without the samples for training and validation, which a result need not hold in memory.

    Devices whose samples are generated on demand stay as they are.
    """
    if not isinstance(shares, dict):
        return shares
    return {i: _drop_rest(share) for i, share in shares.items()}


def _drop_rest(share: Share) -> Share:
    names = ("x_train", "y_train", "sensitive", "x_val", "y_val", "sensitive_val")
    return dataclasses.replace(share, **{name: getattr(share, name)[:0].copy() for name in names})
