"""The page on which the owner labels: what it shows and does, and whom it refuses."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import urllib.request
from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import pytest
from aiohttp.test_utils import TestClient, TestServer

from edge_agent.samples import SampleStore
from edge_agent.samples.label import make_application
from fedge.data.task import Preprocessing, TaskSpec

TASK = TaskSpec(
    name="g",
    classes=("cat", "dog"),
    input_shape=(1, 4, 4),
    model="mlp",
    preprocessing=Preprocessing(scale=255.0, image_mode="L"),
)
OURS = {"X-Fedge-Label": "1"}


@pytest.fixture
def store(tmp_path: Path) -> SampleStore:
    (tmp_path / "samples.toml").write_text("[samples]\nunlabelled = 10\n")
    store = SampleStore(tmp_path, TASK)
    for k in range(3):
        store.add(np.full((4, 4), k, np.uint8), None, origin="http")
    return store


@pytest.fixture
async def page(store: SampleStore) -> AsyncIterator[TestClient]:  # type: ignore[type-arg]
    async with TestClient(TestServer(make_application(store))) as client:
        yield client


async def decide(page: TestClient, **what: object) -> tuple[int, dict[str, str]]:  # type: ignore[type-arg]
    answer = await page.post("/decide", data=json.dumps(what), headers=OURS)
    return answer.status, await answer.json()


async def test_what_waits_for_a_label_is_shown(page: TestClient) -> None:  # type: ignore[type-arg]
    found = await (await page.get("/samples")).json()
    assert (found["classes"], found["pictures"]) == (["cat", "dog"], True)
    assert [sample["number"] for sample in found["samples"]] == [3, 2, 1]
    picture = await page.get("/picture/3")
    assert (await picture.read()).startswith(b"\x89PNG")
    assert (await (await page.get("/numbers/3")).json())["numbers"] == [2] * 16
    assert "What is this?" in await (await page.get("/")).text()


async def test_labels_marks_and_deletions_are_carried_out(page: TestClient, store: SampleStore) -> None:  # type: ignore[type-arg]
    assert await decide(page, number=1, action="label", label=1) == (200, {})
    assert await decide(page, number=2, action="mark") == (200, {})
    assert await decide(page, number=3, action="delete") == (200, {})
    assert [(s.number, s.label, s.sensitive) for s in store.list_samples()] == [(2, None, True), (1, 1, False)]
    assert await decide(page, number=2, action="label", label=0) == (200, {})
    assert store.read_labelled().sensitive.tolist() == [False, True]
    status, found = await decide(page, number=2, action="label", label=7)
    assert (status, found["error"].partition(";")[0]) == (400, "the label 7 is not one of the 2 classes")
    assert (await decide(page, number=9, action="label", label=1))[0] == 400


async def test_other_websites_can_neither_read_nor_act(page: TestClient, store: SampleStore) -> None:  # type: ignore[type-arg]
    assert (await page.get("/samples", headers={"Host": "evil.example"})).status == 403
    body = json.dumps({"number": 1, "action": "delete"})
    assert (await page.post("/decide", data=body)).status == 403
    assert (await page.post("/decide", data=body, headers={**OURS, "Host": "evil.example:80"})).status == 403
    assert len(store.list_samples()) == 3


@pytest.mark.process
def test_the_page_is_at_this_machine_alone(store: SampleStore, tmp_path: Path) -> None:
    program = [sys.executable, "-m", "fedge", "label", tmp_path, "--port", "0", "--json"]
    with subprocess.Popen(program, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        url = json.loads(process.stdout.readline())["url"]
        assert url.startswith("http://127.0.0.1:")
        with urllib.request.urlopen(f"{url}samples", timeout=30) as answer:
            assert len(json.load(answer)["samples"]) == 3
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 130
