from __future__ import annotations

import contextlib
import json
import os
import struct
import subprocess
import sys
from pathlib import Path

import pytest
from tensorboardX.proto.event_pb2 import Event

from coordinator.service.cli import _track_rounds
from coordinator.service.settings import CoordinatorSettings
from coordinator.store.store import Store
from coordinator.watch.tracking import open_tracking
from fedge.errors import ConfigError

MLFLOW = """
import json, os, sys
asked = []
def hear(event, arguments):
    if event in ("socket.connect", "socket.getaddrinfo"):
        asked.append(str(arguments))
sys.addaudithook(hear)
from pathlib import Path
from coordinator.watch.tracking import open_tracking
for first, last in ((1, 2), (3, 3)):  # stopped after two rounds, and started again
    with open_tracking(None, sys.argv[1], "shop", "run-1") as track:
        for number in range(first, last + 1):
            track(number, {"accuracy": number / 10})
from mlflow import MlflowClient
client = MlflowClient(sys.argv[1])
(experiment,) = [e for e in client.search_experiments() if e.name == "fedge"]
(run,) = client.search_runs([experiment.experiment_id])
history = [(m.step, m.value) for m in client.get_metric_history(run.info.run_id, "accuracy")]
from mlflow.telemetry.utils import is_telemetry_disabled
print(json.dumps([run.info.run_name, run.info.status, history, asked, is_telemetry_disabled()]))
"""


def scalars(folder: Path) -> list[tuple[int, str, float]]:
    """What TensorBoard's files hold: (length, its checksum, an event, its checksum), one after the other."""
    found = []
    for file in sorted(folder.glob("events.*")):
        data, at = file.read_bytes(), 0
        while at < len(data):
            (length,) = struct.unpack_from("<Q", data, at)
            event = Event.FromString(data[at + 12 : at + 12 + length])
            found += [(event.step, value.tag, round(value.simple_value, 4)) for value in event.summary.value]
            at += 16 + length
    return found


def test_tensorboard_gets_each_rounds_figures(tmp_path: Path) -> None:
    with open_tracking(tmp_path, None, "fedge-0") as track:
        track(1, {"accuracy": 0.25, "bytes_up": 1000.0})
        track(2, {"accuracy": 0.5})
    assert scalars(tmp_path / "fedge-0") == [(1, "accuracy", 0.25), (1, "bytes_up", 1000.0), (2, "accuracy", 0.5)]


def test_a_coordinator_tells_what_its_rounds_brought(tmp_path: Path) -> None:
    settings = CoordinatorSettings(broker="b:1", federation="shop", home=tmp_path, task="digits", tensorboard=tmp_path)
    shown = []
    summary = {"round": 4, "bytes_up": 10, "bytes_down": 20, "wall_s": 1.5}
    history = [{"accuracy": None, "asked": 3, "answered": 2}]
    with (
        contextlib.closing(Store(tmp_path / "home")) as store,
        _track_rounds(settings, store, lambda event, _: shown.append(event)) as observe,
    ):
        observe("answer", {})
        observe("round_done", summary | {"history": history})
    assert shown == ["answer", "round_done"]
    assert {(step, name) for step, name, _ in scalars(tmp_path / "shop")} == {
        (4, name) for name in ("bytes_up", "bytes_down", "wall_s", "asked", "answered")
    }


def test_where_nothing_is_asked_for_nothing_is_loaded(tmp_path: Path) -> None:
    code = (
        "import sys; from coordinator.watch.tracking import open_tracking\n"
        "with open_tracking(None, None, 'x') as track: track(1, {})\n"
        "sys.exit(' '.join({'mlflow', 'tensorboardX'} & set(sys.modules)) or 0)"
    )
    subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, check=True, env=os.environ | {"PYTHONPATH": str(Path.cwd())}
    )


@pytest.mark.process
@pytest.mark.filterwarnings("ignore")
def test_a_folder_that_cannot_be_written_costs_figures_and_no_round(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    with open_tracking(tmp_path, None, "run") as track:
        track(1, {"accuracy": "no number"})  # type: ignore[dict-item]
    assert "event=tracking_failed round=1" in caplog.text


@pytest.mark.process
def test_mlflow_goes_on_with_its_run_and_tells_nobody_that_it_is_used(tmp_path: Path) -> None:
    """In its own store of files, since its server needs more than mlflow-skinny."""
    environment = {**os.environ, "PYTHONPATH": str(Path.cwd()), "MLFLOW_ALLOW_FILE_STORE": "true"}
    ran = subprocess.run(
        [sys.executable, "-c", MLFLOW, f"file:{tmp_path}/store"],
        cwd=tmp_path, env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    name, status, history, asked, disabled = json.loads(ran.stdout.splitlines()[-1])
    assert (name, status) == ("shop", "FINISHED")
    assert history == [[1, 0.1], [2, 0.2], [3, 0.3]]
    assert asked == []
    assert disabled


@pytest.mark.process
@pytest.mark.filterwarnings("ignore")
def test_a_server_that_is_not_there_is_said_before_anything_runs() -> None:
    with (
        pytest.raises(ConfigError, match=r"--mlflow http://127\.0\.0\.1:9"),
        open_tracking(None, "http://127.0.0.1:9", "x"),
    ):
        raise AssertionError
