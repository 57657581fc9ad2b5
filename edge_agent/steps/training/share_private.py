"""PM-MoE's one upload, the kept private module (pm_moe.md sections 7, 9); the device's owner must enable it, too."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Final

import msgspec
import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from edge_agent.device.device import Device, FailedError, decode_kept
from fedge.steps.contract import Declined, Result
from fedge.steps.training.share_private import PrivateShared, SharePrivate
from fedge.steps.training.train import find_kept
from fedge.tensors.layout import Floats, Tensors, to_bytes
from fedge.wire.messages import Why

GIVEN: Final = "given"
Module = Mapping[str, NDArray[np.generic]]


class SentModule(Struct, frozen=True, kw_only=True):
    """The module that was sent, and the settings with which it was sent."""

    action: SharePrivate
    tensors: bytes


def run(device: Device, action: SharePrivate) -> Result:
    """Send the kept module as a blob, clipped and with noise if the order says so."""
    layout = find_kept(action.kept_by, action.personal, device.layout, device.steps)
    kept = device.load_kept(action.kept_by, layout)
    if kept is None:
        return Declined(why=Why.NOTHING_KEPT, reason="this device never trained")
    if not device.may_share_kept():
        return Declined(why=Why.LEARNED_FROM_ALL)
    module = kept.get_tensors()
    mine = module if action.clip is None else clip_module(module, action.clip)
    known = device.files.read(GIVEN)
    plain = known is None and not action.noise
    return PrivateShared(module=device.send(to_bytes(mine) if plain else _add_noise_once(device, action, mine, known)))


def clip_module(module: Module, clip: float) -> Tensors:
    """Clip the module to an L2 norm of at most `clip` > 0 over its float tensors, not counters."""
    floats = _select_floats(module)
    norm = math.sqrt(sum(float(np.sum(np.square(t, dtype=np.float64))) for t in floats.values()))
    scale = min(1.0, clip / norm) if norm else 1.0
    return dict(module) | {name: (t * scale).astype(np.float32) for name, t in floats.items()}


def add_noise(module: Module, deviation: float, rng: np.random.Generator) -> Tensors:
    """Add N(0, deviation^2) to every number of the module's float tensors."""
    return dict(module) | {
        name: (t + deviation * rng.standard_normal(t.shape)).astype(np.float32)
        for name, t in _select_floats(module).items()
    }


def _select_floats(module: Module) -> dict[str, Floats]:
    return {name: np.asarray(t, np.float32) for name, t in sorted(module.items()) if t.dtype == np.float32}


def _add_noise_once(device: Device, action: SharePrivate, module: Module, known: bytes | None) -> bytes:
    """Return the module with secret noise, not by the order's seed, which the coordinator knows.

    The noise is drawn once per run and stored, and nothing else is sent from then on, because averaging many draws, or
    a version without noise, would reveal the module.

    Raises:
        FailedError: there is no clip to scale the noise by, or the module was already sent with other settings.
        StoreError: the disk is full, or the file cannot be read.
    """
    if known is None:
        if action.clip is None:
            raise FailedError("noise needs a clip")
        made = to_bytes(add_noise(module, action.noise * action.clip, np.random.default_rng()))
        device.files.write(GIVEN, msgspec.msgpack.encode(SentModule(action=action, tensors=made)))
        return made
    given = decode_kept(known, SentModule)
    if given.action != action:
        raise FailedError("the module was already sent in this run, with other noise")
    return given.tensors
