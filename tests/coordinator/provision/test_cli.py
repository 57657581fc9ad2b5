from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest

from coordinator.provision.issuer import Issuer
from fedge.commands.cli import main
from fedge.identity.certificates import encode_pem, load_certificate, make_certificate_request, make_key
from fedge.identity.names import Role, Subject, find_subject
from fedge.membership.kit import unseal_kit
from fedge.settings import read_section
from fedge.tasks import load_task, write_task


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A federation, made by the command; the test's own folder is the current one."""
    monkeypatch.chdir(tmp_path)
    assert main(["provision", "init", "shop", "server.local", "--folder", "s"]) == 0
    return tmp_path / "s"


def said(capsys: pytest.CaptureFixture[str], *words: object) -> dict[str, object]:
    """What `fedge provision ... --json` says."""
    capsys.readouterr()
    assert main(["provision", *map(str, words), "--folder", "s", "--json"]) == 0
    return json.loads(capsys.readouterr().out)  # type: ignore[no-any-return]


def test_the_coordinator_finds_all_in_its_configuration(folder: Path) -> None:
    assert read_section(folder / "coordinator.toml", "coordinator") == {
        "broker": "server.local:8883",
        "federation": "shop",
        "identity": str(folder / "coordinator"),
        "home": str(folder / "home"),
    }


def test_a_kit_for_each_device(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_task(load_task("digits"), tmp_path / "task.json")
    (tmp_path / "stick").mkdir()
    told = said(capsys, "device", "cam1", "cam2", "--to", "stick", "--task", "task.json")
    assert told == {"kits": ["stick/cam1.kit", "stick/cam2.kit"]}
    for name in ("cam1", "cam2"):
        file = tmp_path / "stick" / f"{name}.kit"
        kit = unseal_kit(file.read_bytes())
        assert (kit.id, kit.broker, kit.task) == (name, "server.local:8883", load_task("digits"))
        assert file.stat().st_mode & 0o777 == 0o600


def test_a_kit_that_answers_a_request_holds_no_key(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "x.csr").write_bytes(encode_pem(make_certificate_request("cam3", make_key())))
    assert said(capsys, "device", "--request", "x.csr") == {"kits": ["cam3.kit"]}
    assert unseal_kit((tmp_path / "cam3.kit").read_bytes()).key is None


def test_the_identity_of_a_relay(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert said(capsys, "relay", "north", "--to", "t") == {"identity": "t/north"}
    certificate = load_certificate(folder.parent / "t/north/own.crt")
    assert find_subject(certificate) == Subject("shop", Role.RELAY, "north")
    assert Issuer(folder).renew("north", "north", certificate.public_key()) == certificate  # type: ignore[arg-type]
    assert main(["provision", "relay", "north", "--folder", "s"]) == 2
    said(capsys, "revoke", "north")
    said(capsys, "relay", "north", "--to", "t")


def test_revoke_and_make_anew(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said(capsys, "device", "cam1")
    how = "a `fedge broker --identity` starts anew by itself"
    assert said(capsys, "revoke", "cam1", "status") == {"revoked": ["cam1", "status"], "broker": how}
    said(capsys, "device", "cam1")
    assert said(capsys, "server", "status") == {"identity": "s/status"}
    assert find_subject(load_certificate(folder / "status/own.crt")) is not None


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["init", "shop", "h", "--folder", "s"], "holds a federation's authority already"),
        (["init", "a/b", "h", "--folder", "t"], "federation: expected 1 to 63 letters"),
        (["device", "--folder", "s"], "name the devices, or give their requests"),
        (["device", "status", "--folder", "s"], "no device can be called status"),
        (["device", "a b", "--folder", "s"], "is not a name of a device"),
        (["device", "cam1", "--folder", "nowhere"], "make one with `fedge provision init`"),
        (
            ["device", "cam1", "--task", "code.json", "--folder", "s"],
            "no kit may name code, and its task names os:fork",
        ),
        (["device", "cam1", "--task", "s/ca.crt", "--folder", "s"], "is no description of a task"),
        (["device", "cam1", "--to", "stick", "--folder", "s"], "there is no folder stick for the kits"),
        (["device", "--request", "cam1.csr", "--folder", "s"], "cam1.csr cannot be read"),
        (["revoke", "cam9", "--folder", "s"], "has no member cam9"),
        (["server", "coordinator", "--folder", "s"], "`fedge provision revoke coordinator` first"),
        (["server", "cam1", "--folder", "s"], "'cam1' is not one of"),
    ],
)
def test_what_is_wrong_is_named_and_changes_nothing(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], says: str
) -> None:
    task = msgspec.structs.replace(load_task("digits"), model="os:fork")
    (tmp_path / "code.json").write_bytes(msgspec.json.encode(task))
    assert main(["provision", *words]) == 2
    assert says in capsys.readouterr().err
    assert not (tmp_path / "cam1.kit").exists()
    assert not (tmp_path / "t").exists()
    assert "cam1" not in (folder / "coordinator/members.json").read_text()


@pytest.mark.parametrize(
    "host",
    [
        "edge\nlistener 1884",
        "edge:8883",
        "edge server",
        "",
        "[::1]",
        "mqtt://edge",
        "b\u00fcro.local",
        "a..b",
        "a" * 64,
    ],
)
def test_a_host_that_is_none_is_refused_before_anything_is_made(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], host: str
) -> None:
    assert main(["provision", "init", "shop", host, "--folder", str(tmp_path / "new")]) == 2
    assert "is no host: give the broker's name, such as edge-server.local" in capsys.readouterr().err
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("host", ["edge-server.local", "edge_server", "192.168.1.5", "fd00::5", "xn--bro-hoa.local"])
def test_names_and_addresses_are_hosts(tmp_path: Path, host: str) -> None:
    assert main(["provision", "init", "shop", host, "--folder", str(tmp_path / "new")]) == 0
