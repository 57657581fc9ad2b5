"""A served model, which turns the bytes of an inference request into those of its response, over any transport."""

from __future__ import annotations

import asyncio
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from deploy.inference.runtime import Runtime
from deploy.serving import protocol
from deploy.serving.batching import Answer, Batcher, BusyError
from deploy.updates.answering import ActiveBundle
from deploy.updates.drift import Drift
from fedge.bundle.manifest import Manifest, Reference
from fedge.errors import ConfigError
from fedge.wire.messages import DriftKind


class FixedModel:
    """A bundle that never changes; only one thread at a time may call `answer`."""

    def __init__(self, runtime: Runtime) -> None:
        self.runtime = runtime
        reference = runtime.manifest.reference
        self._drift = Drift(reference if isinstance(reference, Reference) else None)

    @property
    def drift_kind(self) -> DriftKind | None:
        """In which way inputs have left the bundle's reference; None if they have not, or without a reference."""
        return self._drift.kind

    def answer(self, x: protocol.Samples) -> Answer:
        """Predict raw samples."""
        prediction = self.runtime.predict(x)
        self._drift.observe(prediction.weights, prediction.energies, prediction.probabilities)
        return self.runtime, prediction

    def add_feedback(self, x: protocol.Samples, y: NDArray[np.integer]) -> None:
        """Do nothing, as there is no other bundle to compare with."""


Answers = FixedModel | ActiveBundle
"""A bundle that can be served: a fixed one, or the changing one of a device."""


@dataclass(eq=False)
class ServedModel:
    """A model under its name, which belongs to one event loop.

    `pictures` is a second pool, for reading PNG and JPEG files and comparing labelled samples.
    """

    name: str
    model: Answers
    batcher: Batcher
    pictures: Executor

    def __post_init__(self) -> None:
        self.statistics = self.batcher.statistics

    @property
    def runtime(self) -> Runtime:
        """The bundle in service."""
        return self.model.runtime

    @property
    def manifest(self) -> Manifest:
        """The manifest of the bundle in service."""
        return self.model.runtime.manifest

    @property
    def drift_kind(self) -> DriftKind | None:
        """In which way recent samples differ from those that the bundle is for; None if they do not."""
        return self.model.drift_kind

    async def infer(self, body: bytes, header_bytes: int | None = None) -> protocol.Response:
        """Answer a request.

        Raises:
            ConfigError: the request is malformed, or its samples do not fit the task; the text says what to change.
            BusyError: too many requests are waiting.
        """
        with self.statistics.measure_request(_get_outcome):
            return await self._answer(body, header_bytes)

    async def _answer(self, body: bytes, header_bytes: int | None) -> protocol.Response:
        with self.statistics.read.measure():
            request = protocol.decode(body, header_bytes)
            x = await self._read_samples(request)
        y = None if request.label is None else self._parse_label(request.label, len(x))
        runtime, prediction = await self.batcher.predict(x)
        if y is not None:
            await asyncio.get_running_loop().run_in_executor(self.pictures, self.model.add_feedback, x, y)
        parameters: protocol.Parameters = {
            "bundle": runtime.digest,
            "release": runtime.manifest.release,
            "engine": runtime.engine,
            "drifted": (kind := self.model.drift_kind) is not None,
            "latency_ms": round(prediction.latency_ms, 3),
        }
        if kind is not None:
            parameters["drift_kind"] = str(kind)
        if prediction.adapted:
            parameters["adapted"] = True
        with self.statistics.written.measure():
            return protocol.encode(self.name, runtime.manifest, request, prediction, parameters)

    def _parse_label(self, label: str, n: int) -> NDArray[np.int64]:
        """Return the class numbers (1,) of a request with n samples."""
        classes = self.manifest.task.classes
        if n != 1:
            raise ConfigError(f"the parameter label is for a request with one sample, not {n}")
        if label not in classes:
            raise ConfigError(f"the label {label[:100]!r} is not a class; there are {', '.join(classes)}"[:1000])
        return np.array([classes.index(label)])

    async def _read_samples(self, request: protocol.Request) -> NDArray[Any]:
        runtime, x = self.model.runtime, request.x
        if isinstance(x, tuple):
            loop = asyncio.get_running_loop()
            x = await loop.run_in_executor(self.pictures, protocol.load_images, runtime.task, x)
        return runtime.add_batch_axis(x)


def _get_outcome(error: BaseException) -> str | None:
    """Return the outcome by which `Statistics` counts a request with this error, or None if its client has gone."""
    match error:
        case ConfigError():
            return "refused"
        case BusyError():
            return "busy"
        case Exception():
            return "failed"
        case _:  # cancelled: the client has gone
            return None
