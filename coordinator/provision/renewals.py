"""Renewal over the broker, authority side: devices' retained requests are answered with retained certificates.

The two sides need not be online at the same time, so the authority's key is needed only briefly, once a day or once a
month. A request is signed with the key of the device's present certificate, so neither a broker nor another device can
forge it; the answer is for that key alone. A repeated request gets the same certificate again.
"""

from __future__ import annotations

import logging
from secrets import token_hex

from coordinator.provision.issuer import Issuer
from fedge.errors import ConfigError
from fedge.identity.certificates import encode_pem, read_request
from fedge.identity.names import Role
from fedge.membership.credentials import Credentials
from fedge.wire.retained import collect_retained
from fedge.wire.topics import Topics
from fedge.wire.transport import Transport

log = logging.getLogger("fedge.provision")


async def answer_requests(issuer: Issuer) -> list[str]:
    """Answer the requests at the broker; return the devices that got a certificate.

    Raises:
        TransportError: the broker cannot be reached, or refuses us.
    """
    settings = issuer.settings
    topics = Topics(settings.federation)
    own = Credentials(
        identity=issuer.folder / Role.COORDINATOR,
        topic_prefix=settings.topic_prefix,
        client_prefix=settings.client_prefix,
    )
    broker = own.make_broker_settings(settings.broker)
    transport = Transport(broker, topics.make_client_id("renewal", token_hex(8)), session_expiry_s=0)
    async with collect_retained(transport, topics, "renewal") as requests:
        return [device for device in sorted(requests) if await _answer(issuer, transport, device, requests[device])]


async def _answer(issuer: Issuer, transport: Transport, device: str, request: bytes) -> bool:
    topics = Topics(issuer.settings.federation)
    try:
        certificate = issuer.renew(device, *read_request(request))
    except ConfigError as error:
        log.warning("event=renewal_refused device=%s reason=%r", device, str(error))
        certificate = None
    if certificate is not None:
        await transport.publish(topics.make_agent_topic(device, "certificate"), encode_pem(certificate), retain=True)
    await transport.publish(topics.make_agent_topic(device, "renewal"), b"", retain=True)
    return certificate is not None
