"""A sensor publishes a sample over a real broker, and the device answers where it asked for the answer."""

import asyncio
import contextlib
import json

import pytest

pytest.importorskip("amqtt")  # where it is missing there are no brokers to test with

from deploy.serving.feedback import Feedback
from deploy.serving.sensor import SensorEndpoint
from deploy.updates.answering import ActiveBundle
from deploy.updates.examination import Limits
from deploy.updates.slots import Slots
from edge_agent.samples import SampleStore
from fedge.errors import TooLargeError
from fedge.wire.connection.broker import Inbound
from fedge.wire.topics import Topics
from tests.support.broker import ask, transport

from ..bundles import GOLDEN, source
from ..served import body, golden, outputs, served

EXPECTED = golden()
X = EXPECTED["x"]
TOPICS = Topics("shop")
FEEDBACK = TOPICS.make_agent_topic("cam1", "feedback")
PREDICT, PREDICTIONS = TOPICS.make_agent_topic("cam1", "predict"), TOPICS.make_agent_topic("cam1", "predictions")


class Publisher:
    """A sensor: what it publishes, and what comes back."""

    def __init__(self, broker, link):
        self.broker = broker
        self.link = link
        self.answers = asyncio.Queue()

    async def receive(self, message):
        await self.answers.put(message)

    async def ask(self, payload, answer_to, correlation=b""):
        await ask(self.broker, PREDICT, payload, answer_to, correlation)

    async def answer(self):
        return await asyncio.wait_for(self.answers.get(), 300)


@contextlib.asynccontextmanager
async def answering(broker, **batching):
    """A device that answers, and a sensor that listens."""
    device = transport(broker, "serve:shop:cam1")
    async with served(**batching) as model:
        sensor = SensorEndpoint(model, device, "shop", "cam1")
        await device.subscribe(sensor.topic, sensor.handle)
        link = transport(broker, "sensor")
        publisher = Publisher(broker, link)
        await link.subscribe(f"{PREDICTIONS}/#", publisher.receive)
        await link.subscribe("sensors/7", publisher.receive)
        async with device, sensor, link:
            yield publisher


async def test_without_a_response_topic_the_id_tells_whose_answer_it_is(broker):
    async with answering(broker) as sensor:
        for i in range(3):
            await sensor.link.publish(PREDICT, body(X[i : i + 1], id=f"sample-{i}"))
        for _ in range(3):
            message = await sensor.answer()
            assert message.topic == PREDICTIONS
            i = int(json.loads(message.payload)["id"].removeprefix("sample-"))
            assert outputs(message.payload)["class"]["data"] == [EXPECTED["y"][i]]


async def test_with_mqtt_5_it_answers_on_the_response_topic_with_the_correlation_data(broker):
    async with answering(broker) as sensor:
        if sensor.link.protocol != "5":
            pytest.skip("this broker knows MQTT 3.1.1 alone")
        await sensor.ask(body(X[:2]), "sensors/7", b"\x00\xff7")
        message = await sensor.answer()
        assert (message.topic, message.correlation) == ("sensors/7", b"\x00\xff7")
        assert outputs(message.payload)["class"]["data"] == EXPECTED["y"][:2].tolist()

        orders = TOPICS.make_agent_topic("cam1", "reports")
        await sensor.ask(body(X[:1]), orders, b"8")
        message = await sensor.answer()
        assert (message.topic, message.correlation) == (PREDICTIONS, b"8")
        assert "no answer goes to" in json.loads(message.payload)["error"]

        deep = "/".join("a" * 201)  # on which Mosquitto would close the device's connection
        await sensor.ask(body(X[:1]), deep)
        assert "no answer goes to" in json.loads((await sensor.answer()).payload)["error"]

        await sensor.ask(body(X[:1]), f"{PREDICTIONS}/door")
        assert (await sensor.answer()).topic == f"{PREDICTIONS}/door"


async def test_bad_samples_are_answered_with_what_was_wrong_and_logged(broker, caplog):
    async with answering(broker) as sensor:
        for payload, says in (
            (b"", "not an inference request"),
            (b"\xff\x00", "not an inference request"),
            (b"[" * 100_000, "not an inference request"),
            (body(X[:1, :3]), "the task takes"),
            (body(X[:1], outputs=[{"name": "logits"}]), "there are probabilities"),
        ):
            await sensor.link.publish(PREDICT, payload)
            assert says in json.loads((await sensor.answer()).payload)["error"]
            assert says in caplog.text
        await sensor.link.publish(PREDICT, body(X[:1]))
        assert outputs((await sensor.answer()).payload)["class"]["data"] == [EXPECTED["y"][0]]


async def test_more_than_may_wait_are_all_answered_one_way_or_the_other(broker):
    n = 100
    async with answering(broker, max_waiting=2) as sensor:
        await asyncio.gather(*(sensor.link.publish(PREDICT, body(X[:1])) for _ in range(n)))
        answers = [json.loads((await sensor.answer()).payload) for _ in range(n)]
    assert any("outputs" in answer for answer in answers)
    assert all("outputs" in answer or "wait already" in answer["error"] for answer in answers)


async def test_a_retained_sample_is_old_and_ignored(broker):
    async with answering(broker) as sensor:
        await sensor.link.publish(PREDICT, body(X[:1], id="kept"), retain=True)
        assert json.loads((await sensor.answer()).payload)["id"] == "kept"  # as it is published
    async with answering(broker) as sensor:
        await sensor.link.publish(PREDICT, body(X[:1], id="new"))
        assert json.loads((await sensor.answer()).payload)["id"] == "new"


@pytest.mark.parametrize(
    ("topic", "may"),
    [
        ("sensors/7", True),
        (PREDICTIONS, True),
        (f"{PREDICTIONS}/a/b", True),
        (f"{PREDICTIONS}x", False),
        (TOPICS.make_agent_topic("cam1", "reports"), False),
        (TOPICS.rollout, False),
        ("fedge/1/other/agents/a/orders", False),
        ("$SYS/broker", False),
        ("sensors/+", False),
        ("#", False),
    ],
)
async def test_where_answers_may_go(topic, may):
    class Wire:
        published = ()

        async def publish(self, *message, **properties):
            self.published = (*self.published, message)

    wire = Wire()
    async with served() as model, SensorEndpoint(model, wire, "shop", "cam1") as sensor:
        await sensor.handle(Inbound(PREDICT, body(X[:1]), False, topic, None))
    ((answered, payload),) = wire.published
    assert answered == (topic if may else PREDICTIONS)
    assert ("outputs" in json.loads(payload)) == may


async def test_an_answer_larger_than_the_broker_takes_is_said():
    class Wire:
        published = ()

        async def publish(self, topic, payload, **properties):
            if len(payload) > 300:
                raise TooLargeError("too large")
            self.published = (*self.published, payload)

    wire = Wire()
    async with served() as model, SensorEndpoint(model, wire, "shop", "cam1") as sensor:
        await sensor.handle(Inbound(PREDICT, body(X), False))
    (payload,) = wire.published
    assert "fewer outputs" in json.loads(payload)["error"]


async def test_one_that_leaves_no_room_for_any_answer_ends_nothing():
    class Wire:
        published = ()

        async def publish(self, topic, payload, *, correlation, **properties):
            if correlation:
                raise TooLargeError("too large")
            self.published = (*self.published, payload)

    wire = Wire()
    async with served() as model, SensorEndpoint(model, wire, "shop", "cam1") as sensor:
        await sensor.handle(Inbound(PREDICT, b"", False, "sensors/7", b"x" * 60_000))
        await asyncio.sleep(0.05)
        await sensor.handle(Inbound(PREDICT, body(X[:1]), False))
    (payload,) = wire.published
    assert "outputs" in json.loads(payload)


async def test_a_request_that_comes_while_the_device_still_connects_is_answered():
    class Wire:
        published = ()

        async def publish(self, *message, **properties):
            self.published = (*self.published, message)

    wire = Wire()
    async with served() as model:
        sensor = SensorEndpoint(model, wire, "shop", "cam1")
        early = asyncio.create_task(sensor.handle(Inbound(PREDICT, body(X[:1]), False)))
        await asyncio.sleep(0)
        async with sensor:
            await early
    ((_, payload),) = wire.published
    assert "outputs" in json.loads(payload)


async def test_true_labels_come_beside_the_samples_and_are_answered_where_asked(broker, tmp_path):
    slots = Slots(tmp_path)
    slots.stage(*source(GOLDEN))
    slots.switch()
    bundle = ActiveBundle(slots, Limits())
    device, link = transport(broker, "serve:shop:cam1"), transport(broker, "sensor")
    with SampleStore(tmp_path, bundle.runtime.task) as store:
        async with served(bundle) as model:
            model.feedback = Feedback(bundle, store)
            sensor, publisher = SensorEndpoint(model, device, "shop", "cam1"), Publisher(broker, link)
            assert sensor.feedback_topic == FEEDBACK
            await device.subscribe(sensor.topic, sensor.handle)
            await device.subscribe(sensor.feedback_topic, sensor.handle)
            await link.subscribe(PREDICTIONS, publisher.receive)
            async with device, sensor, link:
                await link.publish(PREDICT, body(X[:1], id="7"))
                await publisher.answer()
                for fields, says in (({"id": "7", "label": "3"}, "stored"), ({"id": "8", "label": "3"}, "error")):
                    await link.publish(FEEDBACK, json.dumps(fields).encode())
                    assert says in json.loads((await publisher.answer()).payload)
        assert [bundle.runtime.task.classes[i] for i in store.read_labelled().y] == ["3"]
