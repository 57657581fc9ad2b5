"""A federation's authority as `fedge provision` makes it, made to lie where a test wants it to."""

from __future__ import annotations

import datetime as dt
import ipaddress
from collections.abc import Mapping
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from coordinator.members import MEMBERS, Member, Members, write_members
from fedge.broker import LocalBroker
from fedge.identity import CRL, Role, Subject
from fedge.transport import BrokerSettings

DAY = dt.timedelta(days=1)


def now() -> dt.datetime:
    return dt.datetime.now(dt.UTC).replace(microsecond=0)


class Authority:
    """Files in one folder: ca.crt, crl.pem, members.json, and NAME.crt and NAME.key of everybody."""

    def __init__(self, folder: Path, federation: str = "test") -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self.federation = folder, federation
        self.file = folder / "ca.crt"
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, federation)])
        builder = self._builder(self._name, self._key, now() - DAY, now() + 365 * DAY)
        self.certificate = builder.add_extension(x509.BasicConstraints(True, None), critical=True).sign(
            self._key, hashes.SHA256()
        )
        self.file.write_bytes(_pem(self.certificate))
        self.members: dict[str, Member] = {}
        self._revoked: list[x509.RevokedCertificate] = []
        self._number = 0
        self._write()

    def issue(
        self,
        name: str,
        role: Role = Role.DEVICE,
        *,
        federation: str | None = None,
        begin: dt.datetime | None = None,
        end: dt.datetime | None = None,
        urn: str | None = None,
    ) -> dict[str, str]:
        """Give somebody a certificate, and a place on the list; where its files lie."""
        key = ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        uri = Subject(federation or self.federation, role, name).uri if urn is None else urn
        names = [x509.UniformResourceIdentifier(uri), x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]
        end = end or now() + 30 * DAY
        builder = self._builder(subject, key, begin or now() - DAY, end)
        signed = builder.add_extension(x509.SubjectAlternativeName(names), critical=False).sign(
            self._key, hashes.SHA256()
        )
        cert_file, key_file = self.folder / f"{name}.crt", self.folder / f"{name}.key"
        cert_file.write_bytes(_pem(signed))
        none = serialization.NoEncryption()
        private = key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, none)
        key_file.write_bytes(private)
        self.members[name] = Member(role=role, serial=f"{signed.serial_number:x}", not_after=end.isoformat())
        self._write()
        return {"ca_file": str(self.file), "cert_file": str(cert_file), "key_file": str(key_file)}

    def revoke(self, name: str) -> None:
        """Take somebody's certificate back."""
        member = self.members[name]
        self.members[name] = Member(
            role=member.role, serial=member.serial, not_after=member.not_after, revoked=now().isoformat()
        )
        entry = x509.RevokedCertificateBuilder(int(member.serial, 16), now())
        self._revoked.append(entry.build())
        self._write()

    def crl(self, number: int) -> bytes:
        """The list as it is, with this number."""
        builder = x509.CertificateRevocationListBuilder(self._name, now(), now() + 30 * DAY, (), self._revoked)
        return (
            builder.add_extension(x509.CRLNumber(number), critical=False)
            .sign(self._key, hashes.SHA256())
            .public_bytes(serialization.Encoding.PEM)
        )

    def _write(self) -> None:
        self._number += 1
        (self.folder / CRL).write_bytes(self.crl(self._number))
        write_members(self.folder / MEMBERS, Members(federation=self.federation, members=self.members))

    def _builder(
        self, subject: x509.Name, key: ec.EllipticCurvePrivateKey, begin: dt.datetime, end: dt.datetime
    ) -> x509.CertificateBuilder:
        return x509.CertificateBuilder(self._name, subject, key.public_key(), x509.random_serial_number(), begin, end)


def _pem(certificate: x509.Certificate) -> bytes:
    return certificate.public_bytes(serialization.Encoding.PEM)


class OpenBroker(LocalBroker):
    """Mosquitto over TLS that lets everybody in and has no rules: what a broker that was taken over lets happen."""

    def __init__(self, authority: Authority, home: Path) -> None:
        super().__init__("mosquitto", home=home)
        self._files = authority.issue("broker", Role.BROKER)

    def settings(self, files: Mapping[str, str]) -> BrokerSettings:
        """For a client with these files; ca_file alone: for nobody in particular."""
        return BrokerSettings(self.host, self.port, **files)

    def _command(self, home: Path) -> list[str]:
        command = super()._command(home)
        files = self._files
        tls = f"cafile {files['ca_file']}\ncertfile {files['cert_file']}\nkeyfile {files['key_file']}\n"
        with (home / "mosquitto.conf").open("a") as config:
            config.write(tls)
        return command
