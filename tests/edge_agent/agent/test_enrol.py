from __future__ import annotations

import datetime as dt
import json
import subprocess
import sys
from pathlib import Path

import pytest

from edge_agent.agent.settings import AgentSettings
from fedge.commands.cli import main
from fedge.data.task import TaskSpec
from fedge.errors import ConfigError
from fedge.identity.certificates import load_certificate, load_key, make_device_subject, make_key
from fedge.identity.names import Role, Subject, find_subject
from fedge.settings import resolve
from fedge.tasks import load_task
from tests.support.identities import Authority


@pytest.fixture
def authority(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Authority:
    monkeypatch.chdir(tmp_path)
    return Authority(tmp_path / "server", "shop")


def kit(authority: Authority, name: str, task: TaskSpec | None = None) -> Path:
    """The kit of a device, as a file."""
    key = make_key()
    issuer = authority.issuer
    certificate = issuer.enlist(make_device_subject(issuer.settings.federation, name), key.public_key())
    file = Path(f"{name}.kit")
    file.write_bytes(issuer.make_kit(certificate, key, task))
    return file


def refused(capsys: pytest.CaptureFixture[str], *words: object) -> str:
    """Why `fedge enrol` refuses."""
    capsys.readouterr()
    assert main(["enrol", *map(str, words)]) == 2
    return capsys.readouterr().err


def test_a_kit_sets_everything(authority: Authority, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = kit(authority, "cam1", load_task("digits"))
    assert "there is no photos" in refused(capsys, file, "--folder", "d", "--data", "photos")
    assert not (tmp_path / "d").exists()
    (tmp_path / "photos").mkdir()
    assert main(["enrol", str(file), "--folder", "d", "--data", "photos", "--json"]) == 0
    config = tmp_path / "d" / "agent.toml"
    assert json.loads(capsys.readouterr().out) == {
        "id": "cam1",
        "federation": "shop",
        "config": "d/agent.toml",
        "started": False,
    }
    found = resolve(AgentSettings, "agent", config, {})
    assert (found.id, found.federation, found.broker) == ("cam1", "shop", "127.0.0.1:8883")
    assert (found.data, found.home) == (tmp_path / "photos", tmp_path / "d/home")
    assert load_task(found.task) == load_task("digits")
    assert found.identity is not None
    assert found.make_broker_settings(found.broker).cert_file == str(tmp_path / "d/identity/own.crt")
    assert (tmp_path / "d/identity/own.key").stat().st_mode & 0o777 == 0o600


def test_the_owners_configuration_stays_and_a_kit_may_be_used_again(authority: Authority, tmp_path: Path) -> None:
    file = kit(authority, "cam1")
    for folder in ("photos", "others"):
        (tmp_path / folder).mkdir()
    assert main(["enrol", str(file), "--folder", "d", "--data", "photos", "--task", "digits"]) == 0
    config = tmp_path / "d" / "agent.toml"
    config.write_text(config.read_text() + "max_temperature_c = 70.0\n")
    assert main(["enrol", str(file), "--folder", "d", "--data", "others"]) == 0
    found = resolve(AgentSettings, "agent", config, {})
    assert (found.max_temperature_c, found.data) == (70.0, tmp_path / "photos")


def test_a_task_of_ones_own_is_allowed_where_it_was_named(
    authority: Authority, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "photos").mkdir()
    file = kit(authority, "cam1")
    assert main(["enrol", str(file), "--folder", "d", "--data", "photos", "--task", "my_task:MyTask"]) == 0
    assert "now: fedge agent --config d/agent.toml --allow my_task:MyTask\n" in capsys.readouterr().out
    config = tmp_path / "d" / "agent.toml"
    assert resolve(AgentSettings, "agent", config, {"allow": "my_task:MyTask"}).task == "my_task:MyTask"
    with pytest.raises(ConfigError, match="names code that would be run here: my_task:MyTask"):
        resolve(AgentSettings, "agent", config, {})


def test_what_the_agent_lacks_is_said(authority: Authority, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["enrol", str(kit(authority, "cam1")), "--folder", "d"]) == 0
    assert "write data and task into d/agent.toml" in capsys.readouterr().out


def test_a_kit_comes_through_a_pipe(authority: Authority, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "fedge", "enrol", "-", "--folder", "d"]
    subprocess.run(command, input=kit(authority, "cam1").read_bytes(), check=True)
    assert find_subject(load_certificate(tmp_path / "d/identity/own.crt")) == Subject("shop", Role.DEVICE, "cam1")


def test_a_damaged_kit_leaves_nothing_behind(
    authority: Authority, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = kit(authority, "cam1")
    file.write_bytes(file.read_bytes().replace(b"shop", b"ship"))
    assert "cam1.kit: it is not a start-up kit, or is damaged" in refused(capsys, file, "--folder", "d")
    assert not (tmp_path / "d").exists()
    assert "give a start-up kit, or --request ID" in refused(capsys)
    assert "cam9.kit: it cannot be read: No such file" in refused(capsys, "cam9.kit")


def test_a_machine_is_one_device(authority: Authority, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["enrol", str(kit(authority, "cam1")), "--folder", "d"]) == 0
    before = {file.name: file.read_bytes() for file in (tmp_path / "d/identity").iterdir()}
    says = refused(capsys, kit(authority, "cam2"), "--folder", "d")
    assert "this machine is device cam1 of shop, and the kit is for cam2 of shop" in says
    foreign = kit(Authority(tmp_path / "foreign", "other"), "cam1")
    assert "the kit is for cam1 of other; to make it another one, delete" in refused(capsys, foreign, "--folder", "d")
    namesake = kit(Authority(tmp_path / "namesake", "shop"), "cam1")
    assert "it is by another authority of the name shop" in refused(capsys, namesake, "--folder", "d")
    assert {file.name: file.read_bytes() for file in (tmp_path / "d/identity").iterdir()} == before


def test_an_old_kit_does_not_undo_a_renewal(
    authority: Authority, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = kit(authority, "cam1")
    old = file.read_bytes()
    authority.issuer.revoke("cam1")
    authority.ago = -dt.timedelta(hours=2)
    assert main(["enrol", str(kit(authority, "cam1")), "--folder", "d"]) == 0
    file.write_bytes(old)
    assert "identity is newer" in refused(capsys, file, "--folder", "d")


def test_a_key_is_made_where_it_is_used(
    authority: Authority, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for _ in range(2):  # asked again, it is the same key
        assert main(["enrol", "--request", "cam1", "--folder", "d"]) == 0
    assert "fedge provision device --request cam1.csr" in capsys.readouterr().out
    assert main(["provision", "device", "--request", "cam1.csr", "--folder", "server"]) == 0
    assert "it answers the request of a key that is not in" in refused(capsys, "cam1.kit", "--folder", "elsewhere")
    assert main(["enrol", "cam1.kit", "--folder", "d"]) == 0
    identity = tmp_path / "d/identity"
    assert load_key(identity / "own.key").public_key() == load_certificate(identity / "own.crt").public_key()
    assert "holds a certificate already" in refused(capsys, "--request", "cam1", "--folder", "d")
    assert "no device can be called broker" in refused(capsys, "--request", "broker", "--folder", "e")
