"""What happens in a stream of campaigns, to whom and when; drawn by the seed, so equal for all methods."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from typing import Final, Literal, get_args

import numpy as np
from msgspec import Struct

from fedge.errors import ConfigError

Happening = Literal["classes", "seasons", "turn", "move", "wrong-labels"]
HAPPENINGS: Final[tuple[Happening, ...]] = get_args(Happening)
DARKEST: Final = 0.6
"""The gain of all sensors in the middle of a season."""
SEASON: Final = 5
"""Campaigns of a whole year of seasons."""
WRONG_SHARE: Final = 0.2
"""Share of wrong labels in the feedback of the devices that have any."""
WRONG_DEVICES: Final = 0.25
_LOT: Final = 97
"""Keeps these draws separate from other uses of the seed."""


class Happenings(Struct, frozen=True, kw_only=True):
    """What happens in a stream; campaigns are counted from 1, and None or an empty field means never.

    `births`: by class, the campaign from which it appears. `turned`: the device whose camera is turned by 90 degrees
    from campaign `turns_in` on. `moved`: two devices that take each other's place from campaign `moves_in` on.
    `wrong`: the devices that give wrong labels from campaign `wrong_from` on. `seasons`: whether light changes.
    """

    campaigns: int
    births: tuple[int, ...]
    turned: str | None = None
    turns_in: int = 0
    moved: tuple[str, str] | None = None
    moves_in: int = 0
    wrong: tuple[str, ...] = ()
    wrong_from: int = 0
    seasons: bool = False

    def find_source(self, device_id: str, campaign: int) -> str:
        """Find the device in whose place a device is in a campaign; itself unless it has moved."""
        if self.moved is None or campaign < self.moves_in or device_id not in self.moved:
            return device_id
        return self.moved[1 - self.moved.index(device_id)]

    def count_turns(self, device_id: str, campaign: int) -> int:
        """Count the quarters by which a device's camera has been turned."""
        return int(device_id == self.turned and campaign >= self.turns_in)

    def compute_gain(self, campaign: int) -> float:
        """Compute the factor on all inputs in a campaign, 1 in the first."""
        if not self.seasons:
            return 1.0
        return 1 - (1 - DARKEST) * (1 - math.cos(2 * math.pi * (campaign - 1) / SEASON)) / 2

    def has_wrong_labels(self, device_id: str, campaign: int) -> bool:
        """Return whether some labels that a device gets in a campaign are wrong."""
        return device_id in self.wrong and campaign >= self.wrong_from


def parse_happenings(text: str) -> tuple[Happening, ...]:
    """Parse a comma-separated list of happenings; `none` is the empty list.

    Raises:
        ConfigError: one of them is unknown.
    """
    words = [word.strip() for word in text.split(",") if word.strip() and word.strip() != "none"]
    for word in words:
        if word not in HAPPENINGS:
            raise ConfigError(f"nothing called {word!r} can happen: take some of {', '.join(HAPPENINGS)}, or none")
    return tuple(each for each in HAPPENINGS if each in words)


def draw_happenings(
    wanted: Collection[Happening], campaigns: int, groups: Sequence[tuple[str, int]], n_classes: int, *, seed: int
) -> Happenings:
    """Draw what happens to whom; equal arguments give equal happenings.

    The last fifth of the classes, at least one, appear one after the other from a fifth of the campaigns on. A camera
    is turned after half of them, labels are wrong from six tenths on, and two devices, of different groups if there are
    any, change places after seven tenths.

    Args:
        wanted: what is to happen.
        campaigns: number of campaigns.
        groups: each device with the number of its group.
        n_classes: number of classes.
        seed: seed of the draw.

    Raises:
        ConfigError: there are too few devices.
    """
    rng = np.random.default_rng((seed, _LOT))
    births = [1] * n_classes
    late = max(1, n_classes // 5) if "classes" in wanted and n_classes > 2 else 0
    for k in range(late):
        births[n_classes - late + k] = 1 + round(campaigns * (0.2 + 0.2 * k / late))
    order = [groups[i] for i in rng.permutation(len(groups))]
    if len(order) < 3 and {"turn", "move"} & set(wanted):
        raise ConfigError("turn and move need at least three devices: use more, or let something else happen")
    turned = order[0][0] if "turn" in wanted else None
    first = order[1] if "move" in wanted else None
    partner = None if first is None else next((d for d in order[2:] if d[1] != first[1]), order[2])
    n_wrong = max(1, round(WRONG_DEVICES * len(order))) if "wrong-labels" in wanted else 0
    return Happenings(
        campaigns=campaigns,
        births=tuple(births),
        turned=turned,
        turns_in=1 + round(0.5 * campaigns),
        moved=None if first is None or partner is None else (first[0], partner[0]),
        moves_in=1 + round(0.7 * campaigns),
        wrong=tuple(sorted(device for device, _ in order[-n_wrong:])) if n_wrong else (),
        wrong_from=1 + round(0.6 * campaigns),
        seasons="seasons" in wanted,
    )
