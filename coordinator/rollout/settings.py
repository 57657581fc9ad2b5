"""Settings of stages, for rollouts of releases and for introductions of personal bundles."""

from __future__ import annotations

import itertools
from typing import Annotated, Any, Final

from msgspec import Meta, Struct

from fedge.errors import ConfigError
from fedge.settings import Seconds
from fedge.system.text import Heading
from fedge.wire.messages import Share

Stages = Annotated[str, Heading.ROLLOUT, "The stages are shares of the fleet, comma-separated, ascending up to 1."]
Canary = Annotated[str, Heading.ROLLOUT, "These devices, comma-separated, go first; by default the first share does."]
Soak = Annotated[Seconds, Heading.ROLLOUT, "A stage must go well this long."]
Absent = Annotated[Seconds, Heading.ROLLOUT, "Nobody waits for a device after this time without a message."]
MaxFailures = Annotated[
    Share, Heading.ROLLOUT, "The bundle may be broken, slow or rolled back on this share of a stage's devices."
]
MaxWorse = Annotated[
    Share, Heading.ROLLOUT, "This share of a stage's devices may keep their present bundle because it is better."
]
AccuracyDrop = Annotated[
    float,
    Meta(ge=0),
    Heading.ROLLOUT,
    "This mean loss of the score stops the rollout; 0.01 is one point of accuracy or of R².",
]

CANARIES: Final = 3
"""Devices in the first stage of an introduction, or half of a smaller fleet: one that keeps its own proves little."""


class IntroductionSettings(Struct, frozen=True, kw_only=True):
    """Section [introduction] of the configuration: how a campaign's personal bundles enter service."""

    stages: Stages = "0.1,0.5,1"
    canary: Canary = ""
    soak_s: Soak = 60.0
    absent_s: Absent = 600.0
    max_failures: MaxFailures = 0.05
    max_worse: MaxWorse = 0.5
    accuracy_drop: AccuracyDrop = 0.01


def parse_stages(settings: Any) -> dict[str, Any]:
    """Return the fields of a `Plan` that these settings describe.

    Raises:
        ConfigError: the stages are not ascending shares up to 1.
    """
    canaries = tuple(filter(None, (name.strip() for name in settings.canary.split(","))))
    try:
        stages = tuple(float(share) for share in settings.stages.split(","))
    except ValueError as error:
        raise ConfigError(f"stages: {error}; such as 0.1,0.5,1") from error
    if not all(a < b for a, b in itertools.pairwise((0.0, *stages))) or stages[-1] != 1:
        raise ConfigError(f"stages must be ascending shares above 0, the last 1; got {settings.stages}")
    limits = {
        name: getattr(settings, name) for name in ("soak_s", "absent_s", "max_failures", "max_worse", "accuracy_drop")
    }
    return {"canaries": canaries, "stages": (0.0, *stages) if canaries else stages, **limits}
