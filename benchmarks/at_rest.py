"""What an agent holds between orders, and what it costs to start the process that trains for each of them.

    memory    MB of a real agent's processes (Linux: RSS, and PSS, which shares out what several processes map), before
              its first order, after its part in a federation while the process that trains waits, and when it has gone
    order     seconds from an order to its result, by `edge_agent.agent.workplace`: with a process that stays, with a
    new one
              for each, in turn; one training step of the task's network on 100 samples. Medians

Run: python benchmarks/at_rest.py [--orders 10] [--json FILE]
"""

from __future__ import annotations

import asyncio
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import psutil
from script import finish, parser_of, show

from coordinator.service.checks import make_first_model
from edge_agent.agent.settings import AgentSettings
from edge_agent.agent.workplace import WorkerProcess
from fedge.commands.broker import LocalBroker
from fedge.steps.contract import encode_body
from fedge.steps.sgd import Sgd
from fedge.steps.training.train import Start, Train
from fedge.system.child import make_command
from fedge.system.files import BlobFolder
from fedge.system.stopping import never
from fedge.tensors.codecs import encode
from fedge.tensors.layout import Codec, unflatten
from fedge.wire.messages import BlobRef, Order

KEEP_S = 3.0
NETWORKS = {"mlp, 0.1 MB": ("digits", (8, 8)), "cnn, 0.8 MB": ("mnist", (28, 28))}


def settings_of(folder: Path, task: str, shape: tuple[int, ...], broker: str = "-") -> AgentSettings:
    rng = np.random.default_rng(0)
    folder.mkdir(exist_ok=True)
    x = rng.integers(0, 17, (100, *shape)).astype(np.float32 if task == "digits" else np.uint8)
    np.savez(folder / "samples.npz", x=x, y=np.arange(100) % 10)
    return AgentSettings(
        broker=broker, federation="rest", id="cam1", home=folder, task=task, data=folder / "samples.npz"
    )


def held(pid: int) -> dict[str, float]:
    """MB of a process and all below it."""
    processes = [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]
    memory = [process.memory_full_info() for process in processes]
    found = {"rss_mb": sum(m.rss for m in memory) / 1e6, "pss_mb": sum(m.pss for m in memory) / 1e6}
    return found | {"processes": float(len(processes))}


async def memory() -> dict[str, dict[str, float]]:
    found = {}
    async with LocalBroker("mosquitto") as broker:
        with tempfile.TemporaryDirectory() as folder:
            settings = settings_of(Path(folder) / "cam1", "digits", (8, 8), f"{broker.host}:{broker.port}")
            common = ("--broker", settings.broker, "--federation", "rest", "--task", "digits")
            own = ("--id", "cam1", "--home", str(settings.home), "--data", str(settings.data), "--json")
            agent = await asyncio.create_subprocess_exec(
                *make_command("fedge", "--log-level", "error", "agent", *common, *own),
                *("--keep-worker-s", str(KEEP_S)),
                stdout=asyncio.subprocess.PIPE,
            )
            assert agent.stdout is not None
            await agent.stdout.readline()  # online
            found["before its first order"] = held(agent.pid)
            coordinator = await asyncio.create_subprocess_exec(
                *make_command("fedge", "--log-level", "error", "coordinator", *common),
                *("--home", f"{folder}/server", "--devices", "1", "--rounds", "3", "--method", "fedge", "--once"),
                stdout=asyncio.subprocess.DEVNULL,
            )
            await coordinator.wait()
            found["after its last order"] = held(agent.pid)
            await asyncio.sleep(KEEP_S + 2)
            found["at rest"] = held(agent.pid)
            agent.terminate()
            await agent.communicate()
    return found


def orders(network: str, n_orders: int) -> dict[str, float]:
    task, shape = NETWORKS[network]
    with tempfile.TemporaryDirectory() as folder:
        settings = settings_of(Path(folder) / "cam1", task, shape)
        spec = settings.make_spec()
        layout, model = make_first_model(spec, 0)
        data = encode(unflatten(model, layout), Codec.FLOAT32)
        ref = BlobRef(digest=BlobFolder(settings.home / "models").put(data), size_bytes=len(data))
        action = Train(starts=(Start(model=ref),), sgd=Sgd(steps=1))
        ways = {"kept_s": None, "fresh_s": 0.0}
        places = {way: WorkerProcess(msgspec.structs.replace(settings, keep_worker_s=s)) for way, s in ways.items()}
        seconds: dict[str, list[float]] = {way: [] for way in ways}
        for number in range(n_orders + 1):
            order = Order(
                id=f"r.{number}.train.cam1",
                device_id="cam1",
                run="r",
                round=number,
                label="train",
                seed=number,
                task_fingerprint=spec.compute_fingerprint(),
                left_s=60.0,
                step=action.STEP,
                version=action.VERSION,
                body=encode_body(action),
            )
            for way, place in places.items():
                place.close() if way == "fresh_s" else None
                began = time.perf_counter()
                place.execute(order, lambda _: b"", stop=never, action=action)
                seconds[way].append(time.perf_counter() - began)
        for place in places.values():
            place.close()
    return {way: statistics.median(taken[1:]) for way, taken in seconds.items()}


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--orders", type=int, default=10, help="that count, of each kind (default 10)")
    options = parser.parse_args()
    figures: dict[str, Any] = {"memory": asyncio.run(memory())}
    show({"": when} | values for when, values in figures["memory"].items())
    figures["order"] = {network: orders(network, options.orders) for network in NETWORKS}
    show({"": network} | values for network, values in figures["order"].items())
    finish(options, figures)


if __name__ == "__main__":
    main()
