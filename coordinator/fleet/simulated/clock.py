"""The simulated clock: how long an order takes on a device, whether the device is present, whether it ever answers.

    seconds = latency + bytes down / link + work / speed * noise + bytes up / link

Work is counted in floating-point operations (`fedge.steps.contract.Action.passes`). Every random number is a function
of (seed, round, label, device) and of the number's purpose, so it does not depend on the other devices or on their
order. There is no state.
"""

from __future__ import annotations

import hashlib
import math
from statistics import NormalDist
from typing import Final, NamedTuple

from coordinator.fleet.simulated.devices import Hardware

FLOPS: Final = 4e9
"""Floating-point operations a second of a Raspberry Pi 4 (speed 1) in training. Assumed: a third of the 13 GFLOP/s that
Linpack reaches on it, because batches are small."""
_NORMAL: Final = NormalDist()


class Occasion(NamedTuple):
    """The source of random numbers: an order, or a round with an empty label."""

    seed: int
    round: int
    label: str
    device: str

    def draw_uniform(self, purpose: str) -> float:
        """Draw a number in [0, 1)."""
        digest = hashlib.sha256(f"{self.seed}.{self.round}.{self.label}.{self.device}.{purpose}".encode()).digest()
        return (int.from_bytes(digest[:8]) >> 11) / 2**53

    def draw_normal(self, purpose: str) -> float:
        """Draw a number from the standard normal distribution."""
        return _NORMAL.inv_cdf(max(self.draw_uniform(purpose), 2**-54))


def compute_seconds(hardware: Hardware, order: Occasion, *, work: float, bytes_down: int, bytes_up: int) -> float:
    """Compute the time from sending an order to receiving its answer, in seconds.

    work: floating-point operations. bytes_down, bytes_up: of the order's models and the answer's tensors.
    """
    moving = 8e-6 * (bytes_down / hardware.down_mbit_s + bytes_up / hardware.up_mbit_s)
    return hardware.latency_s + moving + work / (hardware.speed * FLOPS) * draw_noise(hardware, order)


def draw_noise(hardware: Hardware, order: Occasion) -> float:
    """Draw the factor of the computing time: log-normal, for stragglers with a long tail."""
    factor = math.exp(hardware.jitter * order.draw_normal("jitter"))
    if order.draw_uniform("straggles") < hardware.straggles:
        factor *= math.exp(abs(order.draw_normal("tail")))
    return factor


def is_dropped(hardware: Hardware, order: Occasion) -> bool:
    """Return whether the order is never answered."""
    return bool(hardware.drops) and order.draw_uniform("drops") < hardware.drops


def is_present(hardware: Hardware, before: bool | None, round_: Occasion) -> bool:
    """Return whether a device is present in a round. `before`: whether it was in the last; None in its first."""
    chance = hardware.availability if before is None else hardware.stays if before else hardware.returns
    return chance >= 1 or round_.draw_uniform("there") < chance
