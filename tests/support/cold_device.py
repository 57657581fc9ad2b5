"""A device that does not train, and the blobs that its orders name."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from msgspec import UNSET, UnsetType

from edge_agent.device.worker import Worker
from fedge.steps.contract import Action, Result
from fedge.steps.mixture.install_bundle import InstallBundle
from fedge.tasks import DeviceData
from tests.support.orders import Blobs, order
from tests.support.tables import inputs, task_of

TASK = task_of(6, 3)


class ColdDevice:
    """An inference-only device with n samples."""

    def __init__(self, home: Path, n: int = 6) -> None:
        self.home = home
        self.x = np.resize(inputs(6), (n, 1)).astype(np.float32)
        self.worker = Worker("pi", TASK, DeviceData.from_inputs(self.x), home, trains=False)
        self.blobs = Blobs(TASK)

    def does(self, action: Action) -> Result:
        finished = self.worker.execute(order(action, task=TASK), self.blobs)
        assert finished.blobs == {}
        return finished.result

    def install(self, files: dict[str, bytes], release: int = 1, campaign: int | UnsetType = UNSET) -> Result:
        named = {name: self.blobs.file(data) for name, data in files.items()}
        return self.does(InstallBundle(files=named, release=release, campaign=campaign))
