"""Certificates, and a Mosquitto that demands them: set up as `examples/mosquitto.conf` says."""

from __future__ import annotations

import getpass
from pathlib import Path

import trustme

from fedge.broker import LocalBroker
from tests.support.federation import ROOT

EXAMPLES = ROOT / "examples"


class Authority:
    """A certificate authority whose files lie in a folder."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._authority = trustme.CA()
        self.file = folder / "ca.crt"
        self._authority.cert_pem.write_to_path(str(self.file))

    def server(self, host: str) -> tuple[Path, Path]:
        """Certificate and key of a server that is called by this name or address."""
        return self._write("broker", self._authority.issue_cert(host))

    def client(self, name: str) -> dict[str, object]:
        """The settings of a client of this name."""
        certificate, key = self._write(name, self._authority.issue_cert(common_name=name))
        return {"ca_file": self.file, "cert_file": certificate, "key_file": key}

    def _write(self, name: str, issued: trustme.LeafCert) -> tuple[Path, Path]:
        certificate, key = self._folder / f"{name}.crt", self._folder / f"{name}.key"
        issued.cert_chain_pems[0].write_to_path(str(certificate))
        issued.private_key_pem.write_to_path(str(key))
        return certificate, key


class TlsBroker(LocalBroker):
    """Mosquitto with the configuration and the access list of the examples."""

    def __init__(self, authority: Authority, home: Path) -> None:
        super().__init__("mosquitto", home=home)
        self._authority = authority

    def _command(self, home: Path) -> list[str]:
        command = super()._command(home)
        certificate, key = self._authority.server(self.host)
        example = (EXAMPLES / "mosquitto.conf").read_text()
        for there, here in {
            "listener 8883": f"listener {self.port} {self.host}",
            "/etc/fedge/ca.crt": self._authority.file,
            "/etc/fedge/broker.crt": certificate,
            "/etc/fedge/broker.key": key,
            "/etc/fedge/mosquitto.acl": EXAMPLES / "mosquitto.acl",
        }.items():
            assert f"{there}\n" in example, there
            example = example.replace(f"{there}\n", f"{here}\n")
        (home / "mosquitto.conf").write_text(f"{example}user {getpass.getuser()}\n")
        return command
