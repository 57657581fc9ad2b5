"""The dashboard's queries in a real Prometheus, which scrapes a coordinator and a server; and what these two log."""

from __future__ import annotations

import asyncio
import json
import math
import re
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from fedge.commands.broker import LocalBroker, find_free_port
from tests.deploy.serve_process import process
from tests.support.broker import local_broker
from tests.support.federation import NAME, Federation

OPERATING = Path(__file__).parents[2] / "examples" / "operating"
DASHBOARD = json.loads((OPERATING / "grafana-dashboard.json").read_text(encoding="utf-8"))
PROMETHEUS = shutil.which("prometheus")
VALUES = {"$federation": NAME, "$model": ".*", "$__rate_interval": "10s"}
WAIT_S = 300


@pytest.fixture
async def broker(tmp_path: Path) -> AsyncIterator[LocalBroker]:
    async with local_broker("auto", tmp_path) as running:
        yield running


@asynccontextmanager
async def prometheus(folder: Path, coordinator: str, serve: str) -> AsyncIterator[str]:
    """A Prometheus that scrapes both each second by the configuration of the example; its URL."""
    assert PROMETHEUS is not None
    text = (OPERATING / "prometheus.yml").read_text(encoding="utf-8")
    text = text.replace("server:8700", coordinator).replace("cam1:8000", serve)
    config = folder / "prometheus.yml"
    config.write_text("global: { scrape_interval: 1s }\n" + text)
    url = f"http://127.0.0.1:{find_free_port('127.0.0.1')}"
    flags = (f"--config.file={config}", f"--storage.tsdb.path={folder / 'data'}", f"--web.listen-address={url[7:]}")
    with (folder / "prometheus.log").open("wb") as log:
        child = await asyncio.create_subprocess_exec(PROMETHEUS, *flags, stderr=log)
    try:
        yield url
    finally:
        child.terminate()
        await child.wait()


def queries() -> list[str]:
    """Of every panel, and those by which the variables are filled."""
    found = [target["expr"] for panel in DASHBOARD["panels"] for target in panel.get("targets", ())]
    variables = [str(variable["query"]) for variable in DASHBOARD["templating"]["list"]]
    of_variables = re.findall(r"label_values\((\w+), (\w+)\)", str(variables))
    found += [f"count by ({label}) ({metric})" for metric, label in of_variables]
    for name, value in VALUES.items():
        found = [query.replace(name, value) for query in found]
    assert not any("$" in query for query in found)
    return found


async def data(session: aiohttp.ClientSession, query: str) -> list[dict[str, Any]]:
    """The series that a query gives, if one of them has a number."""
    try:
        async with session.get("/api/v1/query", params={"query": query}) as answer:
            if answer.status == 503:  # it listens, and is not ready
                return []
            told = await answer.json()
    except aiohttp.ClientConnectionError:  # it has not begun to listen
        return []
    assert told["status"] == "success", (query, told)
    return [one for one in told["data"]["result"] if math.isfinite(float(one["value"][1]))]


@pytest.mark.skipif(PROMETHEUS is None, reason="Prometheus is not installed")
async def test_every_query_of_the_dashboard_gives_data_and_logs_are_lines_of_json(
    broker: LocalBroker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FEDGE_LOG_FORMAT", "json")
    address = f"127.0.0.1:{find_free_port('127.0.0.1')}"
    async with Federation(broker, tmp_path, devices=("cam1", "cam2")) as federation:
        coordinator = await federation.coordinator(rounds=2, once=False, local_steps=5, ui=address)
        agents = await federation.agents()
        await coordinator.said("round_done", done=True)
        bundle = max((tmp_path / "cam1" / "bundles").iterdir())
        async with process(f"digits={bundle}") as (serve, said, http):
            x = {"name": "x", "shape": [1, 8, 8], "datatype": "UINT8", "data": [0] * 64}
            target = said["url"].removeprefix("http://")
            async with prometheus(tmp_path, address, target) as url, aiohttp.ClientSession(url) as session:
                left = set(queries())
                async with asyncio.timeout(WAIT_S):
                    while left:
                        assert (await http.post("/v2/models/digits/infer", json={"inputs": [x]})).status == 200
                        left = {query for query in left if not await data(session, query)}
                        await asyncio.sleep(0.2)
            serve.terminate()
            assert serve.stderr is not None
            rest = (await serve.stderr.read()).decode()
        for running in (coordinator, *agents.values()):
            running.process.terminate()
            await running.ended()
    told = {name: lines((tmp_path / f"{name}.log").read_text()) for name in ("coordinator", "cam1", "cam2")}
    lines(rest)
    for device in ("cam1", "cam2"):
        done = [line for line in told[device] if line["event"] == "order_done"]
        assert {line["round"] for line in done} >= {1, 2}
        assert all(line["federation"] == NAME and line["device"] == device for line in done)
        answers = [line for line in told["coordinator"] if line["event"] == "answer" and line["device"] == device]
        assert {(line["round"], line["label"]) for line in answers} >= {(1, "train"), (2, "train")}
        assert {line["round"] for line in answers} <= {line["round"] for line in done}


def lines(log: str) -> list[dict[str, Any]]:
    """The objects in a log, which has nothing else."""
    return [json.loads(line) for line in log.splitlines()]
