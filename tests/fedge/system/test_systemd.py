from __future__ import annotations

import os
import pwd
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from fedge.errors import ConfigError, StoreError
from fedge.system.systemd import (
    AGENT,
    COORDINATOR,
    RUNTIME,
    format_daily_units,
    format_unit,
    give_to,
    make_user,
    run,
    write_public,
)


@pytest.mark.parametrize("role", [AGENT, COORDINATOR, RUNTIME])
def test_systemd_has_nothing_to_say_against_a_unit(role: str, tmp_path: Path) -> None:
    text = format_unit("agent", role, "agent --config /etc/fedge/agent.toml", "agent", tmp_path)
    assert "ReadWritePaths" not in format_unit("agent", role, "agent", "agent")
    assert f"ExecStart={sys.executable} -m fedge agent --config /etc/fedge/agent.toml\n" in text
    assert f"ReadWritePaths={tmp_path}\n" in text
    assert "User=fedge\n" in text
    verify(tmp_path, {"fedge-agent.service": text})


def test_what_runs_daily(tmp_path: Path) -> None:
    unit_text, timer = format_daily_units("renewal of certificates", "provision renew --folder /etc/fedge")
    verify(tmp_path, {"fedge-renewal.service": unit_text, "fedge-renewal.timer": timer})


def verify(folder: Path, files: dict[str, str]) -> None:
    if shutil.which("systemd-analyze") is None:
        pytest.skip("systemd is not installed")
    for name, text in files.items():
        write_public(folder / name, text)
    told = subprocess.run(
        ["systemd-analyze", "verify", *(str(folder / name) for name in files)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert not [line for line in told.stderr.splitlines() if "fedge-" in line], told.stderr


def test_a_program_that_fails_says_why() -> None:
    with pytest.raises(ConfigError, match=r"`ls /nowhere` failed: .*No such file"):
        run("ls", "/nowhere")
    with pytest.raises(ConfigError, match="`no-such-program` cannot be run"):
        run("no-such-program")


def test_an_environment_that_services_cannot_reach_is_refused(
    tmp_path: Path, python_at: Callable[[Path], None]
) -> None:
    closed = tmp_path / "home"
    closed.mkdir(mode=0o700)
    python_at(closed / "bin" / "python")
    (closed / "bin").mkdir()
    with pytest.raises(ConfigError, match="is closed to others: install fedge below /opt"):
        make_user()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
def test_what_is_given_is_its_owners_alone(tmp_path: Path) -> None:
    (tmp_path / "i").mkdir()
    write_public(tmp_path / "i" / "own.key", "x")
    give_to(tmp_path / "i", pwd.getpwnam("nobody"))
    for path in (tmp_path / "i", tmp_path / "i" / "own.key"):
        assert path.stat().st_uid == pwd.getpwnam("nobody").pw_uid
    assert (tmp_path / "i").stat().st_mode & 0o777 == 0o700


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
def test_a_link_in_a_folder_gives_nothing_else_away(tmp_path: Path) -> None:
    """A service that was taken over owns its folder, and waits for root to come by again."""
    nobody, identity, target = pwd.getpwnam("nobody"), tmp_path / "i", tmp_path / "shadow"
    target.write_text("root's")
    target.chmod(0o600)
    identity.mkdir()
    for first in (True, False):
        (identity / "acl").unlink(missing_ok=True)
        (identity / "acl").symlink_to(target)
        if not first:
            (identity / "own.key").hardlink_to(target)
        give_to(identity, nobody)
        write_public(identity / "acl", "theirs")
        assert (target.read_text(), target.stat().st_uid, target.stat().st_mode & 0o777) == ("root's", 0, 0o600)
        assert (identity / "acl").read_text() == "theirs"
        assert (identity / "acl").lstat().st_uid == nobody.pw_uid
        assert (identity / "acl").lstat().st_mode & 0o777 == 0o644


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
def test_what_is_somebody_elses_is_not_given(tmp_path: Path) -> None:
    os.chown(tmp_path, pwd.getpwnam("daemon").pw_uid, -1)
    with pytest.raises(StoreError, match="and is for nobody: see what is in it"):
        give_to(tmp_path, pwd.getpwnam("nobody"))
