"""The first half of FedCoE's cold start: the gate's mean output over the device's samples. It needs no torch."""

from __future__ import annotations

from typing import Annotated, ClassVar

from msgspec import Meta

from fedge.steps.contract import Result, Reveals
from fedge.steps.noise import Noisy
from fedge.wire.messages import BlobRef, Count, Share


class Routed(Result, frozen=True, kw_only=True):
    """The shares of the experts, rho (K,), which sum to 1."""

    REVEALS: ClassVar = {"shares": Reveals.WEIGHT, "n_samples": Reveals.COUNT}
    shares: Annotated[tuple[Share, ...], Meta(min_length=1, max_length=1024)]
    n_samples: Count


class Route(Noisy, frozen=True, kw_only=True):
    """A request for the shares by `gate`, an ONNX file that computes p (n, K) from x (n, *input_shape)."""

    STEP: ClassVar = "route"
    RESULT: ClassVar = Routed
    TRAINS: ClassVar = False

    gate: BlobRef
