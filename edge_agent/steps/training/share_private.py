"""PM-MoE's one upload: the kept private module (pm_moe.md sections 7, 9). Off unless its owner enables it, too."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Final

import msgspec
import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from edge_agent.device.device import Device, FailedError, decoded
from fedge.steps.contract import Declined, Result
from fedge.steps.training.share_private import PrivateShared, SharePrivate
from fedge.steps.training.train import kept_by
from fedge.tensors.layout import Floats, Tensors, to_bytes
from fedge.wire.messages import Why

GIVEN: Final = "given"
Module = Mapping[str, NDArray[np.generic]]


class Given(Struct, frozen=True, kw_only=True):
    """What was sent, and with which settings."""

    action: SharePrivate
    tensors: bytes


def run(device: Device, action: SharePrivate) -> Result:
    """The kept module as a blob, clipped and with noise if the order says so."""
    layout = kept_by(action.kept_by, action.personal, device.layout, device.steps)
    kept = device.kept(action.kept_by, layout)
    if kept is None:
        return Declined(why=Why.NOTHING_KEPT, reason="this device never trained")
    if not device.may_share_kept():
        return Declined(why=Why.LEARNED_FROM_ALL)
    module = kept.tensors()
    mine = module if action.clip is None else clipped(module, action.clip)
    known = device.files.read(GIVEN)
    plain = known is None and not action.noise
    return PrivateShared(module=device.send(to_bytes(mine) if plain else _noisy_once(device, action, mine, known)))


def clipped(module: Module, clip: float) -> Tensors:
    """The module clipped to an L2 norm, over all its float tensors, of at most `clip` > 0. Counters stay unchanged."""
    floats = _floats(module)
    norm = math.sqrt(sum(float(np.sum(np.square(t, dtype=np.float64))) for t in floats.values()))
    scale = min(1.0, clip / norm) if norm else 1.0
    return dict(module) | {name: (t * scale).astype(np.float32) for name, t in floats.items()}


def noisy(module: Module, deviation: float, rng: np.random.Generator) -> Tensors:
    """The module with N(0, deviation^2) added to every number of its float tensors."""
    return dict(module) | {
        name: (t + deviation * rng.standard_normal(t.shape)).astype(np.float32) for name, t in _floats(module).items()
    }


def _floats(module: Module) -> dict[str, Floats]:
    return {name: np.asarray(t, np.float32) for name, t in sorted(module.items()) if t.dtype == np.float32}


def _noisy_once(device: Device, action: SharePrivate, module: Module, known: bytes | None) -> bytes:
    """The module with secret noise, not from the order's seed, which the coordinator knows.

    It is drawn once per run and stored, and nothing else is sent from then on: averaging many draws, or a version
    without noise, would reveal the module.

    Raises:
        FailedError: there is no clip to scale the noise by, or the module was already sent with other settings.
        StoreError: the disk is full, or the file cannot be read.
    """
    if known is None:
        if action.clip is None:
            raise FailedError("noise needs a clip")
        made = to_bytes(noisy(module, action.noise * action.clip, np.random.default_rng()))
        device.files.write(GIVEN, msgspec.msgpack.encode(Given(action=action, tensors=made)))
        return made
    given = decoded(known, Given)
    if given.action != action:
        raise FailedError("in this run the module was given already, with other noise")
    return given.tensors
