"""A problem of one's own, as a user would write it: the point that is nearest to a target."""

from __future__ import annotations

from typing import Any, Final

NEAREST: Final = "tests.support.own_problem:Nearest"


class Nearest:
    """Two numbers near two others."""

    outputs = (1, 2)
    targets = (2,)

    def loss(self, outputs: Any, targets: Any) -> Any:
        """Return squared distances, (n,)."""
        return ((outputs[:, 0] - targets) ** 2).sum(dim=1)

    def score(self, outputs: Any, targets: Any) -> float:
        """Return 1 less the mean squared distance."""
        return 1 - float(((outputs[:, 0] - targets) ** 2).mean())

    def decode(self, outputs: Any) -> list[tuple[float, ...]]:
        """Return the points."""
        return [tuple(map(float, point)) for point in outputs[:, 0]]
