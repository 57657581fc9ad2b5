"""What the parts of the worker share: how blobs come in, and what goes out."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from fedge.errors import FedgeError
from fedge.messages import BlobRef, Failed, Installed, Result, Role
from fedge.tensors import Layout, Model

if TYPE_CHECKING:
    from export import BundleInfo
    from fedge.codec import Norms

log = logging.getLogger("fedge.agent")

MAX_REASON: Final = 1000
"""`Text` of a message is no longer."""
CACHED_MODELS: Final = 8
"""Models that a device keeps beyond its open orders, those used last: the next order often names the same ones."""
Fetch = Callable[[BlobRef], bytes]
Stop = Callable[[], bool]


@dataclass(frozen=True, slots=True)
class Unpacked:
    """An update that has not become bytes: what their decoding would give, read-only (`edge_agent.sending`)."""

    model: Model
    layout: Layout
    norms: Norms


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of an order: by digest, what the result refers to. `unpacked`: only where no device is (`sending`)."""

    result: Result
    blobs: dict[str, bytes]
    unpacked: dict[str, Unpacked] = field(default_factory=dict)


class FailedError(Exception):
    """The order cannot be done; the text goes into the report."""


def failed(device_id: str, error: Exception) -> Outcome:
    """The report of work that an exception ended. One that is not ours (a user's network) is logged in full."""
    if isinstance(error, FedgeError | FailedError | ValueError):
        return Outcome(Failed(reason=f"{device_id}: {error}"[:MAX_REASON]), {})
    log.error("event=work_failed device=%s", device_id, exc_info=error)
    return Outcome(Failed(reason=f"{device_id}: {type(error).__name__}: {error}"[:MAX_REASON]), {})


def installed(info: BundleInfo, roles: tuple[Role, ...], *, guarded: bool) -> Installed:
    """The report of a bundle that was written."""
    return Installed(bundle_digest=info.digest, roles=roles, max_abs_diff=info.max_abs_diff, guarded=guarded)
