"""Mosquitto as Debian installs it: started as root, with a configuration folder, and then the user mosquitto."""

from __future__ import annotations

import asyncio
import os
import pwd
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from coordinator.provision import installation
from coordinator.provision.installation import configure_broker, get_conf_file, restart_broker
from fedge.commands.broker import find_free_port
from fedge.errors import ConfigError
from fedge.membership.credentials import Credentials
from fedge.wire.topics import Topics
from fedge.wire.transport import Transport
from tests.support.federation import NAME
from tests.support.identities import Authority


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A folder that other users can enter, which those of a test are not."""
    with tempfile.TemporaryDirectory() as name:
        Path(name).chmod(0o755)
        yield Path(name)


def as_debian_has_it() -> None:
    try:
        pwd.getpwnam("mosquitto")
    except KeyError:
        pytest.skip("there is no user mosquitto: Debian's package is not installed")
    if os.geteuid() != 0:
        pytest.skip("only root can give files away")


def owner_of(process: int) -> int:
    return Path(f"/proc/{process}").stat().st_uid


@pytest.mark.process
async def test_it_works_as_installed(mosquitto_program: str, open_folder: Path) -> None:
    as_debian_has_it()
    ports = {name: find_free_port("127.0.0.1") for name in (NAME, "g")}
    (open_folder / "conf.d").mkdir()
    authorities = {name: Authority(open_folder / name, name, port=port) for name, port in ports.items()}
    for authority in authorities.values():
        configure_broker(authority.issuer, open_folder / "conf.d")
    main = open_folder / "mosquitto.conf"
    main.write_text(f"log_dest stderr\ninclude_dir {open_folder / 'conf.d'}\n")  # and no `user`: it becomes mosquitto
    broker = await asyncio.create_subprocess_exec(mosquitto_program, "-c", str(main), stderr=asyncio.subprocess.PIPE)
    try:
        for name, authority in authorities.items():
            folder = authority.folder / "coordinator"
            settings = Credentials(identity=folder).make_broker_settings(f"127.0.0.1:{ports[name]}")
            async with asyncio.timeout(300), Transport(settings, f"coordinator:{name}") as one:
                await one.publish(Topics(name).make_agent_topic("cam0", "status"), b"x")
                assert owner_of(broker.pid) == pwd.getpwnam("mosquitto").pw_uid
    finally:
        broker.terminate()
        await broker.communicate()


def test_only_a_broker_that_serves_this_very_federation_is_started_anew(
    open_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    as_debian_has_it()
    started, systemctl = open_folder / "started", open_folder / "systemctl"
    systemctl.write_text(f'#!/bin/sh\necho "$@" >> {started}\n')
    systemctl.chmod(0o755)
    monkeypatch.setenv("PATH", str(open_folder), prepend=os.pathsep)
    one, other = Authority(open_folder / "one").issuer, Authority(open_folder / "other").issuer
    (open_folder / "conf.d").mkdir()
    assert "--identity" in restart_broker(one, open_folder / "conf.d")
    configure_broker(one, open_folder / "conf.d")
    for systemd, said in ((open_folder, "was started anew"), (open_folder / "none", "now start Mosquitto anew")):
        monkeypatch.setattr(installation.systemd, "RUNNING", systemd)
        assert said in restart_broker(one, open_folder / "conf.d")
    assert "--identity" in restart_broker(other, open_folder / "conf.d"), "of the same name, in another folder"
    assert started.read_text() == "restart mosquitto\n"
    assert get_conf_file(one).parent == Path("/etc/mosquitto/conf.d")


def test_a_revocation_stays_readable_for_the_broker(open_folder: Path) -> None:
    as_debian_has_it()
    issuer = Authority(open_folder / "f").issuer
    (open_folder / "conf.d").mkdir()
    configure_broker(issuer, open_folder / "conf.d")
    issuer.revoke("status")
    for name in ("crl.pem", "own.key", "acl"):
        assert (open_folder / "f/broker" / name).stat().st_uid == pwd.getpwnam("mosquitto").pw_uid


def test_without_mosquitto_it_says_what_to_install(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="apt install mosquitto"):
        configure_broker(Authority(tmp_path / "f").issuer, tmp_path / "nowhere")
