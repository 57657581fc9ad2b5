"""FedBuff: the server steps whenever K updates have arrived, however old they are.

Source: Nguyen et al., "Federated Learning with Buffered Asynchronous Aggregation", AISTATS 2022, Algorithm 1;
docs/methods/fedbuff.md. An update that began tau steps ago counts s(tau) = 1 / sqrt(1 + tau):

    w <- w + 1 / K * sum_i s(tau_i) Delta_i

A round is such a step. Departures: the server's rate, which the paper tunes for each task, is 1; if no device is
working any more, the step takes the updates that have arrived.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, ClassVar

import msgspec
import numpy as np
from msgspec import Meta, Struct

from coordinator.fleet.fleet import AcceptedUpdate, Fleet
from coordinator.methods.method import Method
from coordinator.methods.parts.asynchronous import ONE_BY_ONE, Buffer, fill_buffer
from coordinator.methods.parts.averaging import average
from coordinator.methods.parts.cohort import NO_CLUSTERS
from coordinator.methods.parts.server_optimizer import apply
from coordinator.methods.promises import SHARED
from coordinator.methods.rounds import finish_round
from coordinator.methods.state import ModelState
from fedge.steps.training.train import Start, Train
from fedge.tensors.layout import Layout
from fedge.wire.messages import BlobRef


class FedBuffOptions(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The options of FedBuff. `buffer`: K, updates in a step of the server."""

    buffer: Annotated[int, Meta(ge=1, le=10_000)] = 10


class FedBuffState(ModelState, frozen=True, kw_only=True):
    """The state of FedBuff. `model`: w. `staleness`: mean tau of the last step. `seen`: the latest updates."""

    staleness: float = 0.0
    seen: tuple[AcceptedUpdate, ...] = ()


class FedBuff(Method[FedBuffState]):
    """FedBuff, Algorithm 1. `--participation`: share of devices that work at a time (the paper's concurrency)."""

    name = "fedbuff"
    HEEDS = SHARED
    Options: ClassVar[type[Struct]] = FedBuffOptions
    State = FedBuffState
    REFUSED = {
        "clustering": NO_CLUSTERS["clustering"],
        "selection": "nobody is chosen for a step: devices that are idle are drawn",
    }

    def explain_no_patience(self) -> str:
        """Return why training cannot stop early: orders are under way at any time."""
        return super().explain_no_patience() or "devices are at work for later models when it would stop"

    def explain_no_relays(self) -> str:
        """Return why relays are impossible: the method takes answers one by one."""
        return super().explain_no_relays() or ONE_BY_ONE

    def add_classes(self, state: FedBuffState, layout: Layout, grow: Callable[[BlobRef], BlobRef]) -> FedBuffState:
        """Return the state for a network with further outputs; the earlier updates were of another one."""
        return msgspec.structs.replace(state, layout=layout, model=grow(state.model), seen=(), descents={})

    async def round(self, state: FedBuffState, fleet: Fleet) -> FedBuffState:
        """Fill the buffer, then do a step of the server."""
        settings = self.settings
        order = Train(starts=(Start(model=state.model),), sgd=settings.sgd, codec=settings.codec, measure=False)
        buffer = await fill_buffer(self, state, fleet, state.seen, self.options.buffer, lambda _: order)
        enough = len(buffer.updates) >= settings.min_reports
        return finish_round(
            state,
            buffer.asked,
            buffer.updates,
            model=await self.step_server(state, fleet, buffer) if enough else state.model,
            staleness=float(np.mean(list(buffer.staleness.values()) or [0])),
            seen=buffer.seen,
        )

    async def step_server(self, state: FedBuffState, fleet: Fleet, buffer: Buffer) -> BlobRef:
        """Return the model after a step of the server."""
        mean = await average(self, fleet, buffer.updates, state.layout, alike=True, discounts=buffer.discounts)
        return apply(state.model, mean, state.layout, fleet)

    def summarise(self, state: FedBuffState) -> dict[str, Any]:
        """Return the figures of every method, with the staleness of the last step."""
        return super().summarise(state) | {"staleness": state.staleness}
