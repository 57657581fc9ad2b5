"""Who belongs to a federation: the list that provisioning writes and the coordinator goes by.

    members.json  beside ca_file: who has a certificate, in which role, and who was revoked
    crl.pem       beside it: the authority's own list of revoked certificates, for brokers and devices

A certificate of the authority alone is not enough: its name must be on the list, in its role, and not be revoked.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

import msgspec
from msgspec import Struct

from fedge.errors import ConfigError
from fedge.files import write_atomically
from fedge.identity import Role
from fedge.messages import Id

MEMBERS: Final = "members.json"


class Member(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One who has a certificate. Dates are in UTC, such as 2030-01-31T00:00:00Z."""

    role: Role
    serial: str  # of the certificate, in hex
    not_after: str
    revoked: str | None = None  # when


class Members(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Content of members.json."""

    federation: Id
    members: dict[Id, Member] = {}

    def admits(self, name: str, role: Role) -> bool:
        """Whether somebody may speak in this role."""
        member = self.members.get(name)
        return member is not None and member.role == role and member.revoked is None


def read_members(file: Path) -> Members:
    """The list.

    Raises:
        ConfigError: it is not there, or is no such list.
    """
    try:
        return msgspec.json.decode(file.read_bytes(), type=Members)
    except FileNotFoundError:
        raise ConfigError(f"{file} is not there: it says who belongs to the federation (`fedge provision`)") from None
    except (OSError, msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError(f"{file} is no list of members: {error}") from error


def write_members(file: Path, members: Members) -> None:
    """Replace it; after a crash the old or the new one is there.

    Raises:
        StoreError: the disk is full or broken.
    """
    write_atomically(file, msgspec.json.format(msgspec.json.encode(members), indent=1))
