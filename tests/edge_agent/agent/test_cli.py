"""`fedge agent` as its users meet it: help, settings, examples, and the process between start and SIGTERM."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import numpy as np
import psutil
import pytest
from click.testing import CliRunner

from edge_agent.agent.cli import make_agent
from edge_agent.agent.events import ignore_event
from edge_agent.agent.settings import AgentSettings
from fedge.commands.broker import LocalBroker
from fedge.commands.cli import command
from fedge.errors import ConfigError
from fedge.models.build import make_initial_model
from fedge.privacy.egress import Rules
from fedge.settings import describe_settings, resolve
from fedge.steps.descriptions.profile import Profile
from fedge.steps.descriptions.route import Route
from fedge.system.background import STOP_S
from fedge.tasks import load_task, read_device_data
from fedge.tensors.codecs import encode
from fedge.tensors.layout import Codec, unflatten
from fedge.wire.connection.route import Address, parse_address
from fedge.wire.messages import BlobRef, Outcome, Presence, Why
from tests.support.broker import local_broker
from tests.support.peer import WAIT_S, Peer, order_of, train
from tests.support.waiting import until

ROOT = Path(__file__).parents[3]
EXAMPLES = ROOT / "examples"
AT_REST = 60e6
"""Bytes; docs/operating.md says what was measured."""


@pytest.fixture
def data(tmp_path: Path) -> Path:
    rng = np.random.default_rng(0)
    path = tmp_path / "cam1.npz"
    np.savez(path, x=rng.integers(0, 17, (40, 8, 8)).astype(np.float32), y=np.arange(40) % 10)
    return path


def flags(data: Path, home: Path) -> dict[str, object]:
    return {
        "broker": "localhost",
        "federation": "test",
        "id": "cam1",
        "home": home,
        "task": "digits",
        "data": data,
    }


# ---------------------------------------------------------------------------------------------------- help, settings


def test_help_shows_every_setting_and_examples() -> None:
    text = CliRunner().invoke(command, ["agent", "--help"]).output
    for setting in describe_settings(AgentSettings, "agent"):
        assert setting.flag in text
        assert setting.help, setting.name
    assert "  fedge agent --config raspberry_pi.toml --id cam3 --inference-only\n" in text, "examples keep their lines"


def test_the_example_configuration_is_right() -> None:
    settings = resolve(AgentSettings, "agent", EXAMPLES / "raspberry_pi.toml", {})
    assert settings.max_temperature_c == 75
    assert parse_address(settings.broker) == Address("edge-server.local", 8883)
    assert settings.keepalive_s == 60
    assert settings.identity is not None


def test_the_example_of_the_other_side_is_right() -> None:
    from coordinator.service.settings import CoordinatorSettings

    settings = resolve(CoordinatorSettings, "coordinator", EXAMPLES / "edge_server.toml", {})
    agents = resolve(AgentSettings, "agent", EXAMPLES / "raspberry_pi.toml", {})
    assert (settings.federation, settings.task) == (agents.federation, agents.task)
    assert None not in (settings.identity, agents.identity)
    assert parse_address(settings.broker).port == parse_address(agents.broker).port


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"id": None}, "id is missing"),
        ({"id": "cam 1"}, "id"),
        ({"id": "../cam1"}, "id"),
        ({"federation": "a/b"}, "federation"),
        ({"min_battery": 1.5}, "min_battery|min-battery"),
        ({"task": "digit"}, "unknown task digit"),
        ({"data": Path("nowhere.npz")}, "nowhere.npz"),
        ({"broker": "host:port"}, "HOST:PORT"),
        ({"cert_file": "c.pem"}, "ca_file"),
        ({"train_on": "cuda"}, "finds no GPU here"),
        ({"train_on": "cuda", "inference_only": True}, "trains nothing"),
    ],
)
def test_a_wrong_setting_is_named(
    data: Path, tmp_path: Path, changes: dict[str, object], says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with pytest.raises(ConfigError, match=says):
        make_agent(resolve(AgentSettings, "agent", None, flags(data, tmp_path) | changes), Rules(), ignore_event)


def test_a_budget_whose_delta_promises_nothing_to_the_samples_is_refused(data: Path, tmp_path: Path) -> None:
    given = flags(data, tmp_path) | {"max_epsilon": 8.0, "delta": 0.5}
    with pytest.raises(ConfigError, match=r"--delta 0\.5 promises nothing to 32 samples: it must be well below 1 / 32"):
        make_agent(resolve(AgentSettings, "agent", None, given), Rules(), ignore_event)
    make_agent(resolve(AgentSettings, "agent", None, given | {"delta": 0.01}), Rules(), ignore_event)


def test_the_password_is_never_shown(data: Path, tmp_path: Path) -> None:
    settings = resolve(AgentSettings, "agent", None, flags(data, tmp_path) | {"password": "hunter2"})
    assert "hunter2" not in repr(settings)
    assert "hunter2" not in repr(settings.make_broker_settings(settings.broker))


# ---------------------------------------------------------------------------------------------------- custom_task.py


def test_the_custom_task_of_the_examples_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    from fedge.models.build import make_network as build_network

    monkeypatch.syspath_prepend(str(EXAMPLES))
    rng = np.random.default_rng(0)
    np.savez(tmp_path / "m7.npz", **{state: rng.normal(size=64 * 20 + 5) for state in ("healthy", "worn", "broken")})
    task = load_task("custom_task:Vibration")
    data = read_device_data(task, tmp_path / "m7.npz", seed=0)
    assert (data.n_train, len(data.y_val), data.x_train.shape[1:]) == (48, 12, (1, 64))
    assert set(data.y_train[data.sensitive]) == {2}
    assert set(data.shared[1]) == {0, 1}
    logits = build_network(task)(torch.from_numpy(data.x_train))
    assert logits.shape == (48, 3)
    assert load_task("custom_task:Vibration").compute_fingerprint() == task.compute_fingerprint()


# ---------------------------------------------------------------------------------------------------- the process


@pytest.fixture
async def broker(tmp_path: Path) -> AsyncIterator[LocalBroker]:
    async with local_broker("auto", tmp_path) as running:
        yield running


@asynccontextmanager
async def agent_process(broker: LocalBroker, home: Path, data: Path, *more: str) -> AsyncIterator[Process]:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "fedge", "agent", "--broker", f"{broker.host}:{broker.port}"),
        *("--federation", "test", "--id", "cam1", "--home", str(home), "--task", "digits", "--data", str(data)),
        *("--json", *more),
        stdout=PIPE,
        cwd=ROOT,
    )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_from_start_to_a_clean_stop(
    broker: LocalBroker, tmp_path: Path, data: Path, number: signal.Signals
) -> None:
    async with Peer(broker, tmp_path) as peer, agent_process(broker, tmp_path / "home", data) as process:
        await peer.presence(Presence.ONLINE)
        process.send_signal(number)
        async with asyncio.timeout(WAIT_S):
            out, _ = await process.communicate()
        await peer.presence(Presence.SLEEPING)
        assert process.returncode == 130
        assert [json.loads(line)["event"] for line in out.splitlines()] == ["online", "stopping", "sleeping"]


async def test_an_idle_agent_is_small_and_a_working_one_answers(
    broker: LocalBroker, tmp_path: Path, data: Path
) -> None:
    async with Peer(broker, tmp_path) as peer, agent_process(broker, tmp_path / "home", data) as process:
        await peer.presence(Presence.ONLINE)
        maps = await asyncio.to_thread(Path(f"/proc/{process.pid}/maps").read_text)
        assert "numpy" in maps
        assert "torch" not in maps
        bad = order_of(Profile(extractor=peer.model()), device="cam1")
        await peer.send(bad)
        report = await peer.report_of(bad)
        assert report.outcome is Outcome.FAILED, "another task"


async def test_an_agent_at_rest_has_given_torch_back(broker: LocalBroker, tmp_path: Path, data: Path) -> None:
    process = agent_process(broker, tmp_path / "home", data, "--keep-worker-s", "0")
    async with Peer(broker, tmp_path) as peer, process as running:
        await peer.presence(Presence.ONLINE)
        layout, first = make_initial_model(load_task("digits"), seed=0)
        model = encode(unflatten(first, layout), Codec.FLOAT32)
        action = train(BlobRef(digest=peer.sent.put(model), size_bytes=len(model)))
        order = order_of(action, f"r.1.{action.STEP}.cam1", device="cam1")
        await peer.send(msgspec.structs.replace(order, task_fingerprint=load_task("digits").compute_fingerprint()))
        assert (await peer.report_of(order)).outcome is Outcome.DONE
        await until(lambda: not psutil.Process(running.pid).children())
        assert psutil.Process(running.pid).memory_info().rss < AT_REST, psutil.Process(running.pid).memory_info()


async def test_an_inference_only_agent_says_so_and_trains_nothing(
    broker: LocalBroker, tmp_path: Path, data: Path
) -> None:
    process = agent_process(broker, tmp_path / "home", data, "--inference-only")
    async with Peer(broker, tmp_path) as peer, process as running:
        await peer.presence(Presence.ONLINE)
        status = peer.statuses[-1]
        assert status.capabilities is not None
        assert (status.capabilities.trains, status.n_samples) == (False, 0)
        assert status.capabilities.steps == {"route": 1, "install_bundle": 1, "recipe": 2}
        fingerprint = load_task("digits").compute_fingerprint()
        for action, outcome, why in (
            (Profile(extractor=peer.model()), Outcome.DECLINED, Why.NO_TRAINING),
            (Route(gate=peer.model()), Outcome.FAILED, Why.UNFIT),
        ):
            order = order_of(action, f"r.1.{action.STEP}.cam1", device="cam1")
            order = msgspec.structs.replace(order, task_fingerprint=fingerprint)
            await peer.send(order)
            report = await peer.report_of(order)
            assert (report.outcome, report.why) == (outcome, why)
        (worker,) = psutil.Process(running.pid).children()
        maps = [await asyncio.to_thread(Path(f"/proc/{pid}/maps").read_text) for pid in (running.pid, worker.pid)]
        assert ["onnxruntime" in text for text in maps] == [False, True], "the agent itself stays small"
        assert not any("torch" in text for text in maps)
        running.terminate()
        async with asyncio.timeout(STOP_S + 1):
            assert await running.wait() == 130
        gone, _ = await asyncio.to_thread(psutil.wait_procs, [worker], WAIT_S)
        assert gone


async def test_a_wrong_configuration_ends_with_2(tmp_path: Path, data: Path) -> None:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "fedge", "agent", "--id", "cam 1", "--data", str(data)),
        stderr=PIPE,
        cwd=ROOT,
    )
    async with asyncio.timeout(WAIT_S):
        _, text = await process.communicate()
    assert process.returncode == 2
    assert text.decode().startswith("error: ")
