"""The authority of a federation: issues, revokes and renews certificates.

    ca.crt, ca.key      the authority; nobody else needs to read the key, and whoever has it can let in anyone
    federation.json     the settings that all certificates have in common
    members.json        present and former members
    crl.pem             the list of revoked certificates
    issued/             each certificate that was ever made, NAME-SERIAL.crt
    lock                held by the command that makes changes
    coordinator/, broker/, status/, rollout/   identities of the server (`fedge.identity`)

Copies of `members.json` and `crl.pem` are in the coordinator's identity, and a copy of `crl.pem` in the broker's. The
copies belong to other users and are never read here, so that a compromised part of the server cannot admit anybody by
changing them.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Final

import msgspec
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID
from msgspec import Meta, Struct

from coordinator.provision.extensions import (
    BACKDATED,
    list_host_names,
    make_authority_identifier,
    make_key_usage,
    require_host,
    sign_authority,
    start_certificate,
)
from coordinator.provision.members import MEMBERS, Member, Members, read_members, write_members
from fedge.data.task import TaskSpec
from fedge.errors import ConfigError
from fedge.identity import certificates
from fedge.identity.certificates import RENEW_AT, encode_key, encode_pem, is_past
from fedge.identity.names import CRL, Role, Subject, find_subject
from fedge.membership.credentials import CA, CERTIFICATE, KEY
from fedge.membership.kit import Kit, seal_kit
from fedge.settings import ClientPrefix, Name, TopicPrefix
from fedge.system.files import lock_folder, write_atomically
from fedge.system.text import format_address

CA_KEY: Final = "ca.key"
SETTINGS: Final = "federation.json"
CRL_DAYS: Final = 365
"""Life of the revocation list. An older list lets nobody in. Each revocation makes the list anew, and so does `renew`
after two thirds of its life."""
LEAVES_LIST: Final = dt.timedelta(days=365)
"""How long after its expiry a revoked certificate stays on the list, because the clock of a device may be behind."""
SERVER: Final = (Role.BROKER, Role.COORDINATOR, Role.STATUS, Role.ROLLOUT)
"""Roles of the server that every federation has."""
PARTS: Final = tuple(role for role in Role if role.effective_role is not Role.DEVICE)
"""Roles of the server that a federation may have."""
KNOW_REVOKED: Final = (Role.BROKER, Role.COORDINATOR, Role.INTAKE)
KNOW_MEMBERS: Final = (Role.COORDINATOR, Role.INTAKE)
Days = Annotated[int, Meta(ge=1, le=10 * 365)]


class Federation(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """The settings that all members of a federation share. host, port: the broker's, as seen by the other members."""

    federation: Name
    host: str
    port: Annotated[int, Meta(ge=1, le=65535)]
    days: Days
    topic_prefix: TopicPrefix | None = None
    client_prefix: ClientPrefix | None = None

    @property
    def broker(self) -> str:
        """The broker's address, as seen by the other members."""
        return format_address(self.host, self.port)


class Issuer:
    """The authority of a federation, in a folder that `make` has made."""

    def __init__(self, folder: Path, clock: Callable[[], dt.datetime] = certificates.get_time) -> None:
        """Open the authority in a folder.

        Raises:
            ConfigError: the folder holds no authority, or it is not readable.
        """
        self.folder = folder
        self._clock = clock
        self._holds = False
        try:
            self.settings = msgspec.json.decode((folder / SETTINGS).read_bytes(), type=Federation)
        except (OSError, msgspec.MsgspecError) as error:
            raise ConfigError(
                f"{folder} is no federation's folder; make one with `fedge provision init`: {error}"
            ) from error
        self.certificate = certificates.load_certificate(folder / CA)
        self._key = certificates.load_key(folder / CA_KEY)

    @classmethod
    def make(
        cls, folder: Path, settings: Federation, clock: Callable[[], dt.datetime] = certificates.get_time
    ) -> Issuer:
        """Make an authority with a new key, and the identities of the server.

        Raises:
            ConfigError: the folder holds an authority already, or the host's name is invalid.
            StoreError: the folder cannot be written.
        """
        require_host(settings.host)
        with lock_folder(folder, None):
            if (folder / CA_KEY).exists():
                raise ConfigError(f"{folder} holds a federation's authority already; give another --folder")
            folder.chmod(0o755)  # broker and coordinator run as other users, and have folders in it
            key = certificates.make_key()
            write_atomically(folder / CA_KEY, encode_key(key))
            write_atomically(folder / CA, encode_pem(sign_authority(settings.federation, key, clock())))
            write_atomically(folder / SETTINGS, msgspec.json.format(msgspec.json.encode(settings), indent=1))
            issuer = cls(folder, clock)
            issuer._holds = True
            issuer._sign_revoked({}, number=1)
            issuer._write_members(Members(federation=settings.federation))
            for role in SERVER:
                issuer.equip(role)
            issuer._holds = False
        return issuer

    @property
    def members_file(self) -> Path:
        """The authority's own file of members, not the coordinator's copy."""
        return self.folder / MEMBERS

    @property
    def members(self) -> Members:
        """Present and former members."""
        return read_members(self.members_file)

    def _write_members(self, members: Members) -> None:
        for folder in (self.folder, *self._list_folders(KNOW_MEMBERS)):
            write_members(folder / MEMBERS, members)

    def _list_folders(self, roles: Iterable[Role]) -> list[Path]:
        """List the folders of roles that every federation has, and of this federation's other roles."""
        return [self.folder / role for role in roles if role in SERVER or (self.folder / role).exists()]

    @contextmanager
    def _lock_folder(self) -> Iterator[None]:
        """Lock the folder; may be nested."""
        if self._holds:
            yield
            return
        with lock_folder(self.folder, None):
            self._holds = True
            try:
                yield
            finally:
                self._holds = False

    # ------------------------------------------------------------------------------------------------- certificates

    def equip(self, role: Role) -> x509.Certificate:
        """Make key and certificate of a part of the server, in its folder; after a revocation, new ones.

        Raises:
            ConfigError: the part has a valid certificate.
        """
        return self._equip(Subject(self.settings.federation, role, role), self.folder / role)

    def equip_relay(self, site: str, folder: Path) -> None:
        """Make key and certificate of a site's relay; after a revocation, new ones.

        Raises:
            ConfigError: the relay has a valid certificate, or the site's name is not allowed.
        """
        name = certificates.make_device_subject(self.settings.federation, site).name
        self._equip(Subject(self.settings.federation, Role.RELAY, name), folder)

    def _equip(self, subject: Subject, folder: Path) -> x509.Certificate:
        key = certificates.make_key()
        certificate = self.enlist(subject, key.public_key())
        write_atomically(folder / CA, encode_pem(self.certificate))
        write_atomically(folder / KEY, encode_key(key))
        write_atomically(folder / CERTIFICATE, encode_pem(certificate))
        if subject.role is Role.INTAKE:  # the others already have the lists
            write_atomically(folder / CRL, (self.folder / CRL).read_bytes())
            write_members(folder / MEMBERS, self.members)
        return certificate

    def enlist(self, subject: Subject, key: ec.EllipticCurvePublicKey) -> x509.Certificate:
        """Certify a new member, or one whose certificate was revoked.

        Raises:
            ConfigError: the member has a valid certificate (two devices with one name would disconnect each other), or
                its name and another member's are those of a relay and a device behind the relay (RELAY.DEVICE).
        """
        with self._lock_folder():
            self._require_own_name(subject)
            member = self.members.members.get(subject.name)
            if member is not None and member.revoked is None:
                again = f"if it was lost, `fedge provision revoke {subject.name}` first"
                raise ConfigError(f"{subject.name} has a certificate already; {again}")
            return self.issue(subject, key)

    def _require_own_name(self, subject: Subject) -> None:
        present = {name: member.role for name, member in self.members.members.items() if member.revoked is None}
        pairs = [(relay, subject.name) for relay, role in present.items() if role is Role.RELAY]
        if subject.role is Role.RELAY:
            pairs += [(subject.name, name) for name in present]
        for relay, name in pairs:
            if name.startswith(f"{relay}."):
                raise ConfigError(f"{name} would be a device behind the relay {relay}: give another name")

    def renew(self, device: str, name: str, key: ec.EllipticCurvePublicKey) -> x509.Certificate:
        """Return a device's next certificate: a new one for its present key, or its last certificate if that is recent.

        Args:
            device: the sender, by the topic of the request.
            name: the device's name in the request.
            key: the key for which the request is, and by which it is signed.

        Raises:
            ConfigError: the device is not a member, was revoked, or has another key, or its certificate has expired.
        """
        with self._lock_folder():
            return self._renew_device(device, name, key)

    def _renew_device(self, device: str, name: str, key: ec.EllipticCurvePublicKey) -> x509.Certificate:
        member = self.members.members.get(device)
        if (
            member is None
            or member.role.effective_role is not Role.DEVICE
            or member.revoked is not None
            or name != device
        ):
            raise ConfigError(f"no device {device} belongs to the federation, or it was revoked")
        last = certificates.load_certificate(self._get_issued_file(device, member.serial))
        if last.public_key() != key:
            raise ConfigError(f"the request is not signed with the key of {device}")
        if certificates.is_past(1, last, self._clock()):
            raise ConfigError(f"the certificate of {device} has expired: revoke it, and make a new start-up kit")
        if not is_past(RENEW_AT, last, self._clock()):
            return last
        return self.issue(Subject(self.settings.federation, member.role, device), key)

    def _get_issued_file(self, name: str, serial: str) -> Path:
        return self.folder / "issued" / f"{name}-{serial}.crt"

    def issue(self, subject: Subject, key: ec.EllipticCurvePublicKey) -> x509.Certificate:
        """Issue a certificate and record it."""
        at = self._clock()
        end = min(at + dt.timedelta(days=self.settings.days), self.certificate.not_valid_after_utc)
        usage = ExtendedKeyUsageOID.SERVER_AUTH if subject.role is Role.BROKER else ExtendedKeyUsageOID.CLIENT_AUTH
        names: list[x509.GeneralName] = [x509.UniformResourceIdentifier(subject.uri)]
        if subject.role is Role.BROKER:
            names += list_host_names(self.settings.host)
        certificate = (
            start_certificate(certificates.make_x509_name(subject), self.certificate.subject, key, at - BACKDATED, end)
            .add_extension(x509.SubjectAlternativeName(names), critical=False)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(x509.ExtendedKeyUsage([usage]), critical=False)
            .add_extension(make_key_usage(signs=True), critical=True)
            .add_extension(make_authority_identifier(self._key), critical=False)
            .sign(self._key, hashes.SHA256())
        )
        serial = f"{certificate.serial_number:x}"
        write_atomically(self._get_issued_file(subject.name, serial), encode_pem(certificate))
        with self._lock_folder():
            self._record_member(subject.name, Member(role=subject.role, serial=serial, not_after=_format_time(end)))
        return certificate

    def _record_member(self, name: str, member: Member) -> None:
        known = self.members
        self._write_members(msgspec.structs.replace(known, members=known.members | {name: member}))

    # ------------------------------------------------------------------------------------------------- revocation

    def revoke(self, name: str) -> None:
        """Revoke all of a member's certificates.

        Raises:
            ConfigError: no such member.
        """
        with self._lock_folder():
            member = self.members.members.get(name)
            if member is None:
                raise ConfigError(f"the federation has no member {name}")
            if member.revoked is None:
                self._record_member(name, msgspec.structs.replace(member, revoked=_format_time(self._clock())))
            self.publish_revoked(certificate.serial_number for certificate in self._iterate_issued(name))

    def publish_revoked(self, revoked: Iterable[int] = ()) -> None:
        """Sign the revocation list again, with these serial numbers added."""
        with self._lock_folder():
            before = self._read_genuine(self.folder / CRL)
            added = dict.fromkeys(revoked, self._clock())
            self._sign_revoked(added | _list_entries(before), number=1 + _get_number(before))

    def _sign_revoked(self, entries: dict[int, dt.datetime], number: int) -> None:
        at = self._clock()
        builder = (
            x509.CertificateRevocationListBuilder()
            .issuer_name(self.certificate.subject)
            .last_update(at)
            .next_update(at + dt.timedelta(days=CRL_DAYS))
            .add_extension(x509.CRLNumber(number), critical=False)
            .add_extension(make_authority_identifier(self._key), critical=False)
        )
        for serial, when in sorted(self._select_needed(entries).items()):
            entry = x509.RevokedCertificateBuilder().serial_number(serial).revocation_date(when)
            builder = builder.add_revoked_certificate(entry.build())
        data = encode_pem(builder.sign(self._key, hashes.SHA256()))
        for folder in (self.folder, *self._list_folders(KNOW_REVOKED)):
            write_atomically(folder / CRL, data)

    def _read_genuine(self, file: Path) -> x509.CertificateRevocationList:
        """Read a revocation list signed by this authority.

        Raises:
            ConfigError: there is none.
        """
        found = certificates.load_crl(file)
        if not found.is_signature_valid(self._key.public_key()):
            raise ConfigError(f"{file} is not by this authority: bring it back from a backup")
        return found

    def _select_needed(self, entries: dict[int, dt.datetime]) -> dict[int, dt.datetime]:
        """Return the entries whose certificates some clock might still accept."""
        files = {file.stem.rpartition("-")[2]: file for file in (self.folder / "issued").glob("*.crt")}
        needed = {}
        for serial, since in entries.items():
            file = files.get(f"{serial:x}")
            if file is None or certificates.load_certificate(file).not_valid_after_utc + LEAVES_LIST > self._clock():
                needed[serial] = since
        return needed

    def _iterate_issued(self, name: str) -> Iterator[x509.Certificate]:
        """Iterate over all certificates ever issued to this name."""
        for file in (self.folder / "issued").glob(f"{name}-*.crt"):
            certificate = certificates.load_certificate(file)
            owner = find_subject(certificate)
            if owner is not None and owner.name == name:  # "cam-1-4f.crt" does not belong to "cam"
                yield certificate

    # ---------------------------------------------------------------------------------------------------- renewal

    def refresh(self) -> list[str]:
        """Renew the server's certificates and the revocation list if they are past two thirds of their life."""
        with self._lock_folder():
            done = []
            if is_past(RENEW_AT, self._read_genuine(self.folder / CRL), self._clock()):
                self.publish_revoked()
                done.append(CRL)
            return done + [role for role in PARTS if self._renew_role(role)]

    def _renew_role(self, role: Role) -> bool:
        file, member = self.folder / role / CERTIFICATE, self.members.members.get(role)
        if not file.exists() or member is None or member.revoked is not None:
            return False
        last = certificates.load_certificate(self._get_issued_file(role, member.serial))
        key = last.public_key()
        if not is_past(RENEW_AT, last, self._clock()) or not isinstance(key, ec.EllipticCurvePublicKey):
            return False
        write_atomically(file, encode_pem(self.issue(Subject(self.settings.federation, role, role), key)))
        return True

    def make_kit(
        self, certificate: x509.Certificate, key: ec.EllipticCurvePrivateKey | None, task: TaskSpec | None
    ) -> bytes:
        """Make the start-up kit of a device (`fedge.membership.kit`)."""
        subject = find_subject(certificate)
        assert subject is not None
        kit = Kit(
            federation=subject.federation,
            id=subject.name,
            broker=self.settings.broker,
            topic_prefix=self.settings.topic_prefix,
            client_prefix=self.settings.client_prefix,
            ca=encode_pem(self.certificate).decode(),
            certificate=encode_pem(certificate).decode(),
            key=None if key is None else encode_key(key).decode(),
            task=task,
        )
        return seal_kit(kit, self._key)


def _list_entries(revoked: x509.CertificateRevocationList) -> dict[int, dt.datetime]:
    """List the serial numbers and dates on a revocation list."""
    return {entry.serial_number: entry.revocation_date_utc for entry in revoked}


def _get_number(revoked: x509.CertificateRevocationList) -> int:
    return revoked.extensions.get_extension_for_class(x509.CRLNumber).value.crl_number


def _format_time(at: dt.datetime) -> str:
    return f"{at:%Y-%m-%dT%H:%M:%SZ}"
