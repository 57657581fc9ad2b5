"""A fleet of workers in this process: the same `edge_agent.worker.Worker` that devices run, without a network.

Not durable on purpose: a simulation that dies is started again. Everything is deterministic for a seed.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from coordinator.fleet import Answer, Device, order_for
from coordinator.methods import Method, S
from edge_agent.cold_start import InferenceWorker
from edge_agent.worker import Worker
from fedge import codec
from fedge.errors import ProtocolError
from fedge.messages import Action, BlobRef, Codec, Context, blobs_of
from fedge.task import TaskSpec
from fedge.tensors import Layout, Model, Tensors, digest_of, from_bytes


class SimulatedFleet:
    """Workers by device id, asked one after the other.

    `contexts`: what each device reports of itself; `seconds`: how long a device takes for a report, as the simulated
    clock has it (default: it takes no time).
    """

    def __init__(
        self,
        task: TaskSpec,
        layout: Layout,
        workers: Mapping[str, Worker | InferenceWorker],
        *,
        seed: int,
        contexts: Mapping[str, Context] | None = None,
        seconds: Callable[[str], float] = lambda _: 0.0,
    ) -> None:
        self.round = 0
        self.bytes_up = 0
        self.bytes_down = 0
        self._task = task
        self._layout = layout
        self._workers = dict(sorted(workers.items()))
        self._seed = seed
        self._contexts = contexts or {}
        self._seconds = seconds
        self._blobs: dict[str, bytes] = {}

    def devices(self) -> tuple[Device, ...]:
        """All workers that train."""
        return tuple(
            Device(i, w.data.n_shared, self._contexts.get(i)) for i, w in self._workers.items() if isinstance(w, Worker)
        )

    def inference_only(self) -> tuple[Device, ...]:
        """All that do not."""
        return tuple(
            Device(i, 0, self._contexts.get(i), trains=False)
            for i, w in self._workers.items()
            if not isinstance(w, Worker)
        )

    async def run(self, step: str, actions: Mapping[str, Action]) -> dict[str, Answer]:
        """Execute the actions in ascending device id; a worker's exception is a bug and is raised."""
        return {i: self._ask(i, step, actions[i]) for i in sorted(actions)}

    def _ask(self, device_id: str, step: str, action: Action) -> Answer:
        order = order_for("simulation", self._seed, self.round, step, device_id, self._task, action, deadline=0.0)
        outcome = self._workers[device_id].execute(order, self._fetch)
        self._blobs |= outcome.blobs
        self.bytes_up += sum(len(data) for data in outcome.blobs.values())
        return Answer(device_id, outcome.result, self._seconds(device_id))

    def _fetch(self, ref: BlobRef) -> bytes:
        data = self._blobs[ref.digest]
        self.bytes_down += len(data)
        return data

    def put(self, tensors: Mapping[str, NDArray[np.generic]], codec_: Codec = Codec.FLOAT32) -> BlobRef:
        """Keep tensors in memory."""
        data = codec.encode(tensors, codec_)
        ref = BlobRef(digest=digest_of(data), size_bytes=len(data), codec=codec_)
        self._blobs[ref.digest] = data
        return ref

    def put_bytes(self, data: bytes) -> BlobRef:
        """Keep a file in memory."""
        ref = BlobRef(digest=digest_of(data), size_bytes=len(data))
        self._blobs[ref.digest] = data
        return ref

    def get(self, ref: BlobRef, layout: Layout) -> Model:
        """A model or an update."""
        if ref.digest not in self._blobs:
            raise ProtocolError("unknown-blob", ref.digest)
        return codec.decode(self._blobs[ref.digest], ref.codec, layout)

    def get_tensors(self, ref: BlobRef) -> Tensors:
        """Tensors that were `put`."""
        return from_bytes(self._blobs[ref.digest])

    def keep_only(self, digests: Collection[str]) -> None:
        """Forget all other tensors."""
        self._blobs = {digest: data for digest, data in self._blobs.items() if digest in digests}


async def run(
    method: Method[S],
    state: S,
    fleet: SimulatedFleet,
    on_round: Callable[[dict[str, Any]], None] = lambda _: None,
) -> S:
    """Run a method to its end on a simulated fleet."""
    while not method.done(state):
        fleet.round = state.round + 1
        state = await method.round(state, fleet)
        fleet.keep_only({ref.digest for ref in blobs_of(state)})
        on_round(method.summary(state))
    return state
