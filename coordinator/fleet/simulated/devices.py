"""Hardware of simulated devices: speed, memory, links, and reliability.

We measured none of this on the boards themselves. Known and assumed values:

    clock, cores, RAM   the makers' data sheets: Zero 2 W 4 x Cortex-A53 at 1 GHz, 512 MB; Pi 4 4 x A72 at 1.8 GHz,
                        4 GB; Pi 5 4 x A76 at 2.4 GHz, 8 GB; Jetson Nano 4 x A57 at 1.43 GHz, 4 GB; Jetson Orin Nano 6 x
                        A78AE at 1.5 GHz, 8 GB. Free RAM: this less 0.2 to 2 GB for the system (assumed)
    speed               the CPU's, since the agent does not use the Jetsons' GPU; Pi 4 = 1. Sysbench with four
                        threads (leoncode.co.uk/articles/raspberry-pi-benchmarks) counts 2,459 events/s on a Pi 3B+ (A53
                        at 1.4 GHz), 5,901 on a Pi 4 and 10,945 on a Pi 5. Hence Pi 5 1.85, and Zero 2 W 0.42 x 1.0 /
                        1.4 = 0.3. Assumed from clock and core: Jetson Nano 0.75, Orin Nano 2.0
    links               assumed TCP throughput, up and down: Wi-Fi at 2.4 GHz on the Zero 2 W, at 5 GHz on the other
                        Pis, wired on the Jetsons, all behind one shared uplink
    jitter, stragglers, availability, drop-out: all assumed, and worse for the boards that run on batteries
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

import numpy as np


@dataclass(frozen=True, slots=True)
class Hardware:
    """A class of devices. With the default values a device takes no time and is always present.

    speed: training speed; Raspberry Pi 4 = 1. up_mbit_s, down_mbit_s: rates of the link. latency_s: delay of an order
    and its answer together. jitter: sigma of the log-normal factor of each order's computing time (median 1).
    straggles: probability that a further factor exp|z| (z standard normal, mean factor 2.8) slows an order. stays:
    probability that a device present in one round is present in the next. returns: the same probability for an absent
    device. drops: probability that an order is never answered.
    """

    name: str = "instant"
    speed: float = math.inf
    cpu_ghz: float | None = None
    free_ram_gb: float | None = None
    up_mbit_s: float = math.inf
    down_mbit_s: float = math.inf
    latency_s: float = 0.0
    jitter: float = 0.0
    straggles: float = 0.0
    stays: float = 1.0
    returns: float = 1.0
    drops: float = 0.0

    @property
    def link_mbit_s(self) -> float | None:
        """The harmonic mean of the rates up and down, in Mbit/s; None if transfers take no time."""
        slowness = 1 / self.up_mbit_s + 1 / self.down_mbit_s
        return 2 / slowness if slowness else None

    @property
    def availability(self) -> float:
        """The long-run share of rounds in which the device is present, in [0, 1]."""
        leaves = 1 - self.stays
        return self.returns / (self.returns + leaves) if leaves else 1.0


PI_ZERO_2_W: Final = Hardware(
    "Raspberry Pi Zero 2 W", 0.3, 1.0, 0.3, 20, 30, 0.06, 0.3, 0.1, stays=0.9, returns=0.5, drops=0.03
)
PI_4: Final = Hardware("Raspberry Pi 4", 1.0, 1.8, 3.0, 60, 90, 0.04, 0.2, 0.05, stays=0.95, returns=0.6, drops=0.02)
PI_5: Final = Hardware("Raspberry Pi 5", 1.85, 2.4, 7.0, 60, 100, 0.04, 0.2, 0.05, stays=0.95, returns=0.6, drops=0.02)
JETSON_NANO: Final = Hardware(
    "Jetson Nano", 0.75, 1.43, 2.5, 40, 100, 0.02, 0.2, 0.03, stays=0.98, returns=0.8, drops=0.01
)
JETSON_ORIN_NANO: Final = Hardware(
    "Jetson Orin Nano", 2.0, 1.5, 6.0, 40, 100, 0.02, 0.15, 0.03, stays=0.98, returns=0.8, drops=0.01
)
CLASSES: Final = (PI_ZERO_2_W, PI_4, PI_5, JETSON_NANO, JETSON_ORIN_NANO)


def draw_mixed(ids: Iterable[str], *, seed: int) -> dict[str, Hardware]:
    """Draw a class for each device, by the seed. The sizes of the five classes differ by at most one device."""
    ordered = sorted(ids)
    places = np.random.default_rng([seed, len(ordered)]).permutation(len(ordered))
    return {i: CLASSES[int(place) % len(CLASSES)] for i, place in zip(ordered, places, strict=True)}
