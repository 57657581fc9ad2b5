"""The authority of a federation: makes certificates, revokes them, and makes them anew before they expire.

    ca.crt, ca.key      the authority; whoever has the key can let in whom he likes, so nobody else needs to read it
    federation.json     what all certificates have in common
    issued/             each certificate that was ever made, NAME-SERIAL.crt
    coordinator/, broker/, status/, rollout/   identities of the server (`fedge.identity`)

The coordinator's holds `members.json` too: who belongs to the federation, and who did. The list of revoked certificates
lies beside it and in the broker's.
"""

from __future__ import annotations

import datetime as dt
import ipaddress
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Annotated, Final

import msgspec
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID
from msgspec import Meta, Struct

from coordinator.members import MEMBERS, Member, Members, read_members, write_members
from fedge import certificates
from fedge.certificates import RENEW_AT, is_past, pem_of, pem_of_key
from fedge.config import Name
from fedge.credentials import CA, CERTIFICATE, KEY
from fedge.errors import ConfigError
from fedge.files import make_folder, write_atomically
from fedge.identity import CRL, Role, Subject, subject_of
from fedge.kit import Kit, seal
from fedge.task import TaskSpec

CA_KEY: Final = "ca.key"
SETTINGS: Final = "federation.json"
CA_DAYS: Final = 30 * 365
"""The authority outlives the fleet: a new one means a new start-up kit for each device."""
CRL_DAYS: Final = 365
"""Nobody is let in by a list that is older. It is made anew with each revocation, and by `renew` after two thirds."""
LEAVES_LIST: Final = dt.timedelta(days=365)
"""A revoked certificate leaves the list so long after it expired: the clock of a device may be behind."""
BACKDATED: Final = dt.timedelta(days=1)
"""A device whose clock is a little behind may use its certificate at once."""
SERVER: Final = (Role.BROKER, Role.COORDINATOR, Role.STATUS, Role.ROLLOUT)
"""What every federation has."""
PARTS: Final = tuple(role for role in Role if role is not Role.DEVICE)
"""What it may have."""
KNOW_REVOKED: Final = (Role.BROKER, Role.COORDINATOR)
Days = Annotated[int, Meta(ge=1, le=10 * 365)]


class Federation(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What all certificates of a federation have in common. host, port: of the broker, as the others call it."""

    federation: Name
    host: str
    port: Annotated[int, Meta(ge=1, le=65535)]
    days: Days

    @property
    def broker(self) -> str:
        """Where the others find it."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


class Issuer:
    """The authority in a folder that `create` has made."""

    def __init__(self, folder: Path, clock: Callable[[], dt.datetime] = certificates.now) -> None:
        """Open it.

        Raises:
            ConfigError: there is none in the folder, or we may not read it.
        """
        self.folder = folder
        self._clock = clock
        try:
            self.settings = msgspec.json.decode((folder / SETTINGS).read_bytes(), type=Federation)
        except (OSError, msgspec.MsgspecError) as error:
            raise ConfigError(
                f"{folder} is no federation's folder; make one with `fedge provision init`: {error}"
            ) from error
        self.certificate = certificates.load_certificate(folder / CA)
        self._key = certificates.load_key(folder / CA_KEY)

    @classmethod
    def create(cls, folder: Path, settings: Federation, clock: Callable[[], dt.datetime] = certificates.now) -> Issuer:
        """Make an authority with a new key, and the identities of the server.

        Raises:
            ConfigError: the folder has one already.
            StoreError: the folder cannot be written.
        """
        if (folder / CA_KEY).exists():
            raise ConfigError(f"{folder} holds a federation's authority already; give another --folder")
        make_folder(folder)
        folder.chmod(0o755)  # broker and coordinator run as other users, and have folders in it
        key = certificates.new_key()
        write_atomically(folder / CA_KEY, pem_of_key(key))
        write_atomically(folder / CA, pem_of(_self_signed(settings.federation, key, clock())))
        write_atomically(folder / SETTINGS, msgspec.json.format(msgspec.json.encode(settings), indent=1))
        issuer = cls(folder, clock)
        write_members(issuer.members_file, Members(federation=settings.federation))
        issuer.publish_revoked()
        for role in SERVER:
            issuer.equip(role)
        return issuer

    @property
    def members_file(self) -> Path:
        """In the coordinator's identity."""
        return self.folder / "coordinator" / MEMBERS

    @property
    def members(self) -> Members:
        """Who belongs to the federation, and who did."""
        return read_members(self.members_file)

    # ------------------------------------------------------------------------------------------------- certificates

    def equip(self, role: Role) -> x509.Certificate:
        """Make key and certificate of a part of the server, in its folder; of one that was revoked a new one.

        Raises:
            ConfigError: it has one that is good.
        """
        self._refuse_second(role)
        key = certificates.new_key()
        certificate = self.issue(Subject(self.settings.federation, role, role), key.public_key())
        folder = self.folder / role
        write_atomically(folder / CA, pem_of(self.certificate))
        write_atomically(folder / KEY, pem_of_key(key))
        write_atomically(folder / CERTIFICATE, pem_of(certificate))
        return certificate

    def enlist(self, subject: Subject, key: ec.EllipticCurvePublicKey) -> x509.Certificate:
        """Certify a device that is new, or whose certificate was revoked.

        Raises:
            ConfigError: it has one that is good: two devices of one name would throw each other off the broker.
        """
        self._refuse_second(subject.name)
        return self.issue(subject, key)

    def _refuse_second(self, name: str) -> None:
        member = self.members.members.get(name)
        if member is not None and member.revoked is None:
            raise ConfigError(
                f"{name} has a certificate already; if it was lost, `fedge provision revoke {name}` first"
            )

    def renew(self, device: str, name: str, key: ec.EllipticCurvePublicKey) -> x509.Certificate:
        """The certificate with which a device goes on: a new one for its present key, or the last if that is young.

        Args:
            device: who asks, by the topic of the request.
            name: of whom the request speaks.
            key: that the request is for, and signed with.

        Raises:
            ConfigError: it is no member, was revoked, has expired, or has another key.
        """
        member = self.members.members.get(device)
        if member is None or member.role is not Role.DEVICE or member.revoked is not None or name != device:
            raise ConfigError(f"no device {device} belongs to the federation, or it was revoked")
        last = certificates.load_certificate(self._issued_file(device, member.serial))
        if last.public_key() != key:
            raise ConfigError(f"the request is not signed with the key of {device}")
        if certificates.is_past(1, last, self._clock()):
            raise ConfigError(f"the certificate of {device} has expired: revoke it, and make a new start-up kit")
        if not is_past(RENEW_AT, last, self._clock()):
            return last
        return self.issue(Subject(self.settings.federation, Role.DEVICE, device), key)

    def _issued_file(self, name: str, serial: str) -> Path:
        return self.folder / "issued" / f"{name}-{serial}.crt"

    def issue(self, subject: Subject, key: ec.EllipticCurvePublicKey) -> x509.Certificate:
        """Make a certificate, and write down for whom."""
        at = self._clock()
        end = min(at + dt.timedelta(days=self.settings.days), self.certificate.not_valid_after_utc)
        usage = ExtendedKeyUsageOID.SERVER_AUTH if subject.role is Role.BROKER else ExtendedKeyUsageOID.CLIENT_AUTH
        names: list[x509.GeneralName] = [x509.UniformResourceIdentifier(subject.uri)]
        if subject.role is Role.BROKER:
            names += _names_of_host(self.settings.host)
        certificate = (
            _builder(certificates.distinguished(subject), self.certificate.subject, key, at - BACKDATED, end)
            .add_extension(x509.SubjectAlternativeName(names), critical=False)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(x509.ExtendedKeyUsage([usage]), critical=False)
            .add_extension(_usage(signs=True), critical=True)
            .add_extension(_authority_of(self._key), critical=False)
            .sign(self._key, hashes.SHA256())
        )
        serial = f"{certificate.serial_number:x}"
        write_atomically(self._issued_file(subject.name, serial), pem_of(certificate))
        self._note(subject.name, Member(role=subject.role, serial=serial, not_after=_text(end)))
        return certificate

    def _note(self, name: str, member: Member) -> None:
        known = self.members
        write_members(self.members_file, msgspec.structs.replace(known, members=known.members | {name: member}))

    # ------------------------------------------------------------------------------------------------- revocation

    def revoke(self, name: str) -> None:
        """From now on none of its certificates is good.

        Raises:
            ConfigError: there is no such member.
        """
        member = self.members.members.get(name)
        if member is None:
            raise ConfigError(f"the federation has no member {name}")
        if member.revoked is None:
            self._note(name, msgspec.structs.replace(member, revoked=_text(self._clock())))
        self.publish_revoked(certificate.serial_number for certificate in self._issued(name))

    def publish_revoked(self, revoked: Iterable[int] = ()) -> None:
        """Sign the list of revoked certificates again, with these beside those that are on it."""
        at, file = self._clock(), self.members_file.with_name(CRL)
        known = self._revoked()
        before = certificates.load_crl(file).extensions if file.exists() else ()
        number = 1 + max((e.value.crl_number for e in before if isinstance(e.value, x509.CRLNumber)), default=0)
        entries = known | {serial: at for serial in revoked if serial not in known}
        builder = (
            x509.CertificateRevocationListBuilder()
            .issuer_name(self.certificate.subject)
            .last_update(at)
            .next_update(at + dt.timedelta(days=CRL_DAYS))
            .add_extension(x509.CRLNumber(number), critical=False)
            .add_extension(_authority_of(self._key), critical=False)
        )
        for serial, when in sorted(self._still_needed(entries).items()):
            entry = x509.RevokedCertificateBuilder().serial_number(serial).revocation_date(when)
            builder = builder.add_revoked_certificate(entry.build())
        data = pem_of(builder.sign(self._key, hashes.SHA256()))
        for role in KNOW_REVOKED:
            write_atomically(self.folder / role / CRL, data)

    def _revoked(self) -> dict[int, dt.datetime]:
        """Serial numbers on the list, and since when."""
        file = self.members_file.with_name(CRL)
        if not file.exists():
            return {}
        return {entry.serial_number: entry.revocation_date_utc for entry in certificates.load_crl(file)}

    def _still_needed(self, entries: dict[int, dt.datetime]) -> dict[int, dt.datetime]:
        """Without the certificates that no clock takes for valid any more."""
        files = {file.stem.rpartition("-")[2]: file for file in (self.folder / "issued").glob("*.crt")}
        needed = {}
        for serial, since in entries.items():
            file = files.get(f"{serial:x}")
            if file is None or certificates.load_certificate(file).not_valid_after_utc + LEAVES_LIST > self._clock():
                needed[serial] = since
        return needed

    def _issued(self, name: str) -> Iterator[x509.Certificate]:
        """All certificates that this name ever had."""
        for file in (self.folder / "issued").glob(f"{name}-*.crt"):
            certificate = certificates.load_certificate(file)
            owner = subject_of(certificate)
            if owner is not None and owner.name == name:  # "cam-1-4f.crt" is none of "cam"
                yield certificate

    # ---------------------------------------------------------------------------------------------------- renewal

    def refresh(self) -> list[str]:
        """Make anew what is past two thirds of its life: the server's certificates, the list of revoked ones."""
        at = self._clock()
        done = []
        if is_past(RENEW_AT, certificates.load_crl(self.members_file.with_name(CRL)), at):
            self.publish_revoked()
            done.append(CRL)
        for role in PARTS:
            file = self.folder / role / CERTIFICATE
            member = self.members.members.get(role)
            if not file.exists() or member is None or member.revoked is not None:
                continue
            if is_past(RENEW_AT, certificates.load_certificate(file), at):
                key = certificates.load_key(file.with_name(KEY)).public_key()
                write_atomically(file, pem_of(self.issue(Subject(self.settings.federation, role, role), key)))
                done.append(role)
        return done

    def kit(
        self, certificate: x509.Certificate, key: ec.EllipticCurvePrivateKey | None, task: TaskSpec | None
    ) -> bytes:
        """The start-up kit of a device (`fedge.kit`)."""
        subject = subject_of(certificate)
        assert subject is not None
        kit = Kit(
            federation=subject.federation,
            id=subject.name,
            broker=self.settings.broker,
            ca=pem_of(self.certificate).decode(),
            certificate=pem_of(certificate).decode(),
            key=None if key is None else pem_of_key(key).decode(),
            task=task,
        )
        return seal(kit, self._key)


def _text(at: dt.datetime) -> str:
    return f"{at:%Y-%m-%dT%H:%M:%SZ}"


def _self_signed(federation: str, key: ec.EllipticCurvePrivateKey, at: dt.datetime) -> x509.Certificate:
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, f"fedge {federation}")])
    end = at + dt.timedelta(days=CA_DAYS)
    builder = _builder(name, name, key.public_key(), at - BACKDATED, end)
    builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
    return builder.add_extension(_usage(signs=False), critical=True).sign(key, hashes.SHA256())


def _builder(
    name: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey, begin: dt.datetime, end: dt.datetime
) -> x509.CertificateBuilder:
    number = x509.random_serial_number()
    builder = x509.CertificateBuilder(issuer, name, key, number, begin, end)
    return builder.add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)


def _authority_of(key: ec.EllipticCurvePrivateKey) -> x509.AuthorityKeyIdentifier:
    return x509.AuthorityKeyIdentifier.from_issuer_public_key(key.public_key())


def _usage(*, signs: bool) -> x509.KeyUsage:
    """A member signs messages and handshakes; an authority certificates and lists."""
    return x509.KeyUsage(
        digital_signature=signs,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=not signs,
        crl_sign=not signs,
        encipher_only=False,
        decipher_only=False,
    )


def _names_of_host(host: str) -> list[x509.GeneralName]:
    """What the broker's certificate is for: the host, and this machine under the names that it has for itself."""
    names: list[x509.GeneralName] = [x509.IPAddress(ipaddress.ip_address(text)) for text in ("127.0.0.1", "::1")]
    try:
        return [*names, x509.DNSName("localhost"), x509.IPAddress(ipaddress.ip_address(host))]
    except ValueError:
        return [*names, *(x509.DNSName(name) for name in dict.fromkeys((host, "localhost")))]
