"""Labels that come to a device: with their samples or later, over HTTP and MQTT; what was answered is on the disk."""

import asyncio
import contextlib
import json
import os
import signal
from importlib.util import find_spec

import numpy as np
import pytest

pytest.importorskip("aiohttp")

from deploy.inference.engines import EngineOptions
from deploy.inference.runtime import load
from deploy.serving.endpoints import FixedModel
from deploy.serving.feedback import MAX_REMEMBERED, Feedback
from deploy.updates.answering import ActiveBundle
from deploy.updates.examination import Limits
from deploy.updates.link import Link
from deploy.updates.slots import Slots
from edge_agent.samples import SampleStore
from fedge.data.classes import add_classes
from fedge.errors import ConfigError
from fedge.wire.messages import AtWork

from ..bundles import GOLDEN, source, variant
from ..serve_process import process
from ..served import binary, body, golden, outputs, served

pytestmark = pytest.mark.torch_free

X = golden()["x"]


@pytest.fixture
def home(tmp_path):
    slots = Slots(tmp_path / "home")
    slots.stage(*source(GOLDEN))
    slots.switch()
    slots.confirm()
    return tmp_path / "home"


@contextlib.asynccontextmanager
async def device(home):
    """A served device, and its store."""
    answering = ActiveBundle(Slots(home), Limits(probation_predictions=10**9))
    with SampleStore(home, answering.runtime.task) as store:
        async with served(answering) as model:
            model.feedback = Feedback(answering, store)
            yield model, store


def feedback(x=None, **fields):
    """Feedback in JSON."""
    inputs = [] if x is None else json.loads(body(x))["inputs"]
    return json.dumps({"inputs": inputs, **fields} if inputs else fields).encode()


def predicted(x):
    """The names of the classes that the golden bundle says."""
    return load(GOLDEN).predict(x).class_name


async def test_samples_with_labels_are_stored_and_count_at_work(home):
    names = list(predicted(X[:3]))
    wrong = next(name for name in load(GOLDEN).task.classes if name != names[2])
    async with device(home) as (model, store):
        answer = json.loads((await model.learn(feedback(X[:3], labels=[*names[:2], wrong]))).body)
        assert answer == {"model_name": "digits", "labels": 3, "stored": 3}
        again = json.loads((await model.learn(feedback(X[:1], label=names[0]))).body)
        assert again["stored"] == 0

        found = store.read_labelled()
        assert np.array_equal(np.asarray(found.x).reshape(3, 8, 8), X[:3])
        assert [model.manifest.task.classes[i] for i in found.y] == [*names[:2], wrong]
        assert store.count_recent_answers(10) == (2, 1)
        assert sum(one.right for one in await model.count_answers()) == 2


async def test_binary_samples_and_marks(home):
    data, length = binary(X[:1])
    head = json.loads(data[:length])
    text = json.dumps({"inputs": head["inputs"], "label": "1", "sensitive": True}).encode()
    async with device(home) as (model, store):
        await model.learn(text + data[length:], len(text))
        assert store.read_labelled().sensitive.tolist() == [True]
        assert store.count_recent_answers(10) == (0, 0)
        assert await model.count_answers() == []


async def test_the_label_of_an_earlier_request_comes_by_its_id(home):
    (name,) = predicted(X[:1])
    async with device(home) as (model, store):
        await model.infer(body(X[:1], id="r1"))
        assert len(store.read_labelled().y) == 0

        answer = json.loads((await model.learn(feedback(id="r1", label=name))).body)

        assert answer == {"model_name": "digits", "labels": 1, "stored": 1, "id": "r1"}
        assert len(store.read_labelled().y) == 1
        assert store.count_recent_answers(10) == (1, 0)


async def test_the_label_of_an_inference_is_stored_too(home):
    async with device(home) as (model, store):
        await model.infer(body(X[:1], parameters={"label": "7"}))
        assert [model.manifest.task.classes[i] for i in store.read_labelled().y] == ["7"]


async def test_labels_speak_of_the_bundle_whichever_way_they_come(home):
    names = load(GOLDEN).task.classes
    wrong = [next(n for n in names if n != said) for said in predicted(X)]
    async with device(home) as (model, _):
        for i, name in enumerate(wrong):
            await model.infer(body(X[i : i + 1], id=str(i)))
            await model.learn(feedback(id=str(i), label=name))
        await model.learn(feedback(X, labels=wrong))
        await model.infer(body(X[:1], parameters={"label": wrong[0]}))
        told = [one.right for one in model.model._drift._labelled]
        assert told == [False] * (2 * len(X) + 1)
        assert model.model.n_labelled == len(told)


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"", "the body is not feedback"),
        (b'{"id": "x", "label": "1", "lable": "2"}', "lable"),
        (feedback(label="1"), "give the input x or the id"),
        (feedback(X[:1], id="r", label="1"), "give the input x or the id"),
        (feedback(X[:1]), "the label is missing"),
        (feedback(X[:1], label="eleven"), "'eleven' is not a class"),
        (feedback(X[:2], label="1"), "there are 2 samples and 1 labels"),
        (feedback(ids=["a", "b"], label="1"), "there are 2 ids and 1 labels"),
        (feedback(id="never", label="1"), "'never' is not remembered"),
        (feedback(np.zeros((1, 3, 3), np.uint8), label="1"), "shape"),
    ],
)
async def test_what_is_wrong_is_said_and_nothing_is_stored(home, data, says):
    async with device(home) as (model, store):
        with pytest.raises(ConfigError, match=says):
            await model.learn(data)
        assert len(store.read_labelled().y) == 0


async def test_labels_of_a_class_that_has_joined_are_stored_before_any_bundle_knows_it(home):
    async with device(home) as (model, store):
        grown = add_classes(store.task, ("newcomer",))
        data = feedback(X[:2], labels=["newcomer", predicted(X)[1]])
        with pytest.raises(ConfigError, match="--add-class"):
            await model.learn(data)
        SampleStore(home, grown).close()  # as the agent does, when it has heard of it
        await model.learn(data)
        assert grown.n_classes - 1 in store.read_labelled().y
        assert store.count_recent_answers(9) == (1, 1)


async def test_a_bundle_alone_keeps_no_samples():
    async with served(FixedModel(load(GOLDEN))) as model:
        with pytest.raises(ConfigError, match="serve a device's home"):
            await model.learn(feedback(X[:1], label="1"))


async def test_inputs_without_labels_are_kept_only_if_the_owner_says_so(home):
    async with device(home) as (model, store):
        await model.infer(body(X[:2]))
        assert store.list_samples() == []
    (home / "samples.toml").write_text("[samples]\nunlabelled = 10\n")
    async with device(home) as (model, store):
        await model.infer(body(X[:2]))
        await model._keeping
        assert [sample.label for sample in store.list_samples()] == [None, None]


async def test_what_is_remembered_is_bounded(home):
    async with device(home) as (model, _):
        answer = model.runtime.predict(X[:1])
        for i in range(MAX_REMEMBERED + 10):
            model.feedback.remember(str(i), X[:1], model.runtime, answer)
        assert len(model.feedback._recent) == MAX_REMEMBERED


async def test_the_level_of_prediction_sets_follows_labels_and_outlives_the_process(tmp_path):
    slots = Slots(tmp_path / "home")
    slots.stage(*source(variant(tmp_path / "scored", release=2, scores=[i / 1000 for i in range(20)])))
    slots.switch()
    slots.confirm()
    names = list(predicted(X[:2]))
    wrong = next(name for name in load(GOLDEN).task.classes if name not in names)
    async with process("--home", tmp_path / "home", "--coverage", 0.9) as (child, said, session):
        url, seen = f"/v2/models/{said['models'][0]}", []
        told = {"parameters": {"label": wrong}}
        for fields in ({"id": "r1"}, told, told, {}):
            async with session.post(f"{url}/infer", data=body(X[:1], **fields)) as response:
                seen.append((await response.json())["parameters"])
        async with session.post(f"{url}/feedback", data=feedback(id="r1", label=wrong)) as response:
            assert response.status == 200
        async with session.post(f"{url}/infer", data=body(X[:1])) as response:
            last = await response.json()
        os.kill(child.pid, signal.SIGKILL)
        await asyncio.wait_for(child.wait(), 60)
    levels = [one["coverage_level"] for one in (*seen, last["parameters"])]
    assert levels == [0.9, 0.9, 0.918, 0.936, 0.954]
    assert last["parameters"]["sets_hold_all"]
    assert last["parameters"]["coverage"] == 0.9
    assert set(outputs(json.dumps(last).encode())["set"]["data"]) == {True}
    again = ActiveBundle(Slots(tmp_path / "home"), Limits(), EngineOptions(coverage=0.9))
    assert again.answer(X[:1])[1].coverage.alpha == pytest.approx(0.046)


def test_the_coverage_at_work_is_told_with_the_score(tmp_path):
    slots = Slots(tmp_path / "home")
    slots.stage(*source(variant(tmp_path / "scored", release=2, scores=[i / 1000 for i in range(20)])))
    slots.switch()
    slots.confirm()
    answering = ActiveBundle(slots, Limits(), EngineOptions(coverage=0.9))
    with SampleStore(tmp_path / "home", answering.runtime.task) as store:
        link = Link("cam1", "shop", tmp_path / "home", slots, answering, store=store)
        (right,) = answering.runtime.predict(X[:1]).class_index
        Feedback(answering, store).add(X[:2], np.array([right, right]))
        link._watch_drift()
        assert link._make_health().at_work == AtWork(right=1, wrong=1, covered=0.5, coverage=0.9)


async def test_what_a_process_acknowledged_outlives_its_death(home):
    (name,) = predicted(X[:1])
    async with process("--home", home) as (child, said, session):
        url = f"/v2/models/{said['models'][0]}"
        async with session.post(f"{url}/infer", data=body(X[1:2], id="late")) as response:
            assert response.status == 200
        for data in (feedback(X[:1], label=name), feedback(id="late", label="3")):
            async with session.post(f"{url}/feedback", data=data) as response:
                assert response.status == 200, await response.text()
        async with session.post(f"{url}/feedback", data=feedback(X[:1], label="dog")) as response:
            assert response.status == 400
        async with session.get("/metrics") as response:
            text = await response.text()
        os.kill(child.pid, signal.SIGKILL)
        await asyncio.wait_for(child.wait(), 60)

    if find_spec("prometheus_client") is not None:
        assert "fedge_serve_labelled_answers{" in text
    with SampleStore(home) as store:
        found = store.read_labelled()
        assert np.array_equal(np.asarray(found.x).reshape(-1, 8, 8), X[:2])
        right, wrong = store.count_recent_answers(10)
        assert right + wrong == 2
