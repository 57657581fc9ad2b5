"""What the parts of the worker share: how blobs come in, and what goes out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from fedge.messages import BlobRef, Installed, Result, Role

if TYPE_CHECKING:
    from export import BundleInfo

Fetch = Callable[[BlobRef], bytes]
Stop = Callable[[], bool]


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of an order. `blobs`: digest -> bytes of what the result refers to."""

    result: Result
    blobs: dict[str, bytes]


class FailedError(Exception):
    """The order cannot be done; the text goes into the report."""


def installed(info: BundleInfo, roles: tuple[Role, ...], *, guarded: bool) -> Installed:
    """The report of a bundle that was written."""
    return Installed(bundle_digest=info.digest, roles=roles, max_abs_diff=info.max_abs_diff, guarded=guarded)
