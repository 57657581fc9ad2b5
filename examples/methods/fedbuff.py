"""FedBuff: the server never waits for the slowest; it steps whenever K updates have come, however old they are.

Source: Nguyen et al., "Federated Learning with Buffered Asynchronous Aggregation", AISTATS 2022, Algorithm 1.
Devices train all the time, each from the model that was the newest when it was asked. An update that began tau steps
ago counts s(tau) = 1 / sqrt(1 + tau), and with K of them in the buffer the server steps:

    w <- w + eta_g / K * sum_i s(tau_i) Delta_i

A round is such a step. Departures: who has answered is asked again when the next step begins, not at once; running
statistics are means with weights s(tau); where nobody works any more a step is made of what has come.

    export PYTHONPATH=examples
    fedge compare --hardware mixed --methods fedavg,methods.fedbuff:FedBuff

    fedge sample --devices 12
    fedge coordinator --broker localhost:1883 --federation shop --home server --task digits --devices 12 \
        --method methods.fedbuff:FedBuff --option buffer_size=4
    fedge agent --broker localhost:1883 --federation shop --id cam1 --home cam1 --task digits --data samples/cam1.npz
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, ClassVar

import numpy as np
from msgspec import Meta, Struct

from coordinator.fleet import Answer, Fleet
from coordinator.methods import Method, State, round_done, round_rng
from coordinator.selection import cohort_size, uniform
from fedge.messages import BlobRef
from fedge.steps.train import Start, Train, Trained
from fedge.tensors import Layout, Model, unflatten


class FedBuffOptions(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`buffer_size`: K, updates in a step of the server; `server_rate`: eta_g."""

    buffer_size: Annotated[int, Meta(ge=1, le=10_000)] = 10
    server_rate: Annotated[float, Meta(gt=0, le=100)] = 1.0


class FedBuffState(State, frozen=True, kw_only=True):
    """`model`: w. `staleness`: mean tau of the last step. Who is at work the fleet knows."""

    model: BlobRef
    staleness: float = 0.0


class FedBuff(Method[FedBuffState]):
    """Algorithm 1; `--participation`: the share of the devices that work at a time (the paper's concurrency)."""

    name = "fedbuff"
    Options: ClassVar[type[Struct]] = FedBuffOptions

    def init(self, layout: Layout, model: BlobRef) -> FedBuffState:
        """The state before the first step."""
        return FedBuffState(round=0, layout=layout, model=model)

    async def round(self, state: FedBuffState, fleet: Fleet) -> FedBuffState:
        """Have idle devices begin, fill the buffer, step."""
        r, settings = state.round + 1, self.settings
        order = Train(starts=(Start(model=state.model),), sgd=settings.sgd, codec=settings.codec, measure=False)
        there, busy = [device.id for device in fleet.devices() if device.knows(order)], fleet.busy()
        idle = [i for i in there if i not in busy]
        n = min(len(idle), max(0, cohort_size(len(there), settings.participation) - len(busy)))
        buffer: list[Answer] = []
        async for answer in fleet.stream("train", dict.fromkeys(uniform(idle, n, round_rng(settings, r)), order)):
            if isinstance(answer.result, Trained):
                buffer.append(answer)
            if len(buffer) == self.options.buffer_size:
                break
        tau = np.array([r - answer.round for answer in buffer])
        updates = {answer.device_id: answer.result for answer in buffer if isinstance(answer.result, Trained)}
        model = self.stepped(state, fleet, list(updates.values()), 1 / np.sqrt(1 + tau))
        return round_done(state, n, updates, model=model, staleness=float(tau.mean()) if buffer else 0.0)

    def stepped(self, state: FedBuffState, fleet: Fleet, updates: Sequence[Trained], s: np.ndarray) -> BlobRef:
        """The model after a step with these updates and weights (n,), in the order in which they came."""
        if not updates:
            return state.model
        w = fleet.get(state.model, state.layout)
        found = [fleet.get(update.update, state.layout) for update in updates]
        delta = sum(s_i * change.params.astype(np.float64) for s_i, change in zip(s, found, strict=True)) / len(found)
        model = Model(
            params=(w.params + self.options.server_rate * delta).astype(np.float32),
            buffers=np.average([change.buffers for change in found], axis=0, weights=s).astype(np.float32),
            counters=np.max([change.counters for change in found], axis=0),
        )
        return fleet.put(unflatten(model, state.layout))

    def serves(self, state: FedBuffState, device_id: str) -> BlobRef:  # noqa: ARG002 - all the same
        """The newest model."""
        return state.model

    def summary(self, state: FedBuffState) -> dict[str, Any]:
        """With the staleness of the last step."""
        return super().summary(state) | {"staleness": state.staleness}
