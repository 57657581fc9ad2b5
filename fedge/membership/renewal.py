"""A device's certificate renewal over the wire: it requests a certificate before the present one expires.

    agents/{id}/renewal      request, signed with the key of the present certificate; retained  ──▶  authority
    agents/{id}/certificate  certificate for that key; retained                                 ◀──  authority

Neither the broker nor anyone in between can use the request or forge the answer. The request proves the key, and the
answer must be by the authority, for this device and that key. The next connection uses the new certificate.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Final

from fedge.errors import ConfigError, ProtocolError, StoreError, TransportError
from fedge.identity.authority import explain_out_of_date
from fedge.identity.names import Role, find_subject
from fedge.system.files import write_atomically
from fedge.wire.connection.broker import Inbound
from fedge.wire.topics import Topics
from fedge.wire.transport import Transport

if TYPE_CHECKING:
    from cryptography import x509

log = logging.getLogger("fedge.renewal")

LOOK_S: Final = 6 * 3600.0
"""Pause between two looks at the certificate's dates."""
CHECK_RULES: Final = (
    "the broker lets this device hear of no new certificate, so the present one will expire: its rules are of an "
    "earlier version; run `fedge provision broker` again where the broker is"
)
MAX_BYTES: Final = 10_000
"""Largest certificate; ours have 900 bytes."""


class Renewal:
    """Keeps a device's certificate valid.

    Attach it last, before the transport is entered: its connect callback runs as long as the connection.
    """

    def __init__(self, transport: Transport, topics: Topics, device_id: str) -> None:
        self._transport = transport
        self._topics = topics
        self._device_id = device_id
        self._refused = False

    async def attach(self) -> None:
        """Request when due on each connection and listen for answers; only for certificates of `fedge provision`."""
        if self._transport.settings.cert_file is None or self._read_own() is None:
            return
        answers = self._topics.make_agent_topic(self._device_id, "certificate")
        await self._transport.subscribe(answers, self._handle_answer, refused=self._log_refusal)
        self._transport.on_connect(self._request_when_due)

    def _read_own(self) -> x509.Certificate | None:
        from fedge.identity.certificates import load_certificate

        certificate = load_certificate(_get_path(self._transport.settings.cert_file))
        subject = find_subject(certificate)
        if subject is None:
            return None
        mine = (self._topics.federation, Role.DEVICE, self._device_id)
        return certificate if (subject.federation, subject.role.effective_role, subject.name) == mine else None

    async def _request_when_due(self) -> None:
        """Request a certificate whenever renewal is due, while this connection lasts."""
        from fedge.identity.certificates import (
            RENEW_AT,
            encode_pem,
            explain_overdue,
            get_time,
            is_past,
            load_key,
            make_certificate_request,
        )

        while True:
            with self._log_failures():
                own = self._read_own()
                if own is not None and is_past(RENEW_AT, own, get_time()):
                    settings = self._transport.settings
                    if warning := explain_overdue(f"the certificate {settings.cert_file}", own, get_time()):
                        log.warning("event=certificate_expires device=%s detail=%r", self._device_id, warning)
                    request = make_certificate_request(
                        self._device_id, load_key(_get_path(settings.key_file or settings.cert_file))
                    )
                    topic = self._topics.make_agent_topic(self._device_id, "renewal")
                    await self._transport.publish(topic, encode_pem(request), retain=True)
            await asyncio.sleep(LOOK_S)

    @contextmanager
    def _log_failures(self) -> Iterator[None]:
        """Log why nothing is renewed and go on, since the present certificate may be valid for a long time."""
        try:
            yield
        except (ConfigError, StoreError, TransportError) as error:
            log.error("event=not_renewed device=%s reason=%r", self._device_id, str(error))  # noqa: TRY400

    def _log_refusal(self, reason: str) -> None:
        """Log once what to do about a broker whose rules are older than renewal, and go on without renewal."""
        if not self._refused:
            log.error("event=not_renewed device=%s reason=%r check=%r", self._device_id, reason, CHECK_RULES)
        self._refused = True

    async def _handle_answer(self, inbound: Inbound) -> None:
        """Install a received certificate if it is ours and valid for longer than the present one."""
        with self._log_failures():  # the answer stays at the broker
            own = self._read_own()
            if not inbound.payload or own is None:
                return
            certificate = self._verify_answer(inbound.payload, own)
            if certificate.not_valid_after_utc > own.not_valid_after_utc:
                write_atomically(_get_path(self._transport.settings.cert_file), inbound.payload)
                until = f"{certificate.not_valid_after_utc:%Y-%m-%d}"
                log.info("event=certificate_renewed device=%s until=%s", self._device_id, until)
            await self._transport.publish(inbound.topic, b"", retain=True)

    def _verify_answer(self, data: bytes, own: x509.Certificate) -> x509.Certificate:
        """Return the certificate in an answer after checking it."""
        from cryptography import x509

        from fedge.identity.certificates import UNREADABLE, is_issued_by, load_certificate

        try:
            certificate = x509.load_pem_x509_certificate(data[:MAX_BYTES])
        except UNREADABLE as error:
            raise ProtocolError("certificate", f"what came as our new certificate is none: {error}") from error
        if not is_issued_by(certificate, load_certificate(_get_path(self._transport.settings.ca_file))):
            raise ProtocolError("certificate", "our new certificate is not by our authority")
        if find_subject(certificate) != find_subject(own) or certificate.public_key() != own.public_key():
            raise ProtocolError("certificate", "our new certificate is for somebody else, or for another key")
        if trouble := explain_out_of_date(certificate):
            raise ProtocolError("certificate", f"our new certificate {trouble}")
        return certificate


def _get_path(file: str | None) -> Path:
    assert file is not None
    return Path(file)
