"""The work of `fedge provision broker` on Debian: Mosquitto, the coordinator's service, the daily renewal."""

from __future__ import annotations

import pwd
from pathlib import Path
from typing import Final

from coordinator.provision.issuer import Issuer
from fedge.errors import ConfigError
from fedge.identity.names import Role
from fedge.membership import broker_configuration
from fedge.system import systemd

CONF_D: Final = Path("/etc/mosquitto/conf.d")
"""The folder in which Debian's Mosquitto reads every file that ends in .conf."""
MOSQUITTO: Final = "mosquitto"
"""The name of Mosquitto's service and of its user, who alone reads the broker's key."""


def get_conf_file(issuer: Issuer, conf_d: Path = CONF_D) -> Path:
    """Return the configuration file for this federation, existing or not."""
    return conf_d / f"fedge-{issuer.settings.federation}.conf"


def configure_broker(issuer: Issuer, conf_d: Path = CONF_D) -> Path:
    """Write Mosquitto's configuration, access list and identity; return the configuration's file.

    Raises:
        ConfigError: Mosquitto is not installed.
        StoreError: a file cannot be written.
    """
    try:
        owner = pwd.getpwnam(MOSQUITTO)
    except KeyError:
        raise ConfigError("mosquitto is not installed here: apt install mosquitto") from None
    if not conf_d.is_dir():
        raise ConfigError(f"there is no {conf_d}, where Mosquitto's configuration goes: apt install mosquitto")
    identity = (issuer.folder / Role.BROKER).absolute()
    systemd.give_to(identity, owner)
    rules = broker_configuration.format_access_list(issuer.settings.federation, issuer.settings.topic_prefix or "")
    systemd.write_public(identity / broker_configuration.ACCESS_LIST, rules)
    systemd.write_public(
        conf_d / "00-fedge.conf", broker_configuration.format_global_settings()
    )  # read in the order of their names
    file = get_conf_file(issuer, conf_d)
    systemd.write_public(file, broker_configuration.format_member_listener(identity, identity, issuer.settings.port))
    return file


def install_services(issuer: Issuer) -> None:
    """Install the coordinator as a service, and daily renewal of certificates. The user starts the coordinator.

    Raises:
        ConfigError, StoreError: something cannot be set up.
    """
    folder = issuer.folder.absolute()
    systemd.give_to(folder / Role.COORDINATOR, systemd.make_user())
    arguments = f"coordinator --config {folder / 'coordinator.toml'}"
    unit = systemd.format_unit("coordinator", systemd.COORDINATOR, arguments, "coordinator")
    systemd.write_public(systemd.UNITS / "fedge-coordinator.service", unit)
    renew, timer = systemd.format_daily_units("renewal of certificates", f"provision renew --folder {folder}")
    systemd.write_public(systemd.UNITS / "fedge-renewal.service", renew)
    systemd.write_public(systemd.UNITS / "fedge-renewal.timer", timer)
    systemd.run("systemctl", "daemon-reload")
    systemd.run("systemctl", "enable", "--now", "fedge-renewal.timer")


def restart_broker(issuer: Issuer, conf_d: Path = CONF_D) -> str:
    """Have the installed Mosquitto read the changes; return the outcome in words.

    Raises:
        ConfigError: Mosquitto does not start again.
    """
    file = get_conf_file(issuer, conf_d)
    if not file.exists() or str((issuer.folder / Role.BROKER).absolute()) not in file.read_text(encoding="utf-8"):
        return "a `fedge broker --identity` starts anew by itself"
    if systemd.restart(MOSQUITTO):
        return "Mosquitto was started anew"
    return "now start Mosquitto anew: there is no systemd here, and it reads its files only then"
