"""A device of each kind of problem: its bundle answers over HTTP's protocol, takes feedback, and is examined."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import pytest

from deploy.inference.engines import EngineOptions
from deploy.inference.runtime import load
from deploy.serving.batching import Batcher
from deploy.serving.endpoints import ServedModel
from deploy.serving.feedback import Feedback
from deploy.serving.server import Server
from deploy.updates.answering import ActiveBundle
from deploy.updates.examination import Limits, examine_in_process
from deploy.updates.slots import Slots
from edge_agent.samples import SampleStore
from fedge.bundle.manifest import MANIFEST
from fedge.wire.messages import DriftKind
from tests.support.problem_bundles import KINDS, N_VALIDATION, Kind, make_kind

LENIENT = Limits(latency_ratio=100.0, latency_slack_ms=1000.0, probation_predictions=10**9)
OUTPUTS = {
    "classification": {"probabilities": [2, 3], "class": [2], "class_name": [2]},
    "multi-label": {"probabilities": [2, 3], "labels": [2, 3], "names": [2]},
    "regression": {"values": [2, 2], "spread": [2, 2]},
    "segmentation": {"mask": [2, 4, 4], "probabilities": [2, 2, 4, 4]},
    "reconstruction": {"anomaly": [2], "surprise": [2], "threshold": [2]},
    "own": {"outputs": [2, 1, 2]},
}
TOLD: dict[str, Any] = {
    "classification": lambda y: "abc"[int(y)],
    "multi-label": lambda y: [name for name, there in zip(("hot", "wet", "loud"), y, strict=True) if there],
    "regression": lambda y: y.tolist(),
    "segmentation": lambda y: y.tolist(),
    "reconstruction": lambda y: ("usual", "unusual")[int(y)],
    "own": lambda y: y.tolist(),
}
"""How a client tells a target."""
WRONG: dict[str, tuple[Any, str]] = {
    "classification": ("d", "'d' is not a class"),
    "multi-label": (["cold"], "'cold' is not a label; there are hot, wet, loud"),
    "regression": ([1.0], r"the target must be numbers \(1, 2\)"),
    "segmentation": ([[0, 1], [7, 0]], "the target must be a class number for each pixel"),
    "reconstruction": ("odd", "must be usual or unusual, or 0 or 1"),
    "own": ([1.0], "the target must be numbers"),
}


@pytest.fixture(scope="module", params=KINDS)
def kind(request: pytest.FixtureRequest) -> Kind:
    return make_kind(request.param)


@pytest.fixture(scope="module")
def bundles(kind: Kind, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """One that has hardly learned, and one that has."""
    folder = tmp_path_factory.mktemp("bundles")
    return kind.write_bundle(folder / "1", release=1, steps=3), kind.write_bundle(folder / "2", release=2, steps=150)


def install(home: Path, bundle: Path, kind: Kind) -> ActiveBundle:
    slots = Slots(home)
    slots.stage((bundle / MANIFEST).read_bytes(), bundle)
    slots.switch()
    slots.confirm()
    kind.save_validation(home)
    return ActiveBundle(slots, LENIENT)


@contextlib.asynccontextmanager
async def serve(home: Path, answering: ActiveBundle) -> AsyncIterator[tuple[ServedModel, SampleStore]]:
    with (
        ThreadPoolExecutor(1) as graph,
        ThreadPoolExecutor(1) as pictures,
        SampleStore(home, answering.runtime.task) as s,
    ):
        yield ServedModel("m", answering, Batcher(answering.answer, graph), pictures, Feedback(answering, s)), s


def make_body(x: np.ndarray[Any, Any], **fields: Any) -> bytes:
    tensor = {"name": "x", "shape": list(x.shape), "datatype": "FP32", "data": x.ravel().tolist()}
    return json.dumps({"inputs": [tensor], **fields}).encode()


async def test_a_device_answers_over_http_and_keeps_what_it_is_told(
    kind: Kind, bundles: tuple[Path, Path], tmp_path: Path
) -> None:
    name, y = kind.task.name, kind.convert()
    async with (
        serve(tmp_path, install(tmp_path, bundles[1], kind)) as (model, store),
        Server([model], port=0) as server,
        aiohttp.ClientSession(f"{server.url}/v2/models/m/") as client,
    ):

        async def ask(path: str, body: bytes) -> tuple[int, Any]:
            async with client.post(path, data=body) as response:
                return response.status, await response.json()

        _, answer = await ask("infer", make_body(kind.x[:2]))
        found = {one["name"]: one["shape"] for one in answer["outputs"]}
        assert found == OUTPUTS[name] | {"weights": [2, 2], "energies": [2, 2], "outlier": [2]}
        async with client.get(f"{server.url}/v2/models/m") as response:
            described = {o["name"]: o["shape"][1:] for o in (await response.json())["outputs"]}
        assert described == {output: shape[1:] for output, shape in found.items()}

        told = [TOLD[name](target) for target in kind.y[:3]]
        assert await ask("feedback", make_body(kind.x[:3], targets=told)) == (
            200,
            {"model_name": "m", "labels": 3, "stored": 3},
        )
        await ask("infer", make_body(kind.x[3:4], id="r1"))
        status, _ = await ask("feedback", json.dumps({"id": "r1", "target": TOLD[name](kind.y[3])}).encode())
        parameter = TOLD[name](kind.y[4])
        parameter = json.dumps(parameter) if isinstance(parameter, list) else parameter
        again, _ = await ask("infer", make_body(kind.x[4:5], parameters={"target": parameter}))
        assert (status, again) == (200, 200)
        kept = store.read_labelled()
        np.testing.assert_allclose(kept.y, y[:5], rtol=1e-6)
        assert kept.y.dtype == y.dtype
        assert [store.read_sample(k).label for k in range(1, 6)] == [kind.problem.find_group(each) for each in y[:5]]

        wrong, says = WRONG[name]
        status, refused = await ask("feedback", make_body(kind.x[5:6], target=wrong))
        assert (status, re.search(says, refused["error"]) is not None) == (400, True), refused
        assert len(store.read_labelled().y) == 5


def test_a_worse_bundle_may_not_serve_and_a_better_one_may(
    kind: Kind, bundles: tuple[Path, Path], tmp_path: Path
) -> None:
    kind.save_validation(tmp_path)
    worse, better = bundles
    upgrade = examine_in_process(worse, better, tmp_path, LENIENT, EngineOptions())
    assert upgrade.reason == ""
    before, now = (None if quality is None else quality.accuracy for quality in (upgrade.before, upgrade.now))
    assert before is not None
    assert now is not None
    assert now > before
    word = "accuracy: the running bundle is more accurate" if kind.problem.RIGHT_OR_WRONG else "score: the running"
    downgrade = examine_in_process(better, worse, tmp_path, LENIENT, EngineOptions())
    assert downgrade.reason.startswith(word)


def test_the_newest_labelled_samples_count_too(kind: Kind, bundles: tuple[Path, Path], tmp_path: Path) -> None:
    with SampleStore(tmp_path, kind.task) as store:
        for x, y in zip(kind.x[N_VALIDATION:], kind.convert()[N_VALIDATION:], strict=True):
            store.add(x, y, origin="python")
    found = examine_in_process(bundles[1], bundles[0], tmp_path, LENIENT, EngineOptions())
    assert found.reason.endswith("on this device's newest samples")


def test_labelled_answers_bring_the_previous_bundle_back(
    kind: Kind, bundles: tuple[Path, Path], tmp_path: Path
) -> None:
    worse, better = bundles
    answering = install(tmp_path, better, kind)
    slots = Slots(tmp_path)
    slots.stage((worse / MANIFEST).read_bytes(), worse)
    slots.switch()
    answering = ActiveBundle(Slots(tmp_path), LENIENT)
    assert answering.worse_reason == ""
    y = kind.convert()
    for i in range(60):
        answering.add_feedback(kind.x[i : i + 1], y[i : i + 1])
    assert "previous bundle is" in answering.worse_reason


def test_targets_that_contradict_the_bundle_are_drift(kind: Kind, bundles: tuple[Path, Path], tmp_path: Path) -> None:
    answering = install(tmp_path, bundles[1], kind)
    answering.learn_home(tmp_path)
    for i in range(40):
        runtime, answer = answering.answer(kind.x[i : i + 1])
        answering.record_grades(runtime.digest, answer.answers, kind.convert()[i : i + 1])
    assert answering.drift_kind is None
    if kind.task.name == "reconstruction":  # nothing that is told makes a sample likelier
        return
    y = np.roll(kind.convert(), 1, axis=0)
    for i in range(60):
        runtime, answer = answering.answer(kind.x[i : i + 1])
        answering.record_grades(runtime.digest, answer.answers, y[i : i + 1])
    assert answering.drift_kind is DriftKind.LABELS


@pytest.mark.parametrize("name", ["classification", "regression", "reconstruction"])
def test_samples_that_look_different_are_drift(name: str, tmp_path: Path) -> None:
    kind = make_kind(name)
    answering = install(tmp_path, kind.write_bundle(tmp_path / "1", release=1, steps=150), kind)
    answering.learn_home(tmp_path)
    for _ in range(3):
        answering.answer(kind.x)
    assert answering.drift_kind is None
    for _ in range(3):
        answering.answer(kind.x * 4 + 3)
    assert answering.drift_kind is DriftKind.INPUTS


def test_an_anomaly_is_above_the_bundles_threshold_and_most_usual_samples_below(tmp_path: Path) -> None:
    kind = make_kind("reconstruction")
    runtime = load(kind.write_bundle(tmp_path / "1", release=1, steps=20))
    usual, strange = runtime.predict(kind.x[N_VALIDATION:]), runtime.predict(kind.x[:5] * 20)
    assert usual.outlier.mean() < 0.15
    assert strange.outlier.all()


async def test_a_mark_may_be_left_out(tmp_path: Path) -> None:
    kind = make_kind("reconstruction")
    answering = install(tmp_path / "home", kind.write_bundle(tmp_path / "1", release=1, steps=5), kind)
    async with serve(tmp_path / "home", answering) as (model, store):
        await model.learn(make_body(kind.x[:2]))
        await model.infer(make_body(kind.x[3:4], id="r1"))
        await model.learn(json.dumps({"id": "r1"}).encode())
        assert store.read_labelled().y.tolist() == [0, 0, 0]
        assert sum(store.count_recent_answers(10)) == 3
