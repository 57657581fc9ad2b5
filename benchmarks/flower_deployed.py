"""Flower's deployed federation on one machine: a SuperLink and SuperNodes in their own processes, which train nothing.

The rival in `round_overhead.py --flower`, which makes its environment and runs this file in it; fedge and torch are not
needed. FedAvg of a model of numpy arrays, with no evaluation, no TLS, no telemetry. The app is this file, too.

    python flower_deployed.py FOLDER MODEL_FLOATS NODES ROUNDS

Prints as JSON the seconds from the end of each round's average to the end of the next one's.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterable
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final

import numpy as np
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg

PROJECT: Final = """
[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"

[project]
name = "overhead"
version = "1.0.0"
dependencies = []

[tool.flwr.app]
publisher = "fedge"

[tool.flwr.app.components]
serverapp = "flower_deployed:server"
clientapp = "flower_deployed:client"

[tool.flwr.app.config]
floats = {floats}
nodes = {nodes}
rounds = {rounds}
ends = "{ends}"
"""
CONNECTION: Final = """
[superlink]
default = "here"

[superlink.here]
address = "127.0.0.1:{port}"
insecure = true
"""
client = ClientApp()
server = ServerApp()


class Timed(FedAvg):  # type: ignore[misc, unused-ignore]
    """Flower's FedAvg with every node in every round; `ends`: when each round's aggregation was done."""

    def __init__(self, nodes: int) -> None:
        super().__init__(fraction_evaluate=0.0, min_train_nodes=nodes, min_available_nodes=nodes)
        self.nodes = nodes
        self.ends: list[float] = []

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        replies = list(replies)
        if sum(not reply.has_error() for reply in replies) < self.nodes:
            errors = {reply.error.reason for reply in replies if reply.has_error()}
            raise RuntimeError(f"not every node answered in round {server_round}: {errors}")
        done: tuple[ArrayRecord | None, MetricRecord | None] = super().aggregate_train(server_round, replies)
        self.ends.append(time.monotonic())
        return done


@server.main()  # type: ignore[untyped-decorator, unused-ignore]
def _serve(grid: Grid, context: Context) -> None:
    told = context.run_config
    strategy = Timed(int(told["nodes"]))
    first = ArrayRecord([np.zeros(int(told["floats"]), np.float32)])
    strategy.start(grid, first, num_rounds=int(told["rounds"]))
    ends = Path(str(told["ends"]))
    part = ends.with_suffix(".part")
    part.write_text(json.dumps(strategy.ends))
    part.rename(ends)


@client.train()  # type: ignore[untyped-decorator, unused-ignore]
def _answer(message: Message, _: Context) -> Message:
    """Sends back what came."""
    content = {"arrays": message.content["arrays"], "metrics": MetricRecord({"num-examples": 1})}
    return Message(RecordDict(content), reply_to=message)


def measure(folder: Path, floats: int, nodes: int, rounds: int) -> list[float]:
    """Seconds of each round but the first."""
    port, *own = _ports(1 + nodes)
    app, ends, home = folder / "app", folder / "ends.json", folder / "home"
    app.mkdir()
    home.mkdir()
    shutil.copy(__file__, app)
    (app / "pyproject.toml").write_text(PROJECT.format(floats=floats, nodes=nodes, rounds=rounds + 1, ends=ends))
    (home / "config.toml").write_text(CONNECTION.format(port=port))
    environment = os.environ | {
        "FLWR_HOME": str(home),
        "FLWR_TELEMETRY_ENABLED": "0",
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
    }
    with ExitStack() as stack, (folder / "log").open("w") as log:

        def start(program: str, *arguments: object) -> subprocess.Popen[bytes]:
            command = [Path(sys.executable).parent / program, *map(str, arguments)]
            process = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
            stack.callback(process.wait)
            stack.callback(process.terminate)
            return process

        link = ("flower-superlink", "--insecure", "--disable-runtime-dependency-installation", "--port", port)
        started = [start(*link)]
        _wait(lambda: _answers(port), 60, started, folder)
        node = ("flower-supernode", "--insecure", "--superlink", f"127.0.0.1:{port}", "--port")
        started += [start(*node, each) for each in own]
        start("flwr", "run", app, "here")
        _wait(ends.exists, 60 + 60 * rounds, started, folder)
    return [float(s) for s in np.diff(json.loads(ends.read_text()))]


def _wait(there: Any, timeout_s: float, started: list[subprocess.Popen[bytes]], folder: Path) -> None:
    until = time.monotonic() + timeout_s
    while not there():
        if time.monotonic() > until or any(process.poll() is not None for process in started):
            raise SystemExit(f"Flower does not go on: {(folder / 'log').read_text()[-3000:]}")
        time.sleep(0.1)


def _ports(n: int) -> list[int]:
    """Ports that are free now."""
    with ExitStack() as stack:
        held = [stack.enter_context(socket.socket()) for _ in range(n)]
        for one in held:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in held]


def _answers(port: int) -> bool:
    with socket.socket() as one:
        return one.connect_ex(("127.0.0.1", port)) == 0


if __name__ == "__main__":
    print(json.dumps(measure(Path(sys.argv[1]), *map(int, sys.argv[2:]))))
