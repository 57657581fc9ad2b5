"""FedAvgM: FedAvg whose server moves with momentum.

Source: Hsu, Qi, Brown, "Measuring the Effects of Non-Identical Data Distribution for Federated Visual Classification",
2019, §4.1: v <- gamma v + mean change;  w <- w + v. The default gamma is that of fedge.md, section 4.
"""

from __future__ import annotations

from typing import Annotated, ClassVar

from msgspec import Meta, Struct

from coordinator.methods.baselines.fedavg import FedAvg


class Options(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The options of FedAvgM. `gamma`: momentum of the server; 0 is FedAvg."""

    gamma: Annotated[float, Meta(ge=0, lt=1)] = 0.5


class FedAvgM(FedAvg):
    """FedAvgM: FedAvg with server momentum, gamma > 0."""

    name = "fedavgm"
    Options: ClassVar[type[Struct]] = Options

    def get_gamma(self) -> float:
        """Return the momentum of the server, in [0, 1)."""
        return float(self.options.gamma)
