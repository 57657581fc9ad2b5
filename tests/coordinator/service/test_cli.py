"""The commands as a user meets them: help, progress, exit codes, what is imported."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from click.testing import CliRunner

from coordinator.aggregation.protection import Protection
from coordinator.fleet.mqtt.fleet import MqttFleet
from coordinator.fleet.mqtt.intake import Assignment
from coordinator.fleet.problems import Problem
from coordinator.methods.baselines.fedavg import FedAvgState
from coordinator.methods.catalogue import make_method
from coordinator.methods.state import RoundSummary
from coordinator.service import beginning
from coordinator.service.cli import Progress, coordinator, describe_time_left, read_presence, status
from coordinator.service.settings import CoordinatorSettings
from coordinator.service.summary import write_summary
from coordinator.store.store import Store
from coordinator.watch import runs
from fedge.commands.broker import LocalBroker
from fedge.commands.cli import command
from fedge.errors import ConfigError, StoreError
from fedge.identity.names import CRL, Role
from fedge.membership.signed_messages import Signed
from fedge.steps.contract import Declined, Result
from fedge.steps.mixture.install import Installed
from fedge.tasks import load_task
from fedge.wire.messages import BlobRef, Presence, Status, Why, encode_message
from fedge.wire.topics import Topics
from fedge.wire.transport import Transport
from tests.deploy.tcp import TcpServer
from tests.support.broker import settings as broker_settings
from tests.support.device import IN_0_1, LAYOUT, TASK, RawDevice
from tests.support.identities import Authority, OpenBroker

WAIT_S = 300.0


def run_fedge(*arguments: object, **kwargs: Any) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "fedge", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=WAIT_S, **kwargs)


def common(home: Path, port: int = 1) -> list[str]:
    return ["--broker", f"127.0.0.1:{port}", "--federation", "f", "--home", str(home), "--task", "digits"]


@pytest.fixture
async def home(tmp_path: Path) -> Path:
    """A folder in which one of two rounds is done."""
    folder = tmp_path / "server"
    settings = CoordinatorSettings(broker="localhost", federation="f", home=folder, task="t", method="fedavg", rounds=2)
    method = make_method("fedavg", settings.make_method_settings())
    line = RoundSummary(round=1, asked=2, answered=2, accuracy=0.875, loss=0.5)
    state = FedAvgState(
        round=1,
        layout=LAYOUT,
        model=BlobRef(digest="0" * 64, size_bytes=1),
        participations={"cam1": 1},
        history=(line,),
    )
    with contextlib.closing(Store(folder)) as store:
        store.add_counts({"bytes_up": 2_000_000, "refused.malformed": 3})
        fleet = MqttFleet(
            settings.make_broker_settings(settings.broker), store,
            Assignment(federation="f", run="r", task=TASK, layout=LAYOUT, deadline_s=1.0), lambda event, fields: None,
        )  # fmt: skip
        fleet.problems = {"cam2": Problem(round=1, reason="declined: hot")}
        write_summary(settings, method, state, store, fleet)
    return folder


# ------------------------------------------------------------------------------------------------------------- status


def test_status_tells_rounds_devices_traffic_and_refusals(home: Path) -> None:
    said = CliRunner().invoke(status, ["--home", str(home)], catch_exceptions=False)
    assert said.exit_code == 0
    for text in ("1 of 2", "0.875", "2.00 MB up", "malformed", "cam1: not seen, trained 1 times"):
        assert text in said.output
    assert "  cam2: not seen, trained 0 times\n    round 1: declined: hot" in said.output


def test_status_shows_the_accuracy_of_the_bundles_that_answer_before_that_of_training(home: Path) -> None:
    found = json.loads((home / "summary.json").read_bytes())
    cam = {"presence": "online", "seen_at": None, "at_work": {"right": 30, "wrong": 10, "recent": 0.75}}
    (home / "summary.json").write_text(json.dumps(found | {"fleet": {"cam1": cam}, "devices": {"cam1": "online"}}))
    said = CliRunner().invoke(status, ["--home", str(home)], catch_exceptions=False).output
    assert (
        "accuracy    0.750 (at work, 40 answers labelled later on 1 device)\n"
        "            0.875 (of the models in training, validation samples of the last cohort)\n"
    ) in said
    assert "trained 1 times, accuracy 0.750 at work" in said


def test_status_after_the_end_says_that_devices_were_online_and_names_the_end(home: Path) -> None:
    file = home / "summary.json"
    found = json.loads(file.read_bytes()) | {"devices": {"cam1": "online"}}
    for changes, texts in (
        ({}, ("  cam1: online, trained",)),
        ({"ended": True, "done": True}, ("  cam1: was online, trained",)),
        ({"round": 2, "rounds": 2}, ("rounds      2 of 2, the end is under way",)),
        (
            {"done": True, "rounds": 9, "stopped": 7, "best": 4},
            ("done after 7 rounds, ", "; it stopped early, and devices get the models of round 4\n"),
        ),
    ):
        file.write_text(json.dumps(found | changes))
        said = CliRunner().invoke(status, ["--home", str(home)], catch_exceptions=False).output
        assert all(text in said for text in texts), said


def test_status_says_who_ended_without_a_bundle(home: Path) -> None:
    found = json.loads((home / "summary.json").read_bytes())
    (home / "summary.json").write_text(json.dumps(found | {"without_bundle": ["cam1"]}))
    said = CliRunner().invoke(status, ["--home", str(home)], catch_exceptions=False)
    for text in ("cam1: not seen, trained 1 times, NO BUNDLE",):
        assert text in said.output


@pytest.mark.parametrize(
    ("ahead_s", "text"),
    [
        (365 * 86400, "365 d ahead of"),
        (-86400, "1 d behind"),
        (-3725, "1 h behind"),
        (61, "1 min ahead of"),
    ],
)
def test_status_shows_clocks_that_do_not_agree(home: Path, ahead_s: float, text: str) -> None:
    file = home / "summary.json"
    summary = json.loads(file.read_bytes())
    assert summary["clocks"] == {}
    file.write_text(json.dumps(summary | {"clocks": {"cam1": ahead_s}}))
    said = CliRunner().invoke(status, ["--home", str(home)], catch_exceptions=False)
    assert f"    its clock is {text} the coordinator's: set the wrong one\n" in said.output


def test_status_shows_who_is_in_quarantine_and_why(home: Path) -> None:
    file = home / "summary.json"
    summary = json.loads(file.read_bytes())
    assert summary["quarantined"] == {}
    evidence = [{"device_id": "cam9", "round": 3, "name": "long-update", "detail": "norm 50, 9.9 times the median"}]
    file.write_text(json.dumps(summary | {"quarantined": {"cam9": {"until": 23, "evidence": evidence}}}))
    said = CliRunner().invoke(status, ["--home", str(home)], catch_exceptions=False)
    assert (
        "  cam9: not seen, trained 0 times\n    in quarantine until round 23; --readmit cam9 ends it\n"
        "      round 3: long-update, norm 50, 9.9 times the median\n"
    ) in said.output


def test_status_as_json_is_the_summary_and_who_wrote_it(home: Path) -> None:
    said = CliRunner().invoke(status, ["--home", str(home), "--json"], catch_exceptions=False)
    told = json.loads(said.output)
    assert told.pop("age_s") >= 0
    assert told.pop("coordinator")["state"] == "running"
    assert told.pop("attention") == []
    assert told.pop("free_disk_gb") > 0
    assert told.pop("signatures") == []
    assert told == json.loads((home / "summary.json").read_bytes())


@pytest.mark.parametrize("content", [b"", b'{"round": 3', b"[]", b'{"round": 3}', b"\xff"])
def test_status_of_a_damaged_summary_is_an_error_of_the_store(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "summary.json").write_bytes(content)
    with pytest.raises(StoreError, match="damaged"):
        CliRunner().invoke(status, ["--home", str(tmp_path), "--json"], catch_exceptions=False)


def test_status_of_no_coordinator(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is no coordinator's --home"):
        CliRunner().invoke(status, ["--home", str(tmp_path)], catch_exceptions=False)


@pytest.mark.parametrize("flags", [[], ["--broker", "x"], ["--home", "x", "--broker", "y", "--federation", "f"]])
def test_status_wants_one_place_to_look_at(flags: list[str]) -> None:
    said = CliRunner().invoke(status, flags)
    assert said.exit_code == 2
    assert "give either --home" in said.output


async def test_status_of_a_broker_names_the_devices(mosquitto: LocalBroker, tmp_path: Path) -> None:
    async with RawDevice(mosquitto, "cam1", tmp_path), RawDevice(mosquitto, "cam2", tmp_path, federation="other"):
        assert await read_presence(broker_settings(mosquitto), "f") == {"cam1": "online"}
        flags = ["status", "--broker", f"{mosquitto.host}:{mosquitto.port}", "--federation", "f", "--json"]
        said = await asyncio.to_thread(run_fedge, *flags)
    assert json.loads(said.stdout) == {"federation": "f", "devices": {"cam1": "online"}}


async def test_status_of_a_broker_does_not_believe_who_was_revoked(tmp_path: Path) -> None:
    authority = Authority(tmp_path / "authority", "test")
    async with OpenBroker(authority, tmp_path / "broker") as broker:
        topics = Topics("test")
        said = Status(device_id="", incarnation="x", presence=Presence.ONLINE, n_samples=1)
        ours = Transport(broker.settings(authority.issue("coordinator", Role.COORDINATOR)), "ours")
        async with ours:
            for name in ("cam1", "cam2"):
                device = Signed(broker.settings(authority.issue(name)), None)
                topic = topics.make_agent_topic(name, "status")
                payload = device.seal(topic, encode_message(msgspec.structs.replace(said, device_id=name)))
                await ours.publish(topic, payload, retain=True)
            files = authority.issue("status", Role.STATUS)
            before = (authority.folder / CRL).read_bytes()
            authority.revoke("cam2")
            await ours.publish(topics.revocations, (authority.folder / CRL).read_bytes(), retain=True)
            (authority.folder / CRL).write_bytes(before)  # it hears of it by the broker alone
            assert await read_presence(broker.settings(files), "test") == {"cam1": "online", "cam2": "revoked"}


async def test_status_of_a_broker_says_what_to_do_about_an_agent_of_fedge_0_1(
    mosquitto: LocalBroker, tmp_path: Path
) -> None:
    async with RawDevice(mosquitto, "cam1", tmp_path) as old:
        await old.say("status", IN_0_1, retain=True)
        (told,) = (await read_presence(broker_settings(mosquitto), "f")).values()
    assert told.endswith("update fedge on cam1 to 0.2 or later")


async def test_status_asks_a_broker_as_whom_it_is_told(tmp_path: Path) -> None:
    """Flags, environment and a file, as everywhere."""
    said: list[bytes] = []

    async def refuse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        said.append(await reader.read(1000))
        writer.write(bytes([0x20, 3, 0, 0x87, 0]))  # CONNACK: not authorised

    async with TcpServer(refuse) as server:
        config = tmp_path / "fedge.toml"
        config.write_text(f'[status]\nbroker = "127.0.0.1:{server.port}"\nusername = "from the file"\n')
        flags = ["--config", str(config), "--federation", "f", "--username", "me"]
        environment = os.environ | {"FEDGE_STATUS_PASSWORD": "hunter2"}
        refused = await asyncio.to_thread(run_fedge, "status", *flags, env=environment)
    assert said[0].endswith(b"\x00\x02me\x00\x07hunter2")
    assert "ot authorized" in refused.stderr


async def test_status_of_a_federation_that_the_broker_does_not_know(mosquitto: LocalBroker) -> None:
    address = f"{mosquitto.host}:{mosquitto.port}"
    said = await asyncio.to_thread(run_fedge, "status", "--broker", address, "--federation", "nothing")
    assert said.returncode == 2
    assert f"the broker at {address} knows no device of a federation 'nothing'" in said.stderr


# ----------------------------------------------------------------------------------------------------------- progress


def summary(**changes: Any) -> dict[str, Any]:
    values = {
        "round": 2, "rounds": 4, "done": False, "bytes_up": 1_500_000, "bytes_down": 500_000, "wall_s": 12.0,
        "history": [{"accuracy": 0.75, "asked": 3, "answered": 2}], "installed": {}, "without_bundle": [],
        "round_s": [], "problems": {}, "fleet": {}, "retired": [], "quarantined": {}, "clocks": {},
    }  # fmt: skip
    return values | changes


@pytest.mark.parametrize("live", [False, True])
def test_progress_is_a_line_per_round(capsys: pytest.CaptureFixture[str], live: bool) -> None:
    progress = Progress(live=live)
    progress.observe("waiting", {"round": 1, "devices": 3})
    progress.observe("round_begun", {"round": 2, "devices": 3})
    progress.observe("answer", {"device": "a", "result": "Trained", "seconds": 1.0})
    tired = {"round": 2, "reason": "failed: its own code failed; its log says more"}
    progress.observe("round_done", summary(problems={"c": tired, "b": tired | {"round": 1}}))
    full = {"round": 3, "reason": "declined: its disk has no room for the models; its log says more"}
    progress.observe(
        "round_done",
        summary(done=True, installed={"a": {}}, without_bundle=["b", "c"], problems={"b": full, "c": full}),
    )
    progress.observe("round_done", summary(done=True, without_bundle=["b"], problems={"b": full}))
    progress.close()
    out, said = capsys.readouterr()
    assert out == ""
    assert "waiting until 3 devices are there" in said
    assert (
        "round 2/4  answered 2 of 3 (c: failed: its own code failed; its log says more)  accuracy in training 0.750  "
        "1.50 MB up, 0.50 MB down\n"
    ) in said
    why = "round 3: declined: its disk has no room for the models; its log says more"
    assert f"done: 1 bundles installed, NO BUNDLE on b, c: {why}" in said
    assert f"{why}, accuracy 0.750 (of the models in training, validation samples of the last cohort), 1.50 MB" in said
    assert f"ended: 0 bundles installed, NO BUNDLE on b: {why}" in said
    assert ("\r" in said) == live  # redrawn in place
    assert live or said.count("\n") == 5


def test_the_end_says_what_a_private_run_has_promised(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    promise = Protection(dp_epsilon=4, dp_delta=1e-6).describe_promise()
    assert promise == "epsilon at most 4, delta 1e-06; each agent's log says what it has spent"
    Progress(live=False).observe("round_done", summary(done=True, installed={"a": {}}, privacy=promise))
    assert f"; privacy: {promise}" in capsys.readouterr().err
    found = json.loads((home / "summary.json").read_bytes())
    assert found["privacy"] == Protection().describe_promise() == ""
    (home / "summary.json").write_text(json.dumps(found | {"privacy": promise}))
    assert f"privacy     {promise}" in run_fedge("status", "--home", home).stdout


@pytest.mark.parametrize(
    ("round_s", "number", "text"),
    [
        ([52.0, 2.0], 2, ""),
        ([52.0, 2.0, 2.0], 3, "  about 106 s until the bundles are there"),
        ([52.0, *[2.0] * 29], 30, "  about 52 s until the bundles are there"),
        ([52.0], 1, ""),
    ],
)
def test_the_time_that_is_left_is_told_after_three_rounds_and_holds_the_bundles(
    round_s: list[float], number: int, text: str
) -> None:
    """The first round, in which devices load torch, is no measure of the others, but of the end."""
    assert describe_time_left(summary(round=number, rounds=30, round_s=round_s)) == text


def test_the_last_round_is_told_once_and_what_follows_has_no_number(capsys: pytest.CaptureFixture[str]) -> None:
    progress = Progress(live=True)
    progress.observe("round_begun", {"round": 4, "devices": 3})
    progress.observe("round_done", summary(round=4))
    progress.observe("round_begun", {"round": 5, "devices": 3})
    progress.observe("round_done", summary(round=4))
    said = capsys.readouterr().err
    assert said.count("round 4/4") == 1
    assert "round 5" not in said
    assert "after the last round: 3 devices" in said
    assert "after round 4: answered 2 of 3" in said


# -------------------------------------------------------------------------------------------------------- coordinator


@pytest.mark.parametrize("name", ["coordinator", "status"])
def test_help_has_examples_and_exit_codes(name: str) -> None:
    said = CliRunner().invoke(command, [name, "--help"]).output
    assert "Examples:" in said
    assert f"\n    fedge {name} " in said
    assert "Exit codes:" in said


@pytest.mark.parametrize(
    ("flags", "named"),
    [(["--rounds", "-1"], "--rounds"), (["--method", "sgd"], "fedavg, "), (["--task", "nothing"], "nothing")],
)
def test_wrong_settings_are_named(tmp_path: Path, flags: list[str], named: str) -> None:
    said = run_fedge("coordinator", *common(tmp_path / "home"), *flags)
    assert said.returncode == 2
    assert named in said.stderr
    assert "Traceback" not in said.stderr


def test_a_task_that_its_data_describe_is_written_for_the_devices(tmp_path: Path) -> None:
    data, home = tmp_path / "samples.npz", tmp_path / "home"
    np.savez(data, x=np.random.default_rng(0).normal(size=(40, 6)), y=np.arange(40) % 4)
    flags = [*common(home)[:-1], "arrays"]
    said = run_fedge("coordinator", *flags)
    assert (said.returncode, "--data" in said.stderr) == (2, True)
    command = [sys.executable, "-m", "fedge", "coordinator", *flags, "--data", str(data)]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        assert any("event=connect_failed" in line for line in process.stderr)
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=WAIT_S)
    assert load_task(str(home / "task.json")) == load_task("arrays", data)


def test_a_store_that_cannot_be_read_ends_with_4(tmp_path: Path) -> None:
    (tmp_path / "store.db").write_bytes(b"no database" * 1000)
    said = run_fedge("coordinator", *common(tmp_path))
    assert said.returncode == 4
    assert "error: the store cannot be read or written" in said.stderr


def begun(home: Path, **changes: Any) -> None:
    """A coordinator's folder with a first model."""
    given = {"broker": "unused", "federation": "f", "home": home, "task": "digits", "method": "fedavg", **changes}
    settings = CoordinatorSettings(**given)
    with contextlib.closing(Store(home)) as store:
        beginning.start(settings, load_task("digits"), store)


@pytest.fixture
def waiting(tmp_path: Path, no_torch: list[int]) -> Iterator[subprocess.Popen[str]]:
    """A coordinator that waits for a broker which is not there."""
    begun(tmp_path / "home")
    process = subprocess.Popen(
        [sys.executable, "-m", "fedge", "coordinator", *common(tmp_path / "home"), "--method", "fedavg", "--json"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stderr is not None
    for line in process.stderr:
        if "event=connect_failed" in line:
            break
    yield process
    process.kill()
    process.communicate()


def test_a_refused_start_is_not_in_the_record(waiting: subprocess.Popen[str], tmp_path: Path) -> None:
    home = tmp_path / "home"
    waiting.terminate()
    waiting.communicate()
    assert runs.read_run(home).settings["method"] == "fedavg"
    before = (home / runs.FILE).read_bytes()
    with pytest.raises(ConfigError, match="another federation"):
        coordinator.main([*common(home), "--method", "fedprox"], standalone_mode=False)
    assert (home / runs.FILE).read_bytes() == before


@pytest.mark.process
@pytest.mark.parametrize(
    ("result", "code", "without"), [(Installed(release=1), 0, []), (Declined(why=Why.DISK), 6, ["cam1"])]
)
async def test_an_end_at_which_nobody_has_a_bundle_is_no_success(
    one_broker: LocalBroker, tmp_path: Path, no_torch: list[int], result: Result, code: int, without: list[str]
) -> None:
    home = tmp_path / "home"
    begun(home, rounds=0)
    flags = [*common(home, one_broker.port), "--method", "fedavg", "--rounds", 0, "--once"]
    async with RawDevice(one_broker, "cam1", tmp_path) as device:
        await device.appear("2", task=load_task("digits"))
        ending = asyncio.create_task(asyncio.to_thread(run_fedge, "coordinator", *flags))
        await device.report(await device.order("install"), result)
        said = await ending
    assert said.returncode == code, said.stderr
    if without:
        assert "error: no device has a bundle: cam1: " in said.stderr
    summary = json.loads((home / "summary.json").read_bytes())
    assert (summary["done"], summary["without_bundle"]) == (True, without)
    assert bool(summary["installed"]) == (not without)


def test_a_second_coordinator_of_a_folder_is_refused(waiting: subprocess.Popen[str], tmp_path: Path) -> None:
    said = run_fedge("coordinator", *common(tmp_path / "home"), "--method", "fedavg")
    assert said.returncode == 2
    assert "another coordinator works in" in said.stderr


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_stopping_is_clean(waiting: subprocess.Popen[str], tmp_path: Path, number: signal.Signals) -> None:
    waiting.send_signal(number)
    _, said = waiting.communicate(timeout=WAIT_S)
    assert waiting.returncode == 130
    assert "Traceback" not in said
    Store(tmp_path / "home").close()  # nobody holds it any more


def test_a_killed_coordinator_is_told_within_fifteen_seconds(waiting: subprocess.Popen[str], tmp_path: Path) -> None:
    home = tmp_path / "home"
    assert run_fedge("status", "--home", home).returncode == 0
    waiting.kill()
    waiting.wait()
    killed = time.monotonic()
    while (said := run_fedge("status", "--home", home)).returncode == 0:
        assert time.monotonic() < killed + 15
        time.sleep(0.5)
    assert said.returncode == 1
    assert "the coordinator has been silent for" in said.stdout


def test_the_coordinator_imports_neither_torch_nor_scikit_learn() -> None:
    code = """
import sys
import time
import coordinator.service.cli, coordinator.service
from coordinator.methods import MethodSettings, make_method
make_method("fedge", MethodSettings())
print(sorted({"torch", "torchvision", "sklearn", "scipy", "onnx", "onnxruntime", "matplotlib"} & set(sys.modules)))
"""
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=os.environ)
    assert found.stdout.strip() == "[]"
