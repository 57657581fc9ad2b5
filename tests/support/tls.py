"""Certificates, and a Mosquitto that demands them: set up as `examples/mosquitto.conf` says."""

from __future__ import annotations

import datetime as dt
import getpass
from collections.abc import Mapping
from pathlib import Path

import trustme
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization

from fedge.broker import LocalBroker, free_port
from tests.support.federation import NAME, ROOT

EXAMPLES = ROOT / "examples"
THERE = "/etc/mosquitto/workshop"
"""Folder of the files that the example names; the last part of it is the federation, as in the access list."""


class Authority:
    """A certificate authority whose files lie in a folder."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._authority = trustme.CA()
        self._revoked: list[x509.RevokedCertificate] = []
        self.file, self.revocations = folder / "ca.crt", folder / "ca.crl"
        self._authority.cert_pem.write_to_path(str(self.file))
        self._write_revocations()

    def server(self, host: str) -> tuple[Path, Path]:
        """Certificate and key of a server that is called by this name or address."""
        return self._write("broker", self._authority.issue_cert(host))

    def client(self, name: str) -> dict[str, object]:
        """The settings of a client of this name."""
        certificate, key = self._write(name, self._authority.issue_cert(common_name=name))
        return {"ca_file": self.file, "cert_file": certificate, "key_file": key}

    def revoke(self, client: Mapping[str, object]) -> None:
        """Put the certificate of a client on the list; a broker reads it when it starts."""
        certificate = x509.load_pem_x509_certificate(Path(str(client["cert_file"])).read_bytes())
        entry = x509.RevokedCertificateBuilder(certificate.serial_number, _now())
        self._revoked.append(entry.build())
        self._write_revocations()

    def _write_revocations(self) -> None:
        own = x509.load_pem_x509_certificate(self._authority.cert_pem.bytes())
        key = serialization.load_pem_private_key(self._authority.private_key_pem.bytes(), None)
        days = dt.timedelta(days=30)
        crl = x509.CertificateRevocationListBuilder(own.subject, _now(), _now() + days, (), self._revoked)
        signed = crl.sign(key, hashes.SHA256())  # type: ignore[arg-type]
        self.revocations.write_bytes(signed.public_bytes(serialization.Encoding.PEM))

    def _write(self, name: str, issued: trustme.LeafCert) -> tuple[Path, Path]:
        certificate, key = self._folder / f"{name}.crt", self._folder / f"{name}.key"
        issued.cert_chain_pems[0].write_to_path(str(certificate))
        issued.private_key_pem.write_to_path(str(key))
        return certificate, key


def _now() -> dt.datetime:
    return dt.datetime.now(dt.UTC)


class TlsBroker(LocalBroker):
    """Mosquitto with the configuration and the access list of the examples, for the federation of the tests.

    `other`: name and authority of another federation, which has a listener at `other_port`.
    """

    def __init__(self, authority: Authority, home: Path, *, other: tuple[str, Authority] | None = None) -> None:
        super().__init__("mosquitto", home=home)
        self._authority = authority
        self._other = other
        self.other_port = free_port(self.host) if other else 0

    def _command(self, home: Path) -> list[str]:
        command = super()._command(home)
        before, listener, after = _parts((EXAMPLES / "mosquitto.conf").read_text())
        listeners = [self._listener(listener, NAME, self._authority, self.port)]
        if self._other:
            listeners.append(self._listener(listener, *self._other, self.other_port))
        text = "\n\n".join([before, *listeners, after])
        (home / "mosquitto.conf").write_text(f"{text}\nuser {getpass.getuser()}\n")
        return command

    def _listener(self, example: str, federation: str, authority: Authority, port: int) -> str:
        certificate, key = authority.server(self.host)
        rules = certificate.with_name(f"{federation}.acl")
        rules.write_text(
            (EXAMPLES / "mosquitto.acl").read_text().replace("fedge/1/workshop/", f"fedge/1/{federation}/")
        )
        for there, here in {
            "listener 8883": f"listener {port} {self.host}",
            f"{THERE}/ca.crt": authority.file,
            f"{THERE}/ca.crl": authority.revocations,
            f"{THERE}/broker.crt": certificate,
            f"{THERE}/broker.key": key,
            f"{THERE}/mosquitto.acl": rules,
        }.items():
            assert f"{there}\n" in example, there
            example = example.replace(f"{there}\n", f"{here}\n")
        return example


def _parts(example: str) -> tuple[str, str, str]:
    """What stands before the listener, the listener, and what is behind it."""
    before, _, rest = example.partition("\nlistener ")
    listener, _, after = rest.partition("\n\n")
    return before, f"listener {listener}\n", after
