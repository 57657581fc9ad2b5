"""Names in certificates, which say who a member of a federation is.

A certificate names its owner twice. The common name is the name at the broker, and a URI among the alternative names
gives federation, role and name:

    urn:fedge:FEDERATION:ROLE:NAME
"""

from __future__ import annotations

import logging
from enum import StrEnum
from typing import TYPE_CHECKING, Final

from msgspec import Struct

if TYPE_CHECKING:
    from cryptography import x509

log = logging.getLogger("fedge.identity")

URN: Final = "urn:fedge:"
CRL: Final = "crl.pem"
"""File name of the authority's list of revoked certificates, beside the certificate of the authority."""


class Role(StrEnum):
    """The role of a certificate's owner."""

    DEVICE = "device"
    COORDINATOR = "coordinator"
    STATUS = "status"
    ROLLOUT = "rollout"
    BROKER = "broker"
    RELAY = "relay"
    INTAKE = "intake"
    OPERATOR = "operator"

    @property
    def effective_role(self) -> Role:
        """The role whose messages the owner may send; a relay sends those of a device, in the name of its site."""
        return Role.DEVICE if self is Role.RELAY else self


class Subject(Struct, frozen=True):
    """The owner of a certificate: a member of a federation."""

    federation: str
    role: Role
    name: str

    @property
    def uri(self) -> str:
        """The URI in the certificate."""
        return f"{URN}{self.federation}:{self.role}:{self.name}"

    def __str__(self) -> str:
        return f"{self.role} {self.name} of {self.federation}"


def find_subject(certificate: x509.Certificate) -> Subject | None:
    """Return the owner of a certificate, or None if no federation's authority made it."""
    from cryptography import x509
    from cryptography.x509.oid import NameOID

    try:
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        (uri,) = [u for u in names.get_values_for_type(x509.UniformResourceIdentifier) if u.startswith(URN)]
        _, _, federation, role, name = uri.split(":")
        subject = Subject(federation, Role(role), name)
    except (x509.ExtensionNotFound, ValueError):
        return None
    at_the_broker = certificate.subject.get_attributes_for_oid(NameOID.COMMON_NAME)
    return subject if at_the_broker and at_the_broker[0].value == name else None
