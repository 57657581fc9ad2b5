"""A federation's authority as `fedge provision` makes it, and brokers over TLS, for its members or for everybody."""

from __future__ import annotations

import datetime as dt
from collections.abc import Mapping
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec

from coordinator.provision.issuer import Federation, Issuer
from coordinator.provision.members import Member
from fedge.commands.broker import LocalBroker, find_free_port, make_mosquitto_config
from fedge.identity import certificates
from fedge.identity.certificates import encode_key, encode_pem, make_x509_name
from fedge.identity.names import Role, Subject
from fedge.membership import broker_configuration
from fedge.membership.credentials import CA, CERTIFICATE, KEY
from fedge.system.files import skip_fsync, write_atomically
from fedge.wire.connection.broker import BrokerSettings
from tests.support.federation import NAME

DAY = dt.timedelta(days=1)


def now() -> dt.datetime:
    return certificates.get_time().replace(microsecond=0)


class Authority:
    """The authority of a federation; `ago`: so long ago all that it makes now was made.

    Besides its own files its folder has NAME.crt and NAME.key of everybody to whom `issue` gave a certificate.
    """

    def __init__(
        self,
        folder: Path,
        federation: str = NAME,
        *,
        host: str = "127.0.0.1",
        port: int = 8883,
        days: int = 365,
        ago: dt.timedelta = dt.timedelta(),
    ) -> None:
        self.ago = ago
        settings = Federation(federation=federation, host=host, port=port, days=days)
        with skip_fsync():
            self.issuer = Issuer.make(folder, settings, clock=lambda: certificates.get_time() - self.ago)
        self.folder, self.federation, self.file = folder, federation, folder / CA

    @property
    def members(self) -> dict[str, Member]:
        """Present and former ones."""
        return self.issuer.members.members

    def client(self, name: str) -> dict[str, object]:
        """The settings of a part of the server, or of a device."""
        folder = self.folder / name
        if not folder.exists():
            key = certificates.make_key()
            subject = certificates.make_device_subject(self.federation, name)
            certificate = self.issuer.enlist(subject, key.public_key())
            write_atomically(folder / CA, encode_pem(self.issuer.certificate))
            write_atomically(folder / KEY, encode_key(key))
            write_atomically(folder / CERTIFICATE, encode_pem(certificate))
        return {"ca_file": folder / CA, "cert_file": folder / CERTIFICATE, "key_file": folder / KEY}

    def issue(
        self,
        name: str,
        role: Role = Role.DEVICE,
        *,
        begin: dt.datetime | None = None,
        end: dt.datetime | None = None,
        urn: str | None = None,
    ) -> dict[str, str]:
        """Give somebody a certificate beside ca.crt, whether one is there or not; where its files lie.

        With dates or a URN of its own, the certificate is nobody's on the list of members.
        """
        key, subject = certificates.make_key(), Subject(self.federation, role, name)
        cert_file, key_file = self.folder / f"{name}.crt", self.folder / f"{name}.key"
        with skip_fsync():
            if begin or end or urn:
                signed = self._made(subject, key, begin or now() - DAY, end or now() + 30 * DAY, urn or subject.uri)
            else:
                signed = self.issuer.issue(subject, key.public_key())
        cert_file.write_bytes(encode_pem(signed))
        key_file.write_bytes(encode_key(key))
        return {"ca_file": str(self.file), "cert_file": str(cert_file), "key_file": str(key_file)}

    def _made(
        self, subject: Subject, key: ec.EllipticCurvePrivateKey, begin: dt.datetime, end: dt.datetime, urn: str
    ) -> x509.Certificate:
        names = x509.SubjectAlternativeName([x509.UniformResourceIdentifier(urn)])
        made = x509.CertificateBuilder(
            *(self.issuer.certificate.subject, make_x509_name(subject), key.public_key()),
            *(x509.random_serial_number(), begin, end),
        )
        return made.add_extension(names, critical=False).sign(self.issuer._key, hashes.SHA256())

    def revoke(self, name: str) -> None:
        """Take somebody's certificates back."""
        with skip_fsync():
            self.issuer.revoke(name)

    def crl(self, number: int) -> bytes:
        """A list of nobody, with this number."""
        issuer = self.issuer.certificate.subject
        made = x509.CertificateRevocationListBuilder(issuer, now(), now() + 30 * DAY)
        signed = made.add_extension(x509.CRLNumber(number), critical=False).sign(self.issuer._key, hashes.SHA256())
        return encode_pem(signed)


class TlsBroker(LocalBroker):
    """`fedge broker --identity` for the federation of an authority.

    `other`: another federation's, which has a listener at `other_port`, as by the files in /etc/mosquitto/conf.d.
    """

    def __init__(self, authority: Authority, home: Path, *, other: Authority | None = None) -> None:
        super().__init__("mosquitto", home=home, identity=authority.folder / "broker")
        self.authority = authority
        self._authorities = [authority, other] if other else []
        self.other_port = find_free_port(self.host) if other else 0

    def settings(self, files: Mapping[str, str], port: int | None = None) -> BrokerSettings:
        """For a client with these files; `port`: of the other federation."""
        return BrokerSettings(self.host, port or self.port, **files)

    def _make_command(self, home: Path) -> list[str]:
        command = super()._make_command(home)
        listeners = []
        for authority, port in zip(self._authorities, (self.port, self.other_port), strict=False):
            rules = home / authority.federation
            rules.mkdir(exist_ok=True)
            (rules / broker_configuration.ACCESS_LIST).write_text(
                broker_configuration.format_access_list(authority.federation)
            )
            listeners.append(
                broker_configuration.format_member_listener(authority.folder / "broker", rules, port, self.host)
            )
        if listeners:
            (home / "mosquitto.conf").write_text(
                make_mosquitto_config(broker_configuration.format_global_settings() + "\n".join(listeners))
            )
        return command


class OpenBroker(LocalBroker):
    """Mosquitto over TLS that lets everybody in and has no rules: what a broker that was taken over lets happen."""

    def __init__(self, authority: Authority, home: Path) -> None:
        super().__init__("mosquitto", home=home)
        self._identity_of = authority.folder / Role.BROKER

    def settings(self, files: Mapping[str, str]) -> BrokerSettings:
        """For a client with these files; ca_file alone: for nobody in particular."""
        return BrokerSettings(self.host, self.port, **files)

    def _make_command(self, home: Path) -> list[str]:
        command, identity = super()._make_command(home), self._identity_of
        tls = f"cafile {identity / CA}\ncertfile {identity / CERTIFICATE}\nkeyfile {identity / KEY}\n"
        with (home / "mosquitto.conf").open("a") as config:
            config.write(tls)
        return command
