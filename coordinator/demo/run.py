"""A demo from the samples to the figures: real processes around a real broker, then the comparison."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import secrets
import shutil
import sys
import time
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from coordinator.demo.baselines import BASELINES, make_demo_scenario, read_events, run_baselines, run_choosing
from coordinator.demo.boards import choose_boards, compute_share, limit_shares
from coordinator.demo.broker import open_broker
from coordinator.demo.processes import Child, Children, ProcessError, read_tail
from coordinator.methods.baselines.local import Local
from coordinator.methods.catalogue import load_method_class
from coordinator.methods.settings import Option
from coordinator.selection.select import compute_cohort_size
from coordinator.service.cli import Progress
from coordinator.simulation.compare import compare_runs
from coordinator.simulation.evaluation import compute_epsilon_spent
from coordinator.simulation.federation import Federation, require_summable
from coordinator.simulation.reports.choices import Choices
from coordinator.simulation.reports.comparison import Comparison, Demonstration
from coordinator.simulation.reports.outcome import DeviceOutcome, Point, RunOutcome, compute_class_score, make_outcome
from coordinator.simulation.run import Watch
from coordinator.simulation.settings import DemoSettings, Setup
from coordinator.watch.words import format_devices
from fedge.bundle.manifest import Part, PoolInfo, read_manifest
from fedge.data.preprocessing import preprocess
from fedge.models.build import make_initial_model
from fedge.models.training import Network
from fedge.privacy.egress import FILE as EGRESS
from fedge.system.files import write_atomically
from fedge.tasks import Partitioning, partition_pool, write_share, write_task
from fedge.tasks.partition import load_samples
from fedge.tasks.problems import require_classes
from fedge.tensors.layout import HEAD, Layout, Model, Tensors, flatten, from_bytes
from fedge.wire.messages import Role

POLL_S: Final = 0.2
SERVER_DATA: Final = 0.05  # of all samples, as in `fedge simulate`
DEADLINE_S: Final = 240
"""Deadline of a round; long, because the devices share this machine's cores and import torch in their first round."""
PARALLEL_INFERENCE: Final = 2
SERVER_FILE: Final = "server_data.npz"
LIMITS: Final[dict[str, int]] = {"mnist": 4000, "fashion-mnist": 4000, "image-folder": 4000}
"""Default number of samples of the large data sets, with which a demo takes minutes, not hours."""


def run(settings: DemoSettings, watch: Watch, options: Mapping[str, Option], began: float) -> Demonstration:
    """Run the federation, the inference and the baselines; all processes have ended when it returns.

    `watch`: called with lines of progress. `options` are the method's own. `began`: the demo's start by the monotonic
    clock.

    Raises:
        ConfigError: the data, the partition or the broker is not available as requested.
        FruitlessError: nothing was learned, or no device has a bundle.
        ProcessError: a process failed, or a device ended without a bundle.
        TransportError: the broker does not start.
    """
    watch("partitioning the samples")
    method = load_method_class(settings.method)
    server_data = method.needs_server_data(options)
    cameras = partition_samples(settings, server_data=server_data)
    ours, summary, broker = asyncio.run(run_over_mqtt(settings, cameras, watch, options))
    runs = [*run_baselines(settings, cameras, summary, watch), *ours]
    boards = choose_boards(cameras.shares, settings.seed)
    comparable = ours[-1].choices and "uniform" in method.SELECTIONS and not server_data
    choosing = run_choosing(settings, cameras, boards, options, watch) if comparable else []
    found = compare_runs(
        make_demo_scenario(settings), runs, [run.method for run in runs], [settings.seed], Local.name, None
    )
    trial = summary.get("trial") or {"ids": [], "places": []}
    return Demonstration(
        **{name: getattr(found, name) for name in Comparison.__struct_fields__},
        learned_by=settings.method,
        broker=broker,
        wall_s=round(time.monotonic() - began, 1),
        places=dict(zip(trial["ids"], trial["places"], strict=True)),
        boards={i: f"{board.name}, {compute_share(board):.0%}" for i, board in boards.items()},
        choosing=tuple(choosing),
    )


async def run_over_mqtt(
    settings: DemoSettings, cameras: Federation, watch: Watch, options: Mapping[str, Option]
) -> tuple[list[RunOutcome], dict[str, Any], str]:
    """Run the federation and the inference.

    Returns:
        The outcomes of each device's best shared model and of its bundle; the coordinator's summary; the broker's name.
    """
    with Children(settings.folder / "logs") as children:
        federation = f"demo-{secrets.token_hex(4)}"
        if settings.secure:
            await enrol(settings, federation, cameras.shares, children)
        async with open_broker(settings) as (address, broker):
            common = ["--broker", address, "--federation", federation]
            summary = await federate(settings, cameras, common, children, watch, options)
        bundles = find_installed_bundles(settings, cameras, summary)
        watch(
            f"inference by ONNX Runtime on {format_devices(len(bundles))}; then {len(BASELINES)} simpler ways to learn"
        )
        predicted = await infer(settings, bundles, children)
    reported = {line["round"]: line["accuracy"] for line in summary["history"] if line["accuracy"] is not None}
    network = Network(cameras.task)
    experts = {
        i: network.compute_logits(
            load_best_expert(bundles[i], network.layout), preprocess(cameras.task, share.x_test)
        ).argmax(axis=1)
        for i, share in cameras.shares.items()
    }

    choices = Choices()
    for event in read_events(settings, "chosen"):
        choices.observe(event.name, event.fields)
    homes = (settings.folder / i / "home" for i in cameras.shares)
    spent = compute_epsilon_spent(
        homes, make_demo_scenario(settings).make_method_settings(settings.seed, {}).protection
    )

    def make_demo_outcome(method: str, classes: Mapping[str, NDArray[np.integer]]) -> RunOutcome:
        devices = [
            DeviceOutcome(
                id=i,
                group=share.group,
                n_train=len(share.y_train),
                score=compute_class_score(classes[i], share.y_test),
                trained=summary["selection"].get(i, 0),
                bundle=True,
                release=bundles[i].name,
            )
            for i, share in cameras.shares.items()
        ]
        traffic = {name: summary[name] for name in ("bytes_up", "bytes_down")}
        score = float(np.mean([device.score.value for device in devices]))
        return make_outcome(
            devices,
            method=method,
            seed=settings.seed,
            global_score=None,
            rounds=settings.rounds,
            **traffic,
            seconds=0.0,
            max_abs_diff=max(read_manifest(folder)[0].max_abs_diff for folder in bundles.values()),
            split=summary["split"],
            experts=summary["experts"],
            clusters={k: tuple(members) for k, members in summary["clusters"].items()},
            curve=(Point(round=settings.rounds, score=score, **traffic, seconds=0.0),),
            validation=reported,
            wall_s=summary["wall_s"],
            evaluation_s=0.0,
            details=spent,
            choices=choices.list_choices(cameras.shares),
        )

    return [make_demo_outcome("expert", experts), make_demo_outcome("personal", predicted)], summary, broker


# ------------------------------------------------------------------------------------------------------- the data


def partition_samples(settings: DemoSettings, *, server_data: bool = False) -> Federation:
    """Partition the samples; every device gets a folder with its data, and separate test samples.

    `server_data`: whether a twentieth is first set apart for the server, as in a simulation.

    Raises:
        ConfigError: there are no such data, or too few, or masked sums cannot cover the devices.
    """
    if settings.masking:
        require_summable(compute_cohort_size(settings.devices, settings.participation), settings.min_cohort)
    samples, kept = load_samples(
        settings, settings.seed, SERVER_DATA if server_data else 0.0, LIMITS.get(settings.task)
    )
    require_classes(samples.spec, "the demo")
    if server_data:
        np.savez(settings.folder / SERVER_FILE, x=kept.x, y=kept.y)
    shares = partition_pool(samples, settings.devices, settings, seed=settings.seed)
    width = len(str(settings.devices - 1))
    of_camera = {f"camera-{i:0{width}}": share for i, share in enumerate(shares)}
    cameras = Federation(samples.spec, of_camera, None, None, *make_initial_model(samples.spec, settings.seed))
    write_task(cameras.task, settings.folder / "task.json")
    for device_id, share in cameras.shares.items():
        without_test = dataclasses.replace(share, x_test=share.x_test[:0], y_test=share.y_test[:0])
        write_share(without_test, settings.folder / device_id / "data.npz")
        np.savez(settings.folder / device_id / "test.npz", x=share.x_test)
    return cameras


# ------------------------------------------------------------------------------------------------ the federation


async def enrol(settings: DemoSettings, federation: str, devices: Collection[str], children: Children) -> None:
    """Found the federation, and give its devices their certificates, all by the commands.

    Raises:
        ProcessError: a command failed.
    """
    folder = ("--folder", str(settings.folder / "provision"))
    await run_command(children, "provision-init", ("provision", "init", federation, "localhost", *folder))
    kits = settings.folder / "kits"
    kits.mkdir()
    await run_command(children, "provision-device", ("provision", "device", *devices, "--to", str(kits), *folder))
    for i in devices:
        words = ("enrol", str(kits / f"{i}.kit"), "--folder", str(settings.folder / i))
        await run_command(children, f"{i}-enrol", words)
    shutil.rmtree(kits)  # a kit lets its reader impersonate the device


def make_identity_flags(settings: DemoSettings, *place: str) -> list[str]:
    """Make the flags of a machine whose identity is in this folder; no flags unless the demo is secure."""
    return ["--identity", str(settings.folder.joinpath(*place))] if settings.secure else []


async def run_command(children: Children, name: str, arguments: Sequence[str]) -> Child:
    """Run a command to its end.

    Raises:
        ProcessError: the command failed.
    """
    child = children.start(name, arguments)
    while child.running:  # noqa: ASYNC110 - a process has no event
        await asyncio.sleep(POLL_S / 4)
    child.require(0)
    return child


async def federate(
    settings: DemoSettings,
    cameras: Federation,
    common: Sequence[str],
    children: Children,
    watch: Watch,
    options: Mapping[str, Option],
) -> dict[str, Any]:
    """Run coordinator and agents until the coordinator is done, and return its summary."""
    watch(
        f"{settings.method} over {common[1]}: a coordinator and {format_devices(len(cameras.shares))}, which load torch"
    )
    common = [*common, "--task", str(settings.folder / "task.json"), "--allow", ",".join(cameras.task.code)]
    home = settings.folder / "coordinator"
    coordinator = children.start(
        "coordinator",
        [
            "coordinator",
            *common,
            *make_identity_flags(settings, "provision", "coordinator"),
            "--home",
            str(home),
            "--once",
            "--json",
            *_make_coordinator_flags(settings, options),
        ],
    )
    agents = [
        children.start(
            i,
            [
                "agent",
                *common,
                *make_identity_flags(settings, i, "identity"),
                "--id",
                i,
                *_make_agent_flags(settings, i),
            ],
        )
        for i in cameras.shares
    ]
    boards = choose_boards(cameras.shares, settings.seed)
    shares = {agent: compute_share(boards[agent.name]) for agent in agents}
    await print_progress(coordinator, shares, settings.rounds)
    children.stop(agents)
    summary: dict[str, Any] = json.loads((home / "summary.json").read_bytes())
    return summary


def _make_coordinator_flags(settings: DemoSettings, options: Mapping[str, Option]) -> list[str]:
    file = settings.folder / SERVER_FILE
    shared = [name for name in Setup.__struct_fields__ if name not in Partitioning.__struct_fields__]
    given = {name: getattr(settings, name) for name in ("method", "devices", "seed", *shared)}
    flags = []
    for name, value in (given | {"deadline_s": DEADLINE_S, "server_data": file if file.exists() else None}).items():
        if value is not None and value is not False:
            flags += [f"--{name.replace('_', '-')}", *([] if value is True else [str(value)])]
    return [*flags, *(text for name, value in options.items() for text in ("--option", f"{name}={value}"))]


def _make_agent_flags(settings: DemoSettings, device_id: str) -> list[str]:
    folder = settings.folder / device_id
    flags = ["--home", str(folder / "home"), "--data", str(folder / "data.npz")]
    flags += ["--min-cohort", str(settings.min_cohort)]
    if allowed := ",".join(sorted(load_method_class(settings.method).REVEALS)):
        write_atomically(folder / "home" / EGRESS, f'[egress]\nallow = "{allowed}"\n'.encode())
    return flags


async def print_progress(coordinator: Child, agents: Mapping[Child, float], rounds: int) -> None:
    """Print the coordinator's progress until it ends.

    `agents`: the share of a processor that each gets in the rounds of training, except in the first, in which it loads
    torch.

    Raises:
        ProcessError: the coordinator failed, or an agent ended before it.
    """
    progress = Progress(live=sys.stderr.isatty())
    with contextlib.closing(progress), coordinator.output.open("rb") as output:
        async with contextlib.AsyncExitStack() as slowed:
            waiting, running = b"", True
            while running:
                running = coordinator.running
                for agent in agents:
                    agent.require()
                *lines, waiting = (waiting + output.read()).split(b"\n")
                for event in map(json.loads, lines):
                    progress.observe(event["event"], event)
                    if event["event"] == "round_done" and event["round"] == 1:
                        await slowed.enter_async_context(limit_shares(agents))
                    elif event["event"] == "round_done" and event["round"] == rounds:
                        await slowed.aclose()
                await asyncio.sleep(POLL_S)
    coordinator.require(0)


def find_installed_bundles(settings: DemoSettings, cameras: Federation, summary: Mapping[str, Any]) -> dict[str, Path]:
    """Find each device's bundle, of the release that it reported.

    Raises:
        ProcessError: a device has none; the text holds the end of its log.
    """
    bundles: dict[str, Path] = {}
    for device_id in cameras.shares:
        release = summary["installed"].get(device_id, {}).get("release")
        found = settings.folder / device_id / "home" / "bundles" / str(release)
        if release is None or not found.is_dir():
            log = settings.folder / "logs" / f"{device_id}.log"
            raise ProcessError(f"{device_id} ended without a bundle; {log} ends with:\n{read_tail(log)}")
        bundles[device_id] = found
    return bundles


# ------------------------------------------------------------------------------------------------ the comparison


async def infer(
    settings: DemoSettings, bundles: Mapping[str, Path], children: Children
) -> dict[str, NDArray[np.integer]]:
    """Predict each bundle's classes in ONNX Runtime: `fedge infer` sees inputs, neither labels nor torch."""
    free = asyncio.Semaphore(PARALLEL_INFERENCE)

    async def infer_one(device_id: str) -> NDArray[np.integer]:
        async with free:
            test = settings.folder / device_id / "test.npz"
            child = await run_command(
                children, f"{device_id}-infer", ["infer", str(bundles[device_id]), str(test), "--json"]
            )
        answer = json.loads(child.output.read_bytes())
        if answer["imported_torch"]:
            raise ProcessError(f"{child.name} imported torch: the figures are not those of an inference-only device")
        return np.array(answer["predictions"])

    return dict(zip(bundles, await asyncio.gather(*map(infer_one, bundles)), strict=True))


def load_best_expert(folder: Path, layout: Layout) -> Model:
    """Load the expert that the device chose by validation; without experts, the global or only model.

    With a pool of private modules (PM-MoE), the device's own module on the shared part.
    """
    manifest, _ = read_manifest(folder)

    def read_part(part: Part) -> Tensors:
        return from_bytes((folder / part.file_name).read_bytes())

    if isinstance(manifest.pool, PoolInfo):
        own = read_part(manifest.candidates[manifest.pool.own].part)
        if manifest.pool.trunk is None:
            return flatten(own, layout)
        trunk = read_part(manifest.pool.trunk)
        head = (tensor.name for tensor in layout.select(HEAD).tensors)
        added = {name: np.add(trunk[name], own[short]) for name, short in zip(head, ("weight", "bias"), strict=True)}
        return flatten(trunk | added, layout)
    candidates = {candidate.role: candidate for candidate in manifest.candidates}
    chosen = next(candidates[role] for role in (Role.EXPERT, Role.GLOBAL, *Role) if role in candidates)
    return flatten(read_part(chosen.part), layout)
