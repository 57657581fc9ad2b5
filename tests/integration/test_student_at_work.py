"""A camera whose owner wants a student and answers with a guarantee: an agent, a runtime, a coordinator and a broker.

What the camera answers with is one network in place of its mixture, and each answer has the classes that it cannot
rule out. Labels that come later tell the fleet's page how often these held the truth, as its owner allows.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import pytest

from fedge.bundle.manifest import read_bundle
from fedge.commands.broker import LocalBroker
from tests.support.browser import INSTALLED, chromium
from tests.support.cameras import Cameras, say_logs, seen, tensor
from tests.support.page import see, serve_page

CAMERAS = ("cam1", "cam2")
COVERAGE = 0.8
LABELS = 20


@pytest.fixture
def shop(one_broker: LocalBroker, tmp_path: Path) -> Cameras:
    made = Cameras(tmp_path, one_broker, CAMERAS, at_home=120)
    (tmp_path / "cam1").mkdir()
    (tmp_path / "cam1" / "egress.toml").write_text('[egress]\nallow = "personal"\n')
    return made


async def test_a_student_answers_with_sets_and_the_page_tells_how_often_they_held(shop: Cameras) -> None:
    try:
        await shop.start_coordinator("--method", "fedge", "--rounds", 2, "--local-steps", 10)
        await shop.start_agent("cam1", "--student")
        await shop.start_agent("cam2")
        await shop.start_runtime("cam1", "--coverage", COVERAGE)
        await see_sets(shop)
    except BaseException:
        say_logs(shop.folder)
        raise
    finally:
        await shop.kill_all()


async def see_sets(shop: Cameras) -> None:
    (own,) = (shop.folder / "cam1" / "bundles").iterdir()
    manifest = read_bundle(own).manifest
    assert [candidate.name for candidate in manifest.candidates] == ["student"]
    assert {"student_loss", "mixture_loss"} <= set(manifest.metrics)
    (other,) = (shop.folder / "cam2" / "bundles").iterdir()
    assert len(read_bundle(other).manifest.candidates) > 1

    x, y = shop.x_test[:100], shop.y_test[:100]
    content = await shop.post("cam1", "infer", {"inputs": [tensor(x)]})
    found = {output["name"]: np.array(output["data"]).reshape(output["shape"]) for output in content["outputs"]}
    assert content["parameters"]["coverage"] == COVERAGE
    assert content["parameters"]["sets_hold_all"] is False
    assert found["set"][np.arange(100), found["class"]].all()
    assert (found["abstains"] == (found["set"].sum(axis=1) > 1)).all()
    assert found["weights"].shape == (100, 1), "one network has run"
    assert found["set"][np.arange(100), y].mean() > COVERAGE - 0.15

    await shop.tell("cam1", LABELS)
    await seen(lambda: (shop.known("cam1").get("at_work") or {}).get("coverage") == COVERAGE)
    if INSTALLED:
        await asyncio.to_thread(see_page, shop)


def see_page(shop: Cameras) -> None:
    with serve_page(shop.shop) as url, chromium() as browser:
        browser.get(f"{url}#device/cam1")
        see(browser, "of the sets held the label that came later, 80.0 % wanted")
