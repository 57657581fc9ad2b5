"""From a request's bytes to its response's, by a bundle that stays and by one that is switched."""

import asyncio
import base64
import io
import json

import numpy as np
import pytest
from PIL import Image

from deploy.inference.runtime import load
from deploy.serving import protocol
from deploy.serving.endpoints import FixedModel
from deploy.updates.answering import ActiveBundle
from deploy.updates.drift import WINDOW
from deploy.updates.examination import Limits
from deploy.updates.slots import Slots
from fedge.errors import ConfigError
from fedge.wire.messages import DriftKind

from ..bundles import GOLDEN, digest, other_gate, poor_gate, source, variant
from ..served import binary, body, golden, outputs, served

pytestmark = pytest.mark.torch_free

EXPECTED = golden()
X = EXPECTED["x"]


async def test_the_answer_is_that_of_the_runtime():
    async with served() as model:
        response = await model.infer(body(X))
    found = outputs(response)
    for name in ("probabilities", "weights", "energies"):
        values = np.array(found[name]["data"]).reshape(found[name]["shape"])
        np.testing.assert_allclose(values, EXPECTED[name], atol=1e-4)
    assert found["class"]["data"] == EXPECTED["y"].tolist()
    assert found["class_name"]["data"] == [str(y) for y in EXPECTED["y"]]
    parameters = json.loads(response.body)["parameters"]
    assert (parameters["bundle"], parameters["release"]) == (digest(GOLDEN), 3)
    assert parameters["drifted"] is False
    assert parameters["latency_ms"] > 0


async def test_the_answer_says_which_candidates_a_budget_leaves_out():
    bundle = GOLDEN.parent / "engines" / "bundle"
    for ms, left_out in ((1e6, None), (1e-6, "expert-1,expert-2,expert-3")):
        async with served(FixedModel(load(bundle, budget_ms=ms))) as model:
            response = await model.infer(body(X))
        assert json.loads(response.body)["parameters"].get("left_out") == left_out


@pytest.mark.parametrize("shape", [(8, 8), (1, 8, 8), (1, 1, 8, 8), (1, 8, 8, 1)])
async def test_a_single_sample_in_every_shape_that_the_runtime_takes(shape):
    async with served() as model:
        found = outputs(await model.infer(body(X[0].reshape(shape))))
    assert found["class"]["data"] == EXPECTED["y"][:1].tolist()


async def test_a_picture():
    file = io.BytesIO()
    Image.fromarray(X[0]).save(file, "PNG")
    text = base64.b64encode(file.getvalue()).decode()
    tensor = {"name": "x", "shape": [1], "datatype": "BYTES", "data": [text]}
    async with served() as model:
        found = outputs(await model.infer(json.dumps({"inputs": [tensor]}).encode()))
        broken = json.dumps({"inputs": [tensor | {"data": [text[:40]]}]}).encode()
        with pytest.raises(ConfigError, match="cannot read the image"):
            await model.infer(broken)
    assert found["class"]["data"] == EXPECTED["y"][:1].tolist()


async def test_an_offset_costs_nothing_if_the_client_sends_it_in_full(tmp_path):
    task = json.loads((GOLDEN / "manifest.json").read_bytes())["task"]
    how = task["preprocessing"]
    how |= {"scale": how["scale"] / 1000, "mean": how["mean"] + 101349 * 1000 / how["scale"]}
    runtime = load(variant(tmp_path / "far", release=4, task=task))
    shifted = X / 1000 + 101349  # in single precision a step of 1/1000 is lost
    np.testing.assert_allclose(runtime.predict(shifted).probabilities, EXPECTED["probabilities"], atol=1e-4)
    async with served(FixedModel(runtime)) as model:
        for request in ((body(shifted, "FP64"),), binary(shifted, "FP64")):
            found = outputs(await model.infer(*request))["probabilities"]
            np.testing.assert_allclose(found["data"], EXPECTED["probabilities"].ravel(), atol=1e-4)
        assert protocol.make_metadata("digits", model.manifest)["inputs"][0]["datatype"] == "FP64"


async def test_samples_of_another_shape_are_refused():
    async with served() as model:
        with pytest.raises(ConfigError, match=r"takes \(1, 8, 8\)"):
            await model.infer(body(np.zeros((1, 9), np.uint8)))


async def test_a_bundle_that_is_switched_answers_under_its_own_digest(tmp_path):
    slots = Slots(tmp_path / "home")
    folders = [variant(tmp_path / str(i), release=i, gate=other_gate if i == 2 else None) for i in (1, 2)]

    def put(folder):
        slots.stage(*source(folder))
        slots.switch()

    put(folders[0])
    slots.confirm()
    answering = ActiveBundle(slots, Limits())
    async with served(answering) as model:
        asked = [asyncio.create_task(model.infer(body(X))) for _ in range(20)]
        await asked[0]
        await asyncio.to_thread(put, folders[1])
        await asyncio.to_thread(answering.swap)
        asked.append(asyncio.create_task(model.infer(body(X))))
        found = [json.loads(response.body) for response in await asyncio.gather(*asked)]
        assert model.manifest.release == 2

    digests = {1: digest(folders[0]), 2: digest(folders[1])}
    for response in found:
        parameters = response["parameters"]
        assert parameters["bundle"] == digests[parameters["release"]]
        assert response["model_version"] == str(parameters["release"])
    assert found[-1]["parameters"]["release"] == 2
    assert answering.n_predictions == 21 * len(X)


REFERENCE = {
    "n": 1000, "free_energy_mean": 0.0, "free_energy_std": 1e-3, "gate_entropy_mean": 0.0,
    "gate_entropy_std": 1.0, "outlier_above": 1e-3,
}  # fmt: skip


def test_what_a_bundle_was_not_made_for_drifts_and_is_flagged(tmp_path):
    model = FixedModel(load(variant(tmp_path / "1", release=1, reference=REFERENCE)))
    noise = np.random.default_rng(0).uniform(0, 16, (WINDOW, 8, 8)).astype(np.float32)
    assert model.drift_kind is None
    _, prediction = model.answer(noise)
    assert model.drift_kind is DriftKind.INPUTS
    assert prediction.outlier.any()


async def test_samples_whose_class_is_told_bring_the_bundle_before_back(tmp_path):
    slots = Slots(tmp_path / "home")
    for release, gate in ((1, None), (2, poor_gate)):
        slots.stage(*source(variant(tmp_path / str(release), release=release, gate=gate)))
        slots.switch()
        if release == 1:
            slots.confirm()
            answering = ActiveBundle(slots, Limits(probation_s=1e9))
    answering.swap()
    async with served(answering) as model:
        for i in range(40):
            sample, label = X[i % 12], str(EXPECTED["y"][i % 12])
            await model.infer(body(sample[np.newaxis], parameters={"label": label}))
        answering.settle()
        assert model.manifest.release == 1


@pytest.mark.parametrize(
    ("x", "label", "says"), [(X[:1], "ten", "not a class"), (X[:2], "1", "one sample"), (X[:1], 1, "as a string")]
)
async def test_labels_that_cannot_be_meant_are_refused(x, label, says):
    async with served() as model:
        with pytest.raises(ConfigError, match=says):
            await model.infer(body(x, parameters={"label": label}))
        await model.infer(body(X[0], parameters={"label": "1"}))  # there is no bundle before to compare with
