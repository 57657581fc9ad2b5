"""What will expire soon, from what the coordinator sees: certificates in use, lists of revoked ones, signatures.

A certificate or list counts once three quarters of its life are over, since whoever renews does so after two thirds; so
an item here means that a renewal did not happen. Each knows since when that is so, and until when there is time.

    own        the coordinator's certificate, its authority's, and its list of revoked certificates
    broker     the broker's certificate, as a TLS connection to it shows it
    devices    the certificates with which devices sign their messages
    releases   the signed metadata of the repositories that a page shows (HOME/repositories.json)
"""

from __future__ import annotations

import contextlib
import datetime as dt
import functools
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec
from msgspec import Struct

from fedge.errors import ConfigError, StoreError
from fedge.system.files import read_kept, write_atomically

REPOSITORIES: Final = "repositories.json"
"""Name of the file in a coordinator's home that lists the repositories of releases on its machine."""
SIGNED_DAYS: Final = {"root": 3650, "targets": 365, "snapshot": 90, "timestamp": 30}
"""Lives of the signatures of `fedge release`, in days."""
DAY_S: Final = 86400.0
RENEW: Final = "run `fedge provision renew` on the server, best every day"


class Expiring(Struct, frozen=True, kw_only=True):
    """What will expire, or has. device: the device's id; empty if it concerns the server.

    since, until: when it was overdue, and when it expires, in seconds since the epoch; None if it cannot be read.
    """

    device: str = ""
    what: str
    since: float | None = None
    until: float | None = None
    do: str


@functools.lru_cache(maxsize=20_000)
def read_validity(der: bytes) -> tuple[float, float]:
    """Return the begin and end of a certificate's validity (DER), in seconds since the epoch."""
    from cryptography import x509

    from fedge.identity.certificates import get_validity

    begin, end = get_validity(x509.load_der_x509_certificate(der))
    return begin.timestamp(), end.timestamp()


def find_overdue(what: str, validity: tuple[float, float], now: float, *, do: str, device: str = "") -> list[Expiring]:
    """Return the item about something with this validity, if its renewal is overdue."""
    from fedge.identity.certificates import WARN_AT

    begin, end = validity
    since = begin + WARN_AT * (end - begin)
    return [Expiring(device=device, what=what, since=since, until=end, do=do)] if now >= since else []


def list_own(ca_file: Path, cert_file: Path, now: float) -> list[Expiring]:
    """List what is overdue of the identity in these files: certificate, authority, and list of revoked certificates."""
    from fedge.identity.certificates import get_validity, load_certificate, load_crl
    from fedge.identity.names import CRL

    found: list[Expiring] = []
    anew = "make a new federation of certificates (`fedge provision init`) and enrol its machines"
    for file, what, load, do in (
        (cert_file, f"the certificate {cert_file}", load_certificate, RENEW),
        (ca_file, f"the authority's certificate {ca_file}", load_certificate, anew),
        (ca_file.with_name(CRL), f"the list of revoked certificates {ca_file.with_name(CRL)}", load_crl, RENEW),
    ):
        if file.name == CRL and not file.exists():
            continue
        try:
            begin, end = get_validity(load(file))
        except ConfigError as error:  # the certificate was valid at the start, and the connection stands
            found.append(Expiring(what=str(error), do="put the file back, or " + RENEW))
        else:
            found += find_overdue(what, (begin.timestamp(), end.timestamp()), now, do=do)
    return found


def list_of_broker(address: object, der: bytes | None, now: float) -> list[Expiring]:
    """List whether the broker's certificate is overdue. der: as a connection saw it last; None without TLS."""
    if der is None:
        return []
    do = f"{RENEW}, or renew it as its authority has it, and have the broker load it (systemctl reload mosquitto)"
    return find_overdue(f"the certificate of the broker {address}", read_validity(der), now, do=do)


def list_of_devices(used: Mapping[str, bytes], listed: Mapping[str, float], now: float) -> list[Expiring]:
    """List the devices whose certificates are overdue.

    Args:
        used: the certificates (DER) with which devices signed last, by id.
        listed: when the last certificates that the authority has issued to devices end, by id.
        now: seconds since the epoch.
    """
    found = []
    for i, der in sorted(used.items()):
        validity = read_validity(der)
        if listed.get(i, 0.0) > validity[1]:
            do = f"its new one is made: see that {i} is connected, and event=not_renewed in the log of its agent"
        else:
            do = f"{RENEW}; {i} asks for a new one by itself, if it is connected (event=not_renewed in its log says why"
            do += " not)"
        if now >= validity[1]:
            do = f"enrol it anew: `fedge provision revoke {i}`, then `fedge provision device {i}`"
        found += find_overdue("its certificate", validity, now, do=do, device=i)
    return found


# ------------------------------------------------------------------------------------------------------ releases


def write_repositories(home: Path, repos: Sequence[Path]) -> None:
    """Write which repositories of releases belong to a coordinator's home.

    Raises:
        StoreError: the folder cannot be written.
    """
    write_atomically(home / REPOSITORIES, msgspec.json.encode([str(repo.absolute()) for repo in repos]))


def list_signatures(home: Path, now: float) -> list[Expiring]:
    """List signatures of releases that are overdue; what cannot be read here is left out."""
    repos: list[str] = []
    with contextlib.suppress(StoreError):
        repos = read_kept(home / REPOSITORIES, msgspec.json.Decoder(list[str]).decode) or []
    return [item for repo in repos for item in _list_of_repository(Path(repo), now)]


def _list_of_repository(repo: Path, now: float) -> Iterator[Expiring]:
    for role, days in SIGNED_DAYS.items():
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            until = _read_expiry(_find_newest(repo / "metadata", role))
            since = until - days * DAY_S / 4
            if now >= since:
                do = f"run `fedge release renew {repo}`, best every day: devices refuse what is signed too long ago"
                yield Expiring(what=f"the signature {role} of {repo}", since=since, until=until, do=do)


def _find_newest(folder: Path, role: str) -> Path:
    """Find the newest metadata of a role: timestamp.json, or that with the highest number."""
    if role == "timestamp":
        return folder / "timestamp.json"
    return max(folder.glob(f"[0-9]*.{role}.json"), key=lambda file: int(file.name.partition(".")[0]))


def _read_expiry(file: Path) -> float:
    signed: Mapping[str, Any] = json.loads(file.read_bytes())["signed"]
    return dt.datetime.fromisoformat(signed["expires"]).timestamp()
