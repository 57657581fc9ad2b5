"""What a relay saves on the line of a site: bytes to and from the sites, with relays and without, side by side.

Coordinator, relays and agents run in this process over real brokers, and learn handwritten digits with a network of
1.6 MB (--hidden). Counted are the payloads that cross the lines of the sites: without relays those of all agents, with
relays those of the relays above. They are of the whole run, also of the installation at its end, divided by the rounds.

Run: python benchmarks/relay.py [--devices 3 10] [--method fedavg fedge] [--rounds 5] [--codec float32 int8+zstd]
"""

from __future__ import annotations

import asyncio
import json
import tempfile
from collections.abc import Mapping
from contextlib import AsyncExitStack, closing
from functools import partial
from pathlib import Path

import msgspec
from script import parser_of

from coordinator.relay.cli import RelaySettings, open_relay
from coordinator.service.service import serve
from coordinator.service.settings import CoordinatorSettings
from coordinator.store.store import Store
from edge_agent.agent.identity import Identity
from edge_agent.agent.loop import Agent
from edge_agent.device.worker import Worker
from fedge.commands.broker import LocalBroker
from fedge.data.task import TaskSpec
from fedge.tasks import DeviceData, Partitioning, load_pool, make_device_data, partition_pool, write_task
from fedge.tensors.layout import Codec
from fedge.wire.connection.broker import BrokerSettings

SITES = ("north", "south")
FEDERATION = "f"


def agent(broker: LocalBroker, task: TaskSpec, name: str, data: DeviceData, home: Path) -> Agent:
    """A device of the federation at this broker."""
    identity = Identity(name, FEDERATION, task, n_shared=data.n_shared)
    return Agent(
        identity, BrokerSettings(broker.host, broker.port), home / name, partial(Worker, name, task, data, home / name)
    )


def crossed(agents: list[Agent]) -> tuple[int, int]:
    """Payload bytes that these have received and sent."""
    lines = [each._transport for each in agents]  # noqa: SLF001
    return sum(line.bytes_received for line in lines), sum(line.bytes_sent for line in lines)


async def measured(
    home: Path, task: TaskSpec, devices: Mapping[str, DeviceData], settings: CoordinatorSettings, *, relays: bool
) -> tuple[int, int]:
    """Bytes down and up on the lines of the sites, of a whole run."""
    write_task(task, home / "task.json")
    async with AsyncExitStack() as stack:
        above = await stack.enter_async_context(LocalBroker("auto", home=home / "broker"))
        below = {
            site: await stack.enter_async_context(LocalBroker("auto", home=home / site)) if relays else above
            for site in SITES
        }
        devices_there = [agent(below[i.partition("-")[0]], task, i, data, home) for i, data in devices.items()]
        lines = [] if relays else list(devices_there)
        for site, broker in below.items() if relays else ():
            own = RelaySettings(
                broker=f"{above.host}:{above.port}",
                federation=FEDERATION,
                id=site,
                home=home / f"{site}-relay",
                task=str(home / "task.json"),
                site_broker=f"{broker.host}:{broker.port}",
                site_federation=FEDERATION,
            )
            lines.append(await stack.enter_async_context(open_relay(own, lambda *_: None)))
        running = devices_there + (lines if relays else [])
        async with asyncio.TaskGroup() as group:
            for each in running:
                group.create_task(each.run())
            at = msgspec.structs.replace(settings, broker=f"{above.host}:{above.port}", home=home / "coordinator")
            with closing(Store(at.home)) as store:
                await serve(at, task, store, lambda *_: None)
            found = crossed(lines)
            for each in running:
                each.stop()
    return found


def main() -> None:
    """Print a row for each case, and the ratio."""
    parser = parser_of(__doc__)
    parser.add_argument("--devices", type=int, nargs="+", default=[3, 10], help="of each of two sites")
    parser.add_argument("--method", nargs="+", default=["fedavg"])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--hidden", type=int, default=5_333)
    parser.add_argument("--codec", type=Codec, nargs="+", default=[Codec.FLOAT32, Codec.INT8])
    given = parser.parse_args()
    samples = load_pool("digits")
    task = msgspec.structs.replace(samples.spec, model="mlp", model_options={"hidden": given.hidden})
    for method, codec, n in ((m, c, n) for m in given.method for c in given.codec for n in given.devices):
        names = [f"{site}-{k:02d}" for site in SITES for k in range(n)]
        shares = partition_pool(samples, len(names), Partitioning(), seed=0)
        devices = {i: make_device_data(task, share) for i, share in zip(names, shares, strict=True)}
        settings = CoordinatorSettings(
            broker="localhost:1",
            federation=FEDERATION,
            home=Path(),
            task="digits",
            method=method,
            rounds=given.rounds,
            devices=len(names),
            once=True,
            codec=codec,
            local_steps=1,
            deadline_s=300.0,
        )
        row: dict[str, object] = {"method": method, "codec": str(codec), "devices a site": n}
        for relays in (False, True):
            with tempfile.TemporaryDirectory() as folder:
                down, up = asyncio.run(measured(Path(folder), task, devices, settings, relays=relays))
            kind = "relays" if relays else "none"
            row |= {
                f"{kind} down MB a round": down / given.rounds / 1e6,
                f"{kind} up MB a round": up / given.rounds / 1e6,
            }
        print(json.dumps({k: round(v, 2) if isinstance(v, float) else v for k, v in row.items()}), flush=True)


if __name__ == "__main__":
    main()
