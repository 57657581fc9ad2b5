"""A served model, which turns the bytes of an inference request into those of its response, over any transport."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from deploy.inference.prediction import Coverage, Prediction
from deploy.inference.runtime import Runtime
from deploy.serving import protocol
from deploy.serving.batching import Answer, Batcher, BusyError
from deploy.serving.feedback import Feedback
from deploy.updates.answering import ActiveBundle
from deploy.updates.drift import Drift
from edge_agent.samples.answers import AnswerCount
from fedge.bundle.manifest import Manifest
from fedge.data.task import TaskSpec
from fedge.errors import ConfigError
from fedge.wire.messages import DriftKind


class FixedModel:
    """A bundle that never changes; only one thread at a time may call `answer`."""

    def __init__(self, runtime: Runtime) -> None:
        self.runtime = runtime
        self._drift = Drift(runtime.reference)

    @property
    def drift_kind(self) -> DriftKind | None:
        """In which way inputs have left the bundle's reference; None if they have not, or without a reference."""
        return self._drift.kind

    def answer(self, x: protocol.Samples) -> Answer:
        """Predict raw samples."""
        prediction = self.runtime.predict(x)
        problem, answers = self.runtime.task.problem, prediction.answers
        shares, surprise = problem.get_shares(answers), problem.get_surprise(answers)
        self._drift.observe(prediction.weights, prediction.energies, shares, surprise)
        return self.runtime, prediction

    def add_feedback(self, x: protocol.Samples, y: NDArray[Any]) -> None:
        """Do nothing, as there is no other bundle to compare with."""


Answers = FixedModel | ActiveBundle
"""A bundle that can be served: a fixed one, or the changing one of a device."""


@dataclass(eq=False)
class ServedModel:
    """A model under its name, which belongs to one event loop.

    `pictures` is a second pool, for reading PNG and JPEG files and for labelled samples. `feedback` takes labels; None
    for a fixed bundle, or with the reason why there is no store of samples (`no_store`).
    """

    name: str
    model: Answers
    batcher: Batcher
    pictures: Executor
    feedback: Feedback | None = None
    no_store: str = ""

    def __post_init__(self) -> None:
        self.statistics = self.batcher.statistics
        self._keeping: asyncio.Future[None] | None = None  # of unlabelled samples

    @property
    def runtime(self) -> Runtime:
        """The bundle in service."""
        return self.model.runtime

    @property
    def manifest(self) -> Manifest:
        """The manifest of the bundle in service."""
        return self.model.runtime.manifest

    @property
    def has_sets(self) -> bool:
        """Whether answers come with prediction sets."""
        return self.model.runtime.coverage is not None

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
            request = protocol.decode(body, header_bytes, protocol.list_outputs(self.manifest, sets=self.has_sets))
            x = await self._load_samples(request.x)
        y = None if request.target is None else self._parse_target(request.target, len(x))
        runtime, prediction = await self.batcher.predict(x)
        if y is not None:
            await self._take_label(x, y, runtime, prediction)
        elif self.feedback is not None:
            self._remember(request.id, x, runtime, prediction)
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
        if left_out := runtime.left_out:
            parameters["left_out"] = ",".join(left_out)
        if prediction.coverage is not None:
            parameters |= _describe_coverage(prediction.coverage)
        with self.statistics.written.measure():
            return protocol.encode(self.name, runtime.manifest, request, prediction, parameters)

    async def _take_label(self, x: NDArray[Any], y: NDArray[Any], runtime: Runtime, prediction: Prediction) -> None:
        """Take the target that came with a request."""
        loop = asyncio.get_running_loop()
        if self.feedback is None:
            await loop.run_in_executor(self.pictures, self.model.add_feedback, x, y)
        else:
            work = partial(self.feedback.add, x, y, answered=(runtime, prediction))
            await loop.run_in_executor(self.pictures, work)

    def _remember(self, request: str | None, x: NDArray[Any], runtime: Runtime, prediction: Prediction) -> None:
        """Remember a request whose label may come; keep its samples if the owner wants that and the pool is free."""
        assert self.feedback is not None
        if request is not None and len(x) == 1:
            self.feedback.remember(request, x, runtime, prediction)
        if self.feedback.store.keeps_unlabelled and (self._keeping is None or self._keeping.done()):
            loop = asyncio.get_running_loop()
            self._keeping = loop.run_in_executor(self.pictures, self.feedback.save_unlabelled, x)

    async def count_answers(self) -> list[AnswerCount]:
        """Count right and wrong answers to unmarked samples that were labelled later, by day, release and class.

        Raises:
            StoreError: the store cannot be read.
        """
        if self.feedback is None:
            return []
        count = self.feedback.store.count_answers
        return await asyncio.get_running_loop().run_in_executor(self.pictures, count)

    async def learn(self, body: bytes, header_bytes: int | None = None) -> protocol.Response:
        """Answer feedback once it is on the disk.

        Raises:
            ConfigError: the feedback is malformed, does not fit the task, or has no place to go; the text says why.
            StoreError: it cannot be written.
        """
        default = self.manifest.task.problem.get_default_target()
        given = protocol.decode_feedback(body, header_bytes, needs_target=default is None)
        feedback = self.feedback
        if feedback is None:
            raise ConfigError(
                self.no_store
                or f"{self.name} is a bundle alone, which keeps no samples: serve a device's home (--home)"
            )
        y = self._parse_targets(given.targets)
        run = asyncio.get_running_loop().run_in_executor
        if given.x is None:
            if default is not None and not given.targets:
                y = np.stack([default] * len(given.ids))
            work = partial(feedback.add_of_requests, given.ids, y, sensitive=given.sensitive)
            await run(self.pictures, work)
            return protocol.encode_feedback(self.name, given, len(y), len(y))
        x = await self._load_samples(given.x)
        if default is not None and not given.targets:
            y = np.stack([default] * len(x))
        if len(x) != len(y):
            raise ConfigError(f"there are {len(x)} samples and {len(y)} {given.word}; give one for each")
        stored = await run(self.pictures, partial(feedback.add, x, y, sensitive=given.sensitive))
        return protocol.encode_feedback(self.name, given, len(y), stored)

    def _parse_targets(self, targets: Sequence[Any]) -> NDArray[Any]:
        """Return the converted targets of samples, (n, ...)."""
        task = self.manifest.task
        try:
            return _read_targets(task, targets)
        except ConfigError:
            if self.feedback is None:
                raise
        return _read_targets(self.feedback.store.refresh_task(), targets)  # a class may have joined meanwhile

    def _parse_target(self, target: Any, n: int) -> NDArray[Any]:
        """Return the converted target (1, ...) of a request with n samples."""
        if n != 1:
            raise ConfigError(f"the parameters label and target are for a request with one sample, not {n}")
        return self._parse_targets([target])

    async def _load_samples(self, x: protocol.Samples | tuple[bytes, ...]) -> NDArray[Any]:
        runtime = self.model.runtime
        if isinstance(x, tuple):
            loop = asyncio.get_running_loop()
            x = await loop.run_in_executor(self.pictures, protocol.load_images, runtime.task, x)
        return runtime.add_batch_axis(x)


def _describe_coverage(how: Coverage) -> protocol.Parameters:
    """Return the parameters that say what the sets promise, the level that labels have led to, and if they hold all."""
    level = min(1.0, max(0.0, 1 - how.alpha))
    return {"coverage": how.wanted, "coverage_level": round(level, 4), "sets_hold_all": how.threshold == math.inf}


def _read_targets(task: TaskSpec, targets: Sequence[Any]) -> NDArray[Any]:
    found = [task.problem.read_target(target, task.input_shape) for target in targets]
    return np.stack(found) if found else task.problem.make_no_targets(task.input_shape)


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
