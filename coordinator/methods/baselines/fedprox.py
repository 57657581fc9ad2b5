"""FedProx: FedAvg whose clients are drawn back to the model that they were given.

Source: Li et al., "Federated Optimization in Heterogeneous Networks", MLSys 2020, Algorithm 2: client i minimises
F_i(w) + (mu / 2) ||w - w_t||^2. Unless `--local-epochs` is given, every client takes the same number of steps;
partial work is not modelled.
"""

from __future__ import annotations

from typing import Annotated, ClassVar

import msgspec
from msgspec import Meta, Struct

from coordinator.methods.baselines.fedavg import FedAvg
from fedge.steps.sgd import Sgd


class Options(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The options of FedProx. `proximal_mu`: mu, strength of the pull; 0 is FedAvg."""

    proximal_mu: Annotated[float, Meta(ge=0)] = 0.01


class FedProx(FedAvg):
    """FedAvg with a proximal term in the clients' loss."""

    name = "fedprox"
    Options: ClassVar[type[Struct]] = Options

    def get_sgd(self) -> Sgd:
        """Return the SGD settings of the devices, with the proximal term."""
        return msgspec.structs.replace(self.settings.sgd, proximal_mu=self.options.proximal_mu)
