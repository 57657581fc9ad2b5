"""Over a real broker, in real processes: a device that begins to see other things is given another bundle."""

from __future__ import annotations

import asyncio
import json
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import numpy as np
import pytest

import deploy
from fedge.commands.broker import find_mosquitto
from fedge.tasks import load_pool
from tests.support.broker import local_broker
from tests.support.federation import NAME, WAIT_S, Federation, Running
from tests.support.waiting import until

pytestmark = pytest.mark.skipif(find_mosquitto() is None, reason="mosquitto is not installed")


async def test_a_device_that_drifts_is_profiled_anew_and_gets_a_better_bundle(tmp_path: Path) -> None:
    """Its camera is turned; from then on the labelled samples of its agent are turned as well."""
    digits = load_pool("digits", seed=1)
    turned = np.rot90(digits.x, axes=(-2, -1)).copy()
    home = tmp_path / "a"
    async with (
        local_broker("mosquitto", tmp_path) as broker,
        Federation(broker, tmp_path, devices=["a", "b"]) as federation,
    ):
        coordinator = await federation.coordinator(method="fedge", rounds=2, once=False)
        agents = await federation.agents()
        await until(lambda: set(installed(federation)) == {"a", "b"})
        await agents["a"].said("report_acked", accepted=True)
        first = installed(federation)
        installing = await Running.start(tmp_path / "install.log", "install", "--home", home, home / "bundles" / "1")
        assert await installing.ended() == 0
        old = deploy.load(home / "bundles" / "1")
        address = f"{broker.host}:{broker.port}"
        words = ("--home", home, "--broker", address, "--federation", NAME, "--id", "a", "--port", 0)
        runtime = await Running.start(tmp_path / "serve.log", "serve", *words)
        federation._stack.push_async_callback(runtime.kill)
        await runtime.said("serving")
        url = f"{runtime.events[0]['url']}/v2/models/digits/infer"
        async with aiohttp.ClientSession() as session, asyncio.timeout(2 * WAIT_S):
            async for parameters in asked(session, url, digits.x[:600]):
                assert (parameters["release"], parameters["drifted"]) == (1, False)

            agents["a"].send(signal.SIGTERM)
            await agents["a"].ended()
            with np.load(federation.data("a")) as before:
                data = dict(before) | {"x": np.rot90(before["x"], axes=(-2, -1)).copy()}
            np.savez(federation.data("a"), **data)
            await federation.agent("a")
            seen = [parameters async for parameters in asked(session, url, turned[:600])]
            assert seen[-1]["drifted"] is True
            release = 1
            while release == 1:
                async for parameters in asked(session, url, turned[:20]):
                    release = parameters["release"]
                await asyncio.sleep(0.2)
            seen = [parameters async for parameters in asked(session, url, turned[600:1200])]
            assert seen[-1]["drifted"] is False
        await until(lambda: installed(federation)["a"] != first["a"])
        runtime.send(signal.SIGTERM)
        assert await runtime.ended() == 130
        coordinator.send(signal.SIGTERM)
        assert await coordinator.ended() == 130
        steps = federation.rows("SELECT device_id, label FROM orders WHERE round > 3 ORDER BY rowid")

    assert steps == [("a", "profile"), ("a", "candidates"), ("a", "gate")]
    assert {i for i, bundle in installed(federation).items() if bundle != first[i]} == {"a"}
    new = deploy.load(home / "bundles" / str(release))
    assert new.digest == seen[-1]["bundle"]
    right = [float((bundle.predict(turned[600:]).class_index == digits.y[600:]).mean()) for bundle in (old, new)]
    assert right[1] > right[0] + 0.2, right


def installed(federation: Federation) -> dict[str, object]:
    file = federation.home / "summary.json"
    return dict(json.loads(file.read_bytes())["installed"]) if file.exists() else {}


async def asked(session: aiohttp.ClientSession, url: str, x: np.ndarray) -> AsyncIterator[dict[str, object]]:
    """Ask for samples, twenty at once; the parameters of the answers."""
    for i in range(0, len(x), 20):
        some = x[i : i + 20]
        tensor = {"name": "x", "shape": some.shape, "datatype": "FP32", "data": some.ravel().tolist()}
        async with session.post(url, json={"inputs": [tensor], "outputs": [{"name": "class"}]}) as response:
            content = await response.json()
            assert response.status == 200, content
            yield content["parameters"]
