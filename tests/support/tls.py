"""A federation's authority as `fedge provision` makes it, and brokers that let in its members alone."""

from __future__ import annotations

import datetime as dt
from pathlib import Path

from coordinator.provision.issuer import Federation, Issuer
from fedge import certificates, mosquitto
from fedge.broker import LocalBroker, free_port, mosquitto_config
from fedge.certificates import pem_of, pem_of_key
from fedge.credentials import CA, CERTIFICATE, KEY
from fedge.files import volatile, write_atomically
from tests.support.federation import NAME


class Authority:
    """The authority of a federation; `ago`: so long ago all that it makes now was made."""

    def __init__(self, folder: Path, federation: str = NAME, *, port: int = 8883, days: int = 365) -> None:
        self.ago = dt.timedelta()
        settings = Federation(federation=federation, host="127.0.0.1", port=port, days=days)
        with volatile():
            self.issuer = Issuer.create(folder, settings, clock=lambda: certificates.now() - self.ago)
        self.folder = folder

    def client(self, name: str) -> dict[str, object]:
        """The settings of a part of the server, or of a device."""
        folder = self.folder / name
        if not folder.exists():
            key = certificates.new_key()
            subject = certificates.device_subject(self.issuer.settings.federation, name)
            certificate = self.issuer.enlist(subject, key.public_key())
            write_atomically(folder / CA, pem_of(self.issuer.certificate))
            write_atomically(folder / KEY, pem_of_key(key))
            write_atomically(folder / CERTIFICATE, pem_of(certificate))
        return {"ca_file": folder / CA, "cert_file": folder / CERTIFICATE, "key_file": folder / KEY}


class TlsBroker(LocalBroker):
    """`fedge broker --identity` for the federation of an authority.

    `other`: another federation's, which has a listener at `other_port`, as by the files in /etc/mosquitto/conf.d.
    """

    def __init__(self, authority: Authority, home: Path, *, other: Authority | None = None) -> None:
        super().__init__("mosquitto", home=home, identity=authority.folder / "broker")
        self.authority = authority
        self._authorities = [authority, other] if other else []
        self.other_port = free_port(self.host) if other else 0

    def _command(self, home: Path) -> list[str]:
        command = super()._command(home)
        listeners = []
        for authority, port in zip(self._authorities, (self.port, self.other_port), strict=False):
            rules = home / authority.issuer.settings.federation
            rules.mkdir(exist_ok=True)
            (rules / mosquitto.ACCESS_LIST).write_text(mosquitto.access_list(authority.issuer.settings.federation))
            listeners.append(mosquitto.for_members(authority.folder / "broker", rules, port, self.host))
        if listeners:
            (home / "mosquitto.conf").write_text(mosquitto_config(mosquitto.before_listeners() + "\n".join(listeners)))
        return command
