"""FedAsync: every answer moves the model at once, the less the older it is.

Source: Xie et al., "Asynchronous Federated Optimization", 2019, Algorithm 1, with the polynomial staleness of its §5.2.
A device trains W_i from the model that was the newest when it was asked. Its answer, tau steps later, gives

    w <- (1 - alpha_tau) w + alpha_tau W_i        alpha_tau = alpha (1 + tau)^-a

A round is such a step. Departure: no regulariser draws a device to the model that it was given.

    export PYTHONPATH=examples
    fedge compare --hardware mixed --rounds 300 --methods fedbuff:buffer=1,methods.fedasync:FedAsync

    fedge sample --devices 12
    fedge coordinator --broker localhost:1883 --federation shop --home server --task digits --devices 12 --rounds 300 \
        --method methods.fedasync:FedAsync --option alpha=0.5
    fedge agent --broker localhost:1883 --federation shop --id cam1 --home cam1 --task digits --data samples/cam1.npz
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

import numpy as np
from msgspec import Meta, Struct

from coordinator.fleet.fleet import AcceptedUpdate, Fleet
from coordinator.methods.method import Method
from coordinator.methods.parts.server_optimizer import apply
from coordinator.methods.rounds import finish_round
from coordinator.methods.state import ModelState
from fedge.steps.training.train import Start, Train, Trained
from fedge.tensors.layout import Model
from fedge.wire.messages import BlobRef


class FedAsyncOptions(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`alpha`: what a fresh answer counts; `a`: how fast that falls with its age."""

    alpha: Annotated[float, Meta(gt=0, le=1)] = 0.6
    a: Annotated[float, Meta(ge=0)] = 0.5


class FedAsyncState(ModelState, frozen=True, kw_only=True):
    """`model`: w. `starts`: of each device what it trains from. `seen`: what the next norms are measured against."""

    starts: dict[str, BlobRef] = {}
    staleness: int = 0
    seen: tuple[AcceptedUpdate, ...] = ()


class FedAsync(Method[FedAsyncState]):
    """Algorithm 1; all devices work all the time."""

    name = "fedasync"
    Options: ClassVar[type[Struct]] = FedAsyncOptions
    State = FedAsyncState

    async def round(self, state: FedAsyncState, fleet: Fleet) -> FedAsyncState:
        """Have idle devices begin, wait for one answer, step."""
        r, settings = state.round + 1, self.settings
        order = Train(starts=(Start(model=state.model),), sgd=settings.sgd, codec=settings.codec, measure=False)
        busy = fleet.get_busy_devices()
        idle = [device.id for device in fleet.get_devices() if device.id not in busy and device.knows(order)]
        starts = state.starts | dict.fromkeys(idle, state.model)
        updates: dict[str, Trained] = {}
        model, tau, seen = state.model, state.staleness, state.seen
        async for answer in fleet.stream("train", dict.fromkeys(idle, order), seen):
            start = starts.pop(answer.device_id)
            if isinstance(answer.result, Trained):
                tau, updates = r - answer.round, {answer.device_id: answer.result}
                model = self.mixed(state, fleet, start, answer.result.update, tau)
                norms = fleet.get_norms(answer.result.update, state.layout)
                seen = (*seen, AcceptedUpdate(norms=norms, n_samples=answer.result.n_samples))[-20:]
                break
        return finish_round(state, len(idle), updates, model=model, starts=starts, staleness=tau, seen=seen)

    def mixed(self, state: FedAsyncState, fleet: Fleet, start: BlobRef, update: BlobRef, tau: int) -> BlobRef:
        """The model after an answer that is `tau` steps old; the update is W_i - start."""
        alpha = self.options.alpha * (1 + tau) ** -self.options.a
        w, begun, change = (fleet.get(ref, state.layout) for ref in (state.model, start, update))
        step = Model(
            params=(alpha * (begun.params + change.params - w.params)).astype(np.float32),
            buffers=((1 - alpha) * w.buffers + alpha * change.buffers).astype(np.float32),
            counters=np.maximum(w.counters, change.counters),
        )
        return apply(state.model, step, state.layout, fleet)

    def summarise(self, state: FedAsyncState) -> dict[str, Any]:
        """With the staleness of the last answer."""
        return super().summarise(state) | {"staleness": state.staleness}
