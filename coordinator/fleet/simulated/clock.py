"""The simulated clock: how long an order takes on a device, whether the device is present, whether it ever answers.

    seconds = latency + bytes down / link + work / speed * noise + bytes up / link

Work is counted in floating-point operations (`fedge.steps.contract.Action.passes`). Every random number is a function
of (seed, round, label, device) and its purpose, so it does not depend on the other devices or on their order. There is
no state.
"""

from __future__ import annotations

import hashlib
import math
from statistics import NormalDist
from typing import Final

from coordinator.fleet.simulated.devices import Hardware

FLOPS: Final = 4e9
"""Floating-point operations a second that a Raspberry Pi 4 (speed 1) reaches in training: a third of the 13 GFLOP/s
that Linpack reaches on it, for batches are small (assumed)."""
_NORMAL: Final = NormalDist()


def seconds(
    hardware: Hardware,
    *,
    work: float,
    bytes_down: int,
    bytes_up: int,
    seed: int,
    round_number: int,
    label: str,
    device: str,
) -> float:
    """Time from sending an order to receiving its answer.

    work: floating-point operations. bytes_down, bytes_up: of the order's models and the answer's tensors.
    """
    moving = 8e-6 * (bytes_down / hardware.down_mbit_s + bytes_up / hardware.up_mbit_s)
    where = (seed, round_number, label, device)
    return hardware.latency_s + moving + work / (hardware.speed * FLOPS) * noise(hardware, *where)


def noise(hardware: Hardware, seed: int, round_number: int, label: str, device: str) -> float:
    """Factor of the computing time: log-normal, for stragglers with a long tail."""
    factor = math.exp(hardware.jitter * _normal(seed, round_number, label, device, "jitter"))
    if _uniform(seed, round_number, label, device, "straggles") < hardware.straggles:
        factor *= math.exp(abs(_normal(seed, round_number, label, device, "tail")))
    return factor


def dropped(hardware: Hardware, *, seed: int, round_number: int, label: str, device: str) -> bool:
    """Whether the order is never answered."""
    return bool(hardware.drops) and _uniform(seed, round_number, label, device, "drops") < hardware.drops


def there(hardware: Hardware, before: bool | None, *, seed: int, round_number: int, device: str) -> bool:
    """Whether a device is present in a round. `before`: whether it was in the round before; None: the first one."""
    chance = hardware.availability if before is None else hardware.stays if before else hardware.returns
    return chance >= 1 or _uniform(seed, round_number, "", device, "there") < chance


def _uniform(seed: int, round_number: int, label: str, device: str, purpose: str) -> float:
    """In [0, 1)."""
    digest = hashlib.sha256(f"{seed}.{round_number}.{label}.{device}.{purpose}".encode()).digest()
    return (int.from_bytes(digest[:8]) >> 11) / 2**53


def _normal(seed: int, round_number: int, label: str, device: str, purpose: str) -> float:
    return _NORMAL.inv_cdf(max(_uniform(seed, round_number, label, device, purpose), 2**-54))
