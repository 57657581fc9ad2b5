"""A demo from the samples to the figures: real processes around a real broker, then the comparison."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import secrets
import shutil
import time
from collections.abc import AsyncIterator, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np

from coordinator.demo.outcome import Background, DeviceOutcome, Outcome, mean_accuracy
from coordinator.demo.processes import Child, Children, ProcessError, tail
from coordinator.demo.progress import Rounds, Watch
from coordinator.methods import Option, RoundSummary, method_class
from coordinator.service import NO_OPTIONS
from coordinator.simulation.settings import DemoSettings, Setup
from fedge.broker import LocalBroker
from fedge.bundle import look
from fedge.egress import FILE as EGRESS
from fedge.errors import ConfigError, TransportError
from fedge.files import write_atomically
from fedge.preprocess import apply
from fedge.task import TaskSpec
from fedge.tasks import Partitioning, Share, partition, share_data, write_share, write_task
from fedge.tasks.partition import samples_of
from fedge.transport import parse_address

POLL_S: Final = 0.2
REACH_S: Final = 10.0
"""Time limit for connecting to the user's own broker."""
SERVER_DATA: Final = 0.05  # of all samples, as in `fedge simulate`
DEADLINE_S: Final = 240
"""Of a round. Generous: on this machine the devices share a few cores, and each imports torch in its first round."""
PARALLEL_INFERENCE: Final = 2
LIMITS: Final[dict[str, int]] = {"mnist": 4000, "fashion-mnist": 4000, "image-folder": 4000}
"""Default samples of the large sets: a demo takes minutes, not hours."""


@dataclass(frozen=True, slots=True)
class Cameras:
    """The simulated devices: their data by id, their task, and a file of the server's own samples."""

    task: TaskSpec
    shares: dict[str, Share]
    server_data: Path | None = None


async def run(
    settings: DemoSettings, watch: Watch, options: Mapping[str, Option] = NO_OPTIONS
) -> tuple[Outcome, Background]:
    """Run the federation, the baselines and the inference; all processes have ended when it returns.

    `options` are the method's own.

    Raises:
        ConfigError: the data, the partition or the broker is not available as requested.
        ProcessError: a process failed, or a device ended without a bundle.
        TransportError: the broker does not start.
    """
    began = time.monotonic()
    watch.phase("partitioning the samples")
    cameras = partition_samples(settings, server_data=needs_server_data(settings.method, options))
    with Children(settings.folder / "logs") as children:
        federation = f"demo-{secrets.token_hex(4)}"
        if settings.secure:
            await enrol(settings, federation, cameras.shares, children)
        async with broker_of(settings) as (address, broker_name):
            common = ["--broker", address, "--federation", federation]
            summary = await federate(settings, cameras, common, children, watch, options)
        bundles = installed_bundles(settings, cameras, summary)
        simple, fedavg_curve = await compare(settings, cameras, summary, bundles, watch)
        personalised = await infer(settings, cameras, bundles, children, watch)
    accuracy = {i: simple[i] | {"personalised": personalised[i]} for i in cameras.shares}
    devices = tuple(
        DeviceOutcome(
            id=i,
            n_train=len(share.y_train),
            n_test=len(share.y_test),
            experts=tuple(int(k) for k, members in summary["clusters"].items() if i in members),
            accuracy=accuracy[i],
            bundle=str(bundles[i]),
            max_abs_diff_torch_onnx=look(bundles[i])[0].max_abs_diff,
        )
        for i, share in cameras.shares.items()
    )
    outcome = Outcome(
        task=settings.task,
        partition=settings.partition,
        agents=settings.devices,
        rounds=settings.rounds,
        seed=settings.seed,
        broker=broker_name,
        wall_s=round(time.monotonic() - began, 1),
        bytes_up=summary["bytes_up"],
        bytes_down=summary["bytes_down"],
        clusters={k: tuple(members) for k, members in summary["clusters"].items()},
        selection=dict.fromkeys(cameras.shares, 0) | summary["selection"],
        split=summary["split"],
        accuracy=mean_accuracy(devices),
        devices=devices,
    )
    trial = summary.get("trial")
    background = Background(
        method=settings.method,
        accuracy_by_round={
            "personalised": curve_of(msgspec.convert(summary["history"], tuple[RoundSummary, ...])),
            "fedavg": fedavg_curve,
        },
        ids=tuple(trial["ids"]) if trial else (),
        places=np.array(trial["places"]) if trial else None,
        groups={device_id: share.group for device_id, share in cameras.shares.items()},
    )
    return outcome, background


# ------------------------------------------------------------------------------------------------------- the data


def needs_server_data(method: str, options: Mapping[str, Option]) -> bool:
    """Whether the server, too, learns from labelled samples."""
    given = {"", *(f"{name}={value}" for name, value in options.items())}
    return not given.isdisjoint(method_class(method).SERVER_DATA)


def partition_samples(settings: DemoSettings, *, server_data: bool = False) -> Cameras:
    """Partition the samples; every device gets a folder with its data, and separate test samples.

    `server_data`: set a twentieth apart for the server first, as in a simulation.

    Raises:
        ConfigError: no such data, or too few.
    """
    samples, kept = samples_of(settings, settings.seed, SERVER_DATA if server_data else 0.0, LIMITS.get(settings.task))
    file = settings.folder / "server_data.npz" if server_data else None
    if file is not None:
        np.savez(file, x=kept.x, y=kept.y)
    shares = partition(samples, settings.devices, settings, seed=settings.seed)
    width = len(str(settings.devices - 1))
    cameras = Cameras(samples.spec, {f"camera-{i:0{width}}": share for i, share in enumerate(shares)}, file)
    write_task(cameras.task, settings.folder / "task.json")
    for device_id, share in cameras.shares.items():
        without_test = dataclasses.replace(share, x_test=share.x_test[:0], y_test=share.y_test[:0])
        write_share(without_test, settings.folder / device_id / "data.npz")
        np.savez(settings.folder / device_id / "test.npz", x=share.x_test)
    return cameras


# ------------------------------------------------------------------------------------------------ the federation


@contextlib.asynccontextmanager
async def broker_of(settings: DemoSettings) -> AsyncIterator[tuple[str, str]]:
    """Address and name of the broker: our own, or the user's.

    Raises:
        ConfigError: it is neither.
        TransportError: it does not start, or cannot be reached.
    """
    if ":" in settings.broker:
        if settings.secure:
            raise ConfigError(f"--secure starts a broker of its own: it cannot use {settings.broker}")
        await reach(*parse_address(settings.broker))
        yield settings.broker, settings.broker
    else:
        own = settings.folder / "provision" / "broker" if settings.secure else None
        async with LocalBroker(settings.broker, home=settings.folder / "broker", identity=own) as broker:
            yield f"{broker.host}:{broker.port}", broker.name


async def enrol(settings: DemoSettings, federation: str, devices: Collection[str], children: Children) -> None:
    """Found the federation, and give its devices their certificates, all by the commands.

    Raises:
        ProcessError: a command failed.
    """
    folder = ("--folder", str(settings.folder / "provision"))
    await ended(children, "provision-init", ("provision", "init", federation, "localhost", *folder))
    kits = settings.folder / "kits"
    kits.mkdir()
    await ended(children, "provision-device", ("provision", "device", *devices, "--to", str(kits), *folder))
    for i in devices:
        words = ("enrol", str(kits / f"{i}.kit"), "--folder", str(settings.folder / i))
        await ended(children, f"{i}-enrol", words)
    shutil.rmtree(kits)  # a kit lets its reader impersonate the device


def identity(settings: DemoSettings, *place: str) -> list[str]:
    """The flags of a machine whose identity is there; none unless the demo is secure."""
    return ["--identity", str(settings.folder.joinpath(*place))] if settings.secure else []


async def ended(children: Children, name: str, arguments: Sequence[str]) -> Child:
    """Run a command to its end.

    Raises:
        ProcessError: it failed.
    """
    child = children.start(name, arguments)
    while child.running:  # noqa: ASYNC110 - a process has no event
        await asyncio.sleep(POLL_S / 4)
    child.require(0)
    return child


async def reach(host: str, port: int) -> None:
    """Check that the broker is listening.

    Raises:
        TransportError: it is not.
    """
    try:
        async with asyncio.timeout(REACH_S):
            _, writer = await asyncio.open_connection(host, port)
    except OSError as error:  # a timeout is one, too
        why = str(error) or f"no answer within {REACH_S:.0f} s"
        raise TransportError(f"the broker at {host}:{port} cannot be reached: {why}") from error
    writer.close()


async def federate(
    settings: DemoSettings,
    cameras: Cameras,
    common: Sequence[str],
    children: Children,
    watch: Watch,
    options: Mapping[str, Option],
) -> dict[str, Any]:
    """Run coordinator and agents until the coordinator is done, and return its summary."""
    watch.phase(f"{settings.method} over {common[1]}", settings.rounds)
    common = [*common, "--task", str(settings.folder / "task.json"), "--allow", ",".join(cameras.task.code)]
    home = settings.folder / "coordinator"
    coordinator = children.start(
        "coordinator",
        [
            "coordinator",
            *common,
            *identity(settings, "provision", "coordinator"),
            "--home",
            str(home),
            "--json",
            *_coordinator_flags(settings, cameras, options),
        ],
    )
    agents = [
        children.start(i, ["agent", *common, *identity(settings, i, "identity"), "--id", i, *_agent_flags(settings, i)])
        for i in cameras.shares
    ]
    await follow(coordinator, agents, Rounds(settings.rounds, settings.devices), watch)
    children.stop(agents)
    summary: dict[str, Any] = json.loads((home / "summary.json").read_bytes())
    return summary


def _coordinator_flags(settings: DemoSettings, cameras: Cameras, options: Mapping[str, Option]) -> list[str]:
    shared = [name for name in Setup.__struct_fields__ if name not in Partitioning.__struct_fields__]
    given = {name: getattr(settings, name) for name in ("method", "devices", "seed", *shared)}
    flags = []
    for name, value in (given | {"deadline_s": DEADLINE_S, "server_data": cameras.server_data}).items():
        if value is not None and value is not False:
            flags += [f"--{name.replace('_', '-')}", *([] if value is True else [str(value)])]
    return [*flags, *(text for name, value in options.items() for text in ("--option", f"{name}={value}"))]


def _agent_flags(settings: DemoSettings, device_id: str) -> list[str]:
    folder = settings.folder / device_id
    flags = ["--home", str(folder / "home"), "--data", str(folder / "data.npz")]
    flags += ["--min-cohort", str(settings.min_cohort)]
    if allowed := ",".join(sorted(method_class(settings.method).REVEALS)):
        write_atomically(folder / "home" / EGRESS, f'[egress]\nallow = "{allowed}"\n'.encode())
    return flags


async def follow(coordinator: Child, agents: Sequence[Child], rounds: Rounds, watch: Watch) -> None:
    """Show the coordinator's progress until it ends.

    Raises:
        ProcessError: it failed, or an agent ended before it.
    """
    with coordinator.output.open("rb") as output:
        waiting = b""
        while coordinator.running:
            for agent in agents:
                agent.require()
            *lines, waiting = (waiting + output.read()).split(b"\n")
            for line in lines:
                milestone = rounds.take(json.loads(line))
                watch.update(rounds.completed, rounds.detail, milestone=milestone)
            await asyncio.sleep(POLL_S)
    coordinator.require(0)


def installed_bundles(settings: DemoSettings, cameras: Cameras, summary: Mapping[str, Any]) -> dict[str, Path]:
    """Each device's bundle, of the release that it reported.

    Raises:
        ProcessError: a device has none; the text holds the end of its log.
    """
    bundles: dict[str, Path] = {}
    for device_id in cameras.shares:
        release = summary["installed"].get(device_id, {}).get("release")
        found = settings.folder / device_id / "home" / "bundles" / str(release)
        if release is None or not found.is_dir():
            log = settings.folder / "logs" / f"{device_id}.log"
            raise ProcessError(f"{device_id} ended without a bundle; {log} ends with:\n{tail(log)}")
        bundles[device_id] = found
    return bundles


# ------------------------------------------------------------------------------------------------ the comparison


async def compare(
    settings: DemoSettings, cameras: Cameras, summary: Mapping[str, Any], bundles: Mapping[str, Path], watch: Watch
) -> tuple[dict[str, dict[str, float]], list[tuple[int, float]]]:
    """Train the baselines and measure them, and each device's best shared model, on its test samples.

    Returns:
        Accuracies by device and name; FedAvg's validation accuracy by round.
    """
    watch.phase("baselines with the same budget")
    import torch

    from coordinator.demo import baselines
    from fedge.models.training import Network

    torch.set_num_threads(1)
    participations = spent(settings, cameras, summary)
    share_spent = sum(participations.values()) / (settings.rounds * len(cameras.shares))
    simple = await baselines.learn(
        cameras.task,
        {i: share_data(cameras.task, share) for i, share in cameras.shares.items()},
        msgspec.structs.replace(settings, participation=share_spent).for_method(settings.seed, {}),
        participations,
        settings.folder / "baselines",
    )
    network = Network(cameras.task)
    accuracy: dict[str, dict[str, float]] = {}
    for device_id, share in cameras.shares.items():
        models = {
            "local_only": simple.local_only[device_id],
            "fedavg": simple.fedavg,
            "fedavg_finetuned": simple.fedavg_finetuned[device_id],
            "best_expert": baselines.best_expert(bundles[device_id], network.layout),
        }
        x = apply(cameras.task, share.x_test)
        accuracy[device_id] = {
            name: baselines.accuracy(network, model, x, share.y_test) for name, model in models.items()
        }
    return accuracy, curve_of(simple.history)


def spent(settings: DemoSettings, cameras: Cameras, summary: Mapping[str, Any]) -> dict[str, int]:
    """Rounds of local training of each device; for `local`, which has no rounds, as many as in other methods."""
    if summary["selection"]:
        return dict(summary["selection"])
    return dict.fromkeys(cameras.shares, max(1, round(settings.rounds * settings.participation)))


async def infer(
    settings: DemoSettings, cameras: Cameras, bundles: Mapping[str, Path], children: Children, watch: Watch
) -> dict[str, float]:
    """Test accuracy of each bundle in ONNX Runtime: `fedge infer` sees inputs, neither labels nor torch."""
    watch.phase("inference by ONNX Runtime", len(bundles))
    free = asyncio.Semaphore(PARALLEL_INFERENCE)
    accuracy: dict[str, float] = {}

    async def one(device_id: str) -> None:
        async with free:
            test = settings.folder / device_id / "test.npz"
            child = await ended(children, f"{device_id}-infer", ["infer", str(bundles[device_id]), str(test), "--json"])
        answer = json.loads(child.output.read_bytes())
        if answer["imported_torch"]:
            raise ProcessError(f"{child.name} imported torch: the figures are not those of an inference-only device")
        accuracy[device_id] = float(np.mean(np.array(answer["predictions"]) == cameras.shares[device_id].y_test))
        watch.update(
            len(accuracy), f"{len(accuracy)} of {len(bundles)} devices", milestone=len(accuracy) == len(bundles)
        )

    await asyncio.gather(*(one(device_id) for device_id in bundles))
    return accuracy


def curve_of(history: Iterable[RoundSummary]) -> list[tuple[int, float]]:
    """Accuracy by round, without unmeasured rounds."""
    return [(line.round, line.accuracy) for line in history if line.accuracy is not None]
