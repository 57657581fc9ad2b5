"""Prediction over MQTT: a sensor publishes an inference request, and the device answers.

The request is Open Inference Protocol JSON on agents/{id}/predict. With MQTT 5 the answer goes to the message's
response topic, with the message's correlation data. Without a response topic it goes to agents/{id}/predictions,
identified by the request's `id`. True labels come on agents/{id}/feedback and are answered in the same way
(`ServedModel.learn`). Bad input is answered with {"error": ...}.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Any, Final, Self

import msgspec

from deploy.serving.batching import BusyError
from deploy.serving.endpoints import ServedModel
from fedge.errors import ConfigError, StoreError, TooLargeError, TransportError
from fedge.system.logs import Lines
from fedge.wire.connection.broker import Inbound
from fedge.wire.topics import ROOT, Topics
from fedge.wire.transport import Transport

log = logging.getLogger("fedge.deploy")

MAX_OPEN: Final = 32
"""Most requests being answered at a time; the broker holds back the others."""
MAX_LEVELS: Final = 32
"""Most levels of an answer's topic. A broker may close the connection on a topic with too many levels (Mosquitto: 200),
and again whenever the message is repeated."""
EXPIRES_S: Final = 60
"""Lifetime of an answer in seconds; a sensor that has not fetched it by then has asked again."""


class SensorEndpoint:
    """Answers sensor requests. Async context manager, entered inside its transport; on exit open requests are dropped.

    Requests may come whenever the transport is connected; outside this context they wait.
    """

    def __init__(self, model: ServedModel, transport: Transport, federation: str, device_id: str) -> None:
        topics = Topics(federation)
        self.topic = topics.make_agent_topic(device_id, "predict")
        self.feedback_topic = topics.make_agent_topic(device_id, "feedback")
        self._answers = topics.make_agent_topic(device_id, "predictions")
        self._model = model
        self._transport = transport
        self._free = asyncio.Semaphore(MAX_OPEN)
        self._tasks = asyncio.TaskGroup()
        self._entered = asyncio.Event()
        self._lines = Lines()

    async def __aenter__(self) -> Self:
        await self._tasks.__aenter__()
        self._entered.set()
        return self

    async def __aexit__(self, *error: Any) -> None:
        self._entered.clear()
        await self._tasks.__aexit__(*error)

    async def handle(self, message: Inbound) -> None:
        """Accept a request; the answer is published when ready."""
        if message.retained:
            self._lines.warning(log, "event=ignored topic=%s reason='a sample must not be retained'", message.topic)
            return
        await self._free.acquire()
        await self._entered.wait()
        self._tasks.create_task(self._answer(message)).add_done_callback(lambda _: self._free.release())

    async def _answer(self, message: Inbound) -> None:
        try:
            work = self._model.learn if message.topic == self.feedback_topic else self._model.infer
            payload = (await work(message.payload)).body
        except (ConfigError, StoreError, BusyError) as error:
            payload = self._make_refusal(str(error))
        except Exception:  # noqa: BLE001 - it is logged
            self._lines.log(log, logging.ERROR, "event=request_failed topic=%s", message.topic, traceback=True)
            payload = self._make_refusal("the model failed; the device's log says why")
        topic = message.response_topic
        if topic is not None and not self._may_answer(topic):
            payload, topic = (
                self._make_refusal(f"no answer goes to {topic[:100]}; ask for {self._answers} or below"),
                None,
            )
        await self._publish(topic or self._answers, payload, message.correlation)

    async def _publish(self, topic: str, payload: bytes, correlation: bytes | None) -> None:
        try:
            try:
                await self._transport.publish(topic, payload, expires_in_s=EXPIRES_S, correlation=correlation)
            except TooLargeError:
                payload = self._make_refusal(
                    "the answer is larger than the broker takes; ask for fewer outputs or samples"
                )
                await self._transport.publish(topic, payload, expires_in_s=EXPIRES_S, correlation=correlation)
        except (TransportError, StoreError) as error:  # the topic alone may already be too long
            self._lines.warning(log, "event=answer_refused topic=%s reason=%r", topic, str(error))

    def _may_answer(self, topic: str) -> bool:
        """Return whether an answer may go to a topic, since senders must not make this device write anywhere else."""
        if set(topic) & set("+#\0") or topic.count("/") >= MAX_LEVELS:
            return False
        ours = topic == self._answers or topic.startswith(f"{self._answers}/")
        return ours or not topic.startswith((f"{ROOT}/", "$"))

    def _make_refusal(self, error: str) -> bytes:
        self._lines.warning(log, "event=refused name=sample topic=%s detail=%r", self.topic, error)
        return msgspec.json.encode({"error": error})
