"""Ditto: FedAvg, and beside it each device trains a model of its own that is drawn to the global one.

Source: Li et al., "Ditto: Fair and Robust Federated Learning Through Personalization", ICML 2021, Algorithm 1;
scmoe_pfl.md section 14. A device takes twice as many steps in a round as in FedAvg.
"""

from __future__ import annotations

from typing import Annotated, ClassVar

from msgspec import Meta

from coordinator.methods import MethodSettings, options_of
from coordinator.methods.fedavg import FedAvgOptions
from coordinator.methods.keeping import Keeping, KeepingState
from fedge.messages import KeepModel


class DittoOptions(FedAvgOptions, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`proximal_lambda`: lambda, strength of the pull to the global model; 0 is training alone."""

    proximal_lambda: Annotated[float, Meta(ge=0)] = 0.1


class Ditto(Keeping[KeepingState]):
    """The global model is FedAvg's; v_i predicts on device i and stays there."""

    name = "ditto"
    kind = KeepingState
    splits = False
    Options: ClassVar[type[FedAvgOptions]] = DittoOptions

    def __init__(self, settings: MethodSettings) -> None:
        super().__init__(settings)
        self.proximal_lambda = options_of(settings, DittoOptions).proximal_lambda

    def keep(self, state: KeepingState) -> KeepModel:  # noqa: ARG002 - always the same
        """The personal model v_i."""
        return KeepModel(proximal_lambda=self.proximal_lambda)
