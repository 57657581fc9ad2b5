"""PM-MoE's one upload: what a device kept for itself (pm_moe.md sections 7, 9). Off unless its owner wants it, too."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from edge_agent import personal
from edge_agent.outcome import FailedError, Outcome
from fedge.errors import StoreError
from fedge.files import write_atomically
from fedge.messages import BlobRef, Declined, Order, PrivateShared, SharePrivate
from fedge.tensors import Floats, Tensors, digest_of, to_bytes

if TYPE_CHECKING:
    from edge_agent.worker import Worker

Module = Mapping[str, NDArray[np.generic]]


class Shared(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """HOME/personal/{run}/shared: what was sent, and how it was asked for."""

    action: SharePrivate
    tensors: bytes


def share(worker: Worker, action: SharePrivate, order: Order) -> Outcome:
    """What was kept, as a blob, if the device's owner allows it; clipped and with noise where the order says so."""
    if not worker.shares_private:
        return Outcome(Declined(reason="the private module stays here: the agent runs without --share-private"), {})
    mine = personal.kept(worker, action.keep, order)
    if mine is None:
        return Outcome(Declined(reason="nothing is kept here: this device never trained"), {})
    if action.clip is not None:
        mine = clipped(mine, action.clip)
    path = personal.folder_of(worker.home, order) / "shared"
    data = _noisy_once(path, action, mine) if action.noise or path.exists() else to_bytes(mine)
    ref = BlobRef(digest=digest_of(data), size_bytes=len(data))
    return Outcome(PrivateShared(module=ref), {ref.digest: data})


def clipped(module: Module, clip: float) -> Tensors:
    """The module with an L2 norm, over all its float tensors, of at most `clip` > 0. Counters stay as they are."""
    floats = _floats(module)
    norm = math.sqrt(sum(float(np.sum(np.square(t, dtype=np.float64))) for t in floats.values()))
    scale = min(1.0, clip / norm) if norm else 1.0
    return dict(module) | {name: (t * scale).astype(np.float32) for name, t in floats.items()}


def noisy(module: Module, deviation: float, rng: np.random.Generator) -> Tensors:
    """The module with N(0, deviation^2) added to every number of its float tensors."""
    return dict(module) | {
        name: (t + deviation * rng.standard_normal(t.shape)).astype(np.float32)
        for name, t in sorted(_floats(module).items())
    }


def _floats(module: Module) -> dict[str, Floats]:
    return {name: np.asarray(t, np.float32) for name, t in module.items() if t.dtype == np.float32}


def _noisy_once(path: Path, action: SharePrivate, module: Module) -> bytes:
    """The module with noise that nobody else knows: not from the order's seed, which the coordinator gave.

    It is drawn once in a run and stored, and nothing else is given from then on: the mean of many draws would be the
    module, and the module without noise is it.

    Raises:
        FailedError: there is no clip to measure the noise by, or the module was given in another way.
        StoreError: the disk is full, or the file cannot be read.
    """
    if not path.exists():
        if action.clip is None:
            raise FailedError("noise needs a clip")
        made = to_bytes(noisy(module, action.noise * action.clip, np.random.default_rng()))
        write_atomically(path, msgspec.msgpack.encode(Shared(action=action, tensors=made)))
    try:
        known = msgspec.msgpack.decode(path.read_bytes(), type=Shared)
    except (OSError, msgspec.DecodeError) as error:
        raise StoreError(f"{path} cannot be read: {error}") from error
    if known.action != action:
        raise FailedError("in this run the module was given already, with other noise")
    return known.tensors
