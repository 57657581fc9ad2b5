"""Cold start without torch: profile by the gate, bundle from files (fedcoe.md section 7)."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from edge_agent.outcome import Fetch
from fedge.messages import InstallBundle, Installed, Route, Routed


def route(action: Route, fetch: Fetch, x: NDArray[np.float32]) -> Routed:
    """Mean gate output over the samples."""
    raise NotImplementedError


def install_bundle(action: InstallBundle, fetch: Fetch, home: Path) -> Installed:
    """Write and verify the bundle."""
    raise NotImplementedError
