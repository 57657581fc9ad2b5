"""What a round costs apart from training: seconds, bytes, CPU and memory with agents that train nothing.

Real processes on one machine: Mosquitto, the coordinator (`coordinator.service`, FedAvg) and agents
(`edge_agent.agent.loop.Agent`) whose worker answers at once with an update of the model's size, different in each round
and on each agent. Models and updates travel as float32, so that the bytes are those of a plain federated average;
fedge's default, int8 both ways, sends less than a quarter of them: --codec int8+zstd --down int8.

    seconds   from the end of a round to the end of the next: orders, model down, updates up and checked, durable
              reports, average, durable model and state. Median; the first round, which connects, does not count
    CPU       seconds a round: coordinator with the processes that check for it, one agent (mean), broker, all together
    memory    VmHWM: the largest resident set of the process in its life

With --flower each case is followed by Flower's SuperLink with as many SuperNodes that train nothing either, in its own
environment (`flower_deployed.py`).

Run: python benchmarks/round_overhead.py [--agents 4 8] [--rounds 10] [--codec int8+zstd --down int8] [--flower]
    [--json FILE]
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import AsyncExitStack, closing, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import msgspec
import numpy as np
import psutil
from script import cpu_s, finish, parser_of, peak_mb, show

from edge_agent.device.worker import FinishedOrder
from fedge.commands.broker import LocalBroker
from fedge.data.task import TaskSpec
from fedge.errors import FruitlessError
from fedge.steps.contract import Action, Declined
from fedge.steps.training.train import Train, Trained
from fedge.system.files import compute_digest
from fedge.tensors.layout import Codec, Tensors, from_bytes
from fedge.wire.connection.broker import BrokerSettings
from fedge.wire.messages import BlobRef, Order, Why

if TYPE_CHECKING:
    from coordinator.methods.settings import Down

HIDDEN = {"1.6 MB": 5_333, "45 MB": 150_000}
"""Of an mlp with 64 inputs and 10 classes: 75 numbers of 4 bytes for each hidden unit."""
FEDERATION = "overhead"


def task_of(model: str) -> TaskSpec:
    classes = tuple("0123456789")
    options = {"hidden": HIDDEN[model]}
    return TaskSpec(name="overhead", classes=classes, input_shape=(64,), model="mlp", model_options=options)


# ------------------------------------------------------------------------------------------------------ the agents


class Idle:
    """Answers an order to train with random numbers of the model's shapes, made once but for a number of a bias."""

    def __init__(self, device_id: str) -> None:
        self._rng = np.random.default_rng(sum(device_id.encode()))
        self._update: Tensors = {}

    def execute(
        self, order: Order, fetch: Callable[[BlobRef], bytes], *, stop: Callable[[], bool], action: Action
    ) -> FinishedOrder:
        from fedge.tensors.codecs import encode

        del stop
        if not isinstance(action, Train):
            return FinishedOrder(Declined(why=Why.NO_TRAINING, reason="a benchmark installs nothing"))
        if not self._update:
            model = from_bytes(fetch(action.starts[0].model))
            self._update = {n: 1e-3 * self._rng.standard_normal(t.shape, np.float32) for n, t in model.items()}
        smallest = min(self._update.values(), key=lambda tensor: tensor.size).reshape(-1)
        smallest[0] = 1e-3 * order.round  # the bytes of this round, and of this agent
        data = encode(self._update, action.codec)
        ref = BlobRef(digest=compute_digest(data), size_bytes=len(data), codec=action.codec)
        result = Trained(update=ref, n_samples=1, loss_before=1.0, loss_after=1.0, gradient_norm=0.0)
        return FinishedOrder(result, {ref.digest: data})


async def run_agent(port: int, home: Path, model: str, device_id: str) -> dict[str, float]:
    from edge_agent.agent.identity import Identity
    from edge_agent.agent.loop import Agent

    identity = Identity(device_id, FEDERATION, task_of(model), n_shared=1)
    agent = Agent(identity, BrokerSettings("127.0.0.1", port), home / device_id, lambda: Idle(device_id))
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, agent.stop)
    await agent.run()
    return {"peak_mb": peak_mb(os.getpid())}


# -------------------------------------------------------------------------------------------------- the coordinator


async def run_coordinator(
    port: int, home: Path, model: str, agents: int, rounds: int, ways: tuple[Codec, Down], others: dict[str, int]
) -> dict[str, Any]:
    """`ways`: up and down. `others`: the processes whose CPU time is looked at when a round ends, by name."""
    from coordinator.service.service import serve
    from coordinator.service.settings import CoordinatorSettings
    from coordinator.store.store import Store
    from coordinator.watch.state import read_summary

    settings = CoordinatorSettings(
        broker=f"127.0.0.1:{port}",
        federation=FEDERATION,
        home=home / "coordinator",
        task="-",
        method="fedavg",
        rounds=rounds + 1,
        devices=agents,
        codec=ways[0],
        down=ways[1],
        once=True,
    )
    ends: list[float] = []
    cpu: list[list[float]] = []
    pids = {"coordinator": os.getpid(), **others}
    bytes_moved: list[tuple[int, int]] = []

    def observe(event: str, fields: dict[str, Any]) -> None:
        if event == "round_done" and len(ends) <= rounds:
            ends.append(time.monotonic())
            checking = sum(cpu_s(child.pid) for child in psutil.Process().children())
            cpu.append([cpu_s(pid) + (checking if name == "coordinator" else 0.0) for name, pid in pids.items()])
            bytes_moved.append((fields["bytes_up"], fields["bytes_down"]))

    with closing(Store(settings.home)) as store, suppress(FruitlessError):  # these agents install no bundle
        await serve(settings, task_of(model), store, observe)
    summary = read_summary(settings.home)
    assert all(line["answered"] == agents for line in summary["history"])
    assert "torch" not in sys.modules
    return {
        "seconds": np.diff(ends).tolist(),
        "mb_up": (bytes_moved[-1][0] - bytes_moved[0][0]) / rounds / 1e6,
        "mb_down": (bytes_moved[-1][1] - bytes_moved[0][1]) / rounds / 1e6,
        "cpu_s_per_round": dict(zip(pids, np.median(np.diff(cpu, axis=0), axis=0).tolist(), strict=True)),
        "peak_mb": peak_mb(os.getpid()),
    }


# --------------------------------------------------------------------------------------------------------- measure


@dataclass(frozen=True)
class Case:
    model: str
    agents: int


async def start(stack: AsyncExitStack, role: str, *arguments: object) -> asyncio.subprocess.Process:
    command = (sys.executable, __file__, "--role", role, *map(str, arguments))
    process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)

    async def end() -> None:
        if process.returncode is None:
            process.kill()
            await process.wait()

    stack.push_async_callback(end)
    return process


async def answer_of(process: asyncio.subprocess.Process) -> dict[str, Any]:
    output, _ = await process.communicate()
    if process.returncode != 0:
        raise SystemExit(f"a process ended with {process.returncode}")
    return dict(msgspec.json.decode(output))


async def measure(case: Case, rounds: int, ways: tuple[Codec, Down]) -> dict[str, Any]:
    async with AsyncExitStack() as stack:
        home = stack.enter_context(tempfile.TemporaryDirectory())
        broker = await stack.enter_async_context(LocalBroker("mosquitto"))
        ids = [f"agent{i}" for i in range(case.agents)]
        agents = [await start(stack, "agent", broker.port, home, case.model, i) for i in ids]
        pids = {"broker": broker.pid, **{i: agent.pid for i, agent in zip(ids, agents, strict=True)}}
        told = (case.model, case.agents, rounds, *ways, json.dumps(pids))
        coordinator = await start(stack, "coordinator", broker.port, home, *told)
        waiting = [asyncio.create_task(answer_of(process)) for process in (coordinator, *agents)]
        ended, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        if ended != {waiting[0]}:
            raise SystemExit("an agent ended before the coordinator")
        server = waiting[0].result()
        for agent in agents:
            agent.terminate()
        clients = await asyncio.gather(*waiting[1:])
    cpu = server.pop("cpu_s_per_round")
    return {
        "model": case.model,
        "agents": case.agents,
        "seconds": statistics.median(server["seconds"]),
        "coordinator": server,
        "agent": {"peak_mb": statistics.median(client["peak_mb"] for client in clients)},
        "cpu_s_per_round": {
            "coordinator": cpu["coordinator"],
            "agent": statistics.fmean(cpu[i] for i in ids),
            "broker": cpu["broker"],
            "all": sum(cpu.values()),
        },
    }


async def run_all(options: argparse.Namespace) -> list[dict[str, Any]]:
    ways = options.codec, options.down
    cases = itertools.starmap(Case, itertools.product(options.models, options.agents))
    results = []
    for case in cases:
        results.append(await measure(case, options.rounds, ways))
        if options.flower:
            results[-1]["flower"] = flower(case, options.rounds, options.environments.absolute() / "flower")
    show(results)
    return results


def flower(case: Case, rounds: int, environment: Path) -> dict[str, Any]:
    """Seconds a round of the rival, in processes and an environment of its own."""
    from frameworks import RIVALS, make_environment

    make_environment(environment, RIVALS["flower"][1])
    script = Path(__file__).with_name("flower_deployed.py")
    with tempfile.TemporaryDirectory() as folder:
        sizes = (75 * HIDDEN[case.model], case.agents, rounds)
        command = [environment / "bin" / "python", script, folder, *map(str, sizes)]
        seconds = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)
    return {"seconds": statistics.median(seconds), "each": seconds}


def role(arguments: list[str]) -> None:
    """A child: prints what it measured as JSON."""
    kind, port, home, model, *rest = arguments
    if kind == "agent":
        measured = asyncio.run(run_agent(int(port), Path(home), model, rest[0]))
    else:
        agents, rounds, up, down, others = int(rest[0]), int(rest[1]), Codec(rest[2]), rest[3], json.loads(rest[4])
        ways = up, cast("Down", down)
        measured = asyncio.run(run_coordinator(int(port), Path(home), model, agents, rounds, ways, others))
    print(json.dumps(measured))


def main() -> None:
    if sys.argv[1:2] == ["--role"]:
        role(sys.argv[2:])
        return
    parser = parser_of(__doc__)
    parser.add_argument("--agents", type=int, nargs="+", default=[4, 8], help="numbers of agents (default 4 8)")
    parser.add_argument("--models", nargs="+", default=list(HIDDEN), choices=list(HIDDEN), help="sizes of the model")
    parser.add_argument("--rounds", type=int, default=10, help="rounds that count (default 10)")
    parser.add_argument("--codec", type=Codec, default=Codec.FLOAT32, help="of the updates (default float32)")
    parser.add_argument("--down", default="float32", choices=["int8", "float32"], help="of models (default float32)")
    parser.add_argument("--flower", action="store_true", help="measure Flower, too; its environment is made if need be")
    parser.add_argument("--environments", type=Path, default=Path("build/frameworks"), metavar="DIR")
    options = parser.parse_args()
    results = asyncio.run(run_all(options))
    finish(options, {"results": results})


if __name__ == "__main__":
    main()
