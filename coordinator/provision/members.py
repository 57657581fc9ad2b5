"""The members of a federation: the list that provisioning writes and the coordinator enforces.

    members.json  beside ca_file: all certificates with their roles and revocations
    crl.pem       beside it: the authority's own revocation list, for brokers and devices

A certificate of the authority alone does not admit anybody: the name must be listed in its role and not be revoked.
"""

from __future__ import annotations

import datetime as dt
import logging
from pathlib import Path
from typing import Final

import msgspec
from msgspec import Struct

from fedge.errors import ConfigError, ProtocolError
from fedge.identity.authority import Authority
from fedge.identity.names import CRL, Role, Subject
from fedge.system.files import get_version, write_atomically
from fedge.wire.messages import Id

log = logging.getLogger("fedge.coordinator")

MEMBERS: Final = "members.json"


class Member(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A certificate holder. Dates are in UTC, such as 2030-01-31T00:00:00Z."""

    role: Role
    serial: str  # of the certificate, in hex
    not_after: str
    revoked: str | None = None  # when


class Members(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The list of members: the content of members.json."""

    federation: Id
    members: dict[Id, Member] = {}

    def admits(self, name: str, role: Role) -> bool:
        """Return whether this name may speak in this role."""
        member = self.members.get(name)
        return member is not None and member.role == role and member.revoked is None


def read_members(file: Path) -> Members:
    """Read the list of members.

    Raises:
        ConfigError: it is missing or malformed.
    """
    try:
        return msgspec.json.decode(file.read_bytes(), type=Members)
    except FileNotFoundError:
        raise ConfigError(f"{file} is not there: it says who belongs to the federation (`fedge provision`)") from None
    except (OSError, msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError(f"{file} is no list of members: {error}") from error


def write_members(file: Path, members: Members) -> None:
    """Replace the list of members atomically.

    Raises:
        StoreError: the disk is full or broken.
    """
    write_atomically(file, msgspec.json.format(msgspec.json.encode(members), indent=1))


class WatchedMembers:
    """The two files of members, checked from time to time and read again after a change.

    Args:
        folder: the folder of the files.
        federation: the federation to which the list must belong.

    Raises:
        ConfigError: the list cannot be read, or is another federation's.
    """

    def __init__(self, folder: Path, federation: str) -> None:
        self._file, self._revocations = folder / MEMBERS, folder / CRL
        self._federation = federation
        self._seen = get_version(self._file), get_version(self._revocations)
        self._read_at = self._seen[0]
        self._members = self._read()

    def _read(self) -> Members:
        members = read_members(self._file)
        if members.federation != self._federation:
            raise ConfigError(f"{self._file} is of federation {members.federation}, and this is {self._federation}")
        return members

    def _refresh(self) -> None:
        """Load a list that was rewritten; an unreadable one changes nothing."""
        if (now := get_version(self._file)) == self._read_at:
            return
        self._read_at = now
        try:
            self._members = self._read()
        except ConfigError as error:
            log.error("event=members_unreadable reason=%r", str(error))  # noqa: TRY400 - the text is all

    def admit(self, subject: Subject) -> None:
        """Check that a member is on the list, including recent changes.

        Raises:
            ProtocolError: `revoked` or `not-a-member`.
        """
        if self._members.admits(subject.name, subject.role):
            return
        self._refresh()
        if self._members.admits(subject.name, subject.role):
            return
        member = self._members.members.get(subject.name)
        if member is not None and member.revoked is not None:
            raise ProtocolError("revoked", f"{subject}, on {member.revoked}")
        raise ProtocolError("not-a-member", f"{subject} is not in {self._file}")

    def admits(self, name: str, role: Role) -> bool:
        """Return whether this name may speak in this role."""
        return self._members.admits(name, role)

    def list_ends(self) -> dict[str, float]:
        """List when each member's last certificate ends, in seconds since the epoch."""
        members = self._members.members.items()
        return {name: dt.datetime.fromisoformat(member.not_after).timestamp() for name, member in members}

    def update_authority(self, authority: Authority) -> bool:
        """Read what has changed since the last look, and pass it to the authority; return whether anything changed."""
        if (now := (get_version(self._file), get_version(self._revocations))) == self._seen:
            return False
        self._seen = now
        self._refresh()
        try:
            if now[1] is not None:
                authority.read_revocations(self._revocations)
        except ConfigError as error:
            log.error("event=revocations_unreadable reason=%r", str(error))  # noqa: TRY400 - the text is all
        return True
