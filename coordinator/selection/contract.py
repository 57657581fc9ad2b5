"""Rules of selection: a function on arrays, or a frozen struct if the rule learns; found by entry point or path.

A rule chooses within one cluster; in a method without clusters, all devices are one cluster. The rule sees
`Candidates`, and has random numbers of the round and cluster. docs/extending.md has an example of each form.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Final, Self, TypeAlias, cast

import msgspec
import numpy as np
from msgspec import Struct
from numpy.typing import ArrayLike, NDArray

from coordinator.selection.ccmab import Participation
from fedge.errors import ConfigError
from fedge.system.loading import FAILURES, describe_error, load_named
from fedge.system.moved import alias_members

GROUP: Final = "fedge.selections"
"""Entry points of installed packages, ours among them, that name a rule each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidates:
    """The N devices of a cluster that may be chosen, by ascending id. Arrays have shape (N,); NaN means unknown.

    Attributes:
        ids: names of the devices.
        n_samples: samples that the device trains on, >= 1.
        seconds: predicted time of a round, with the transfer.
        waited: rounds since the device was last asked, >= 1; if it never was, since the first round.
        cpu_ghz: clock rate of the device's processor.
        free_ram_gb: free memory.
        link_mbit_s: rate of the device's link.
        loss_drop: drop of the loss in training, mean over the device's last five participations.
        gradient_norm: mean over the same participations.
    """

    ids: tuple[str, ...]
    n_samples: NDArray[np.int64]
    seconds: NDArray[np.float64]
    waited: NDArray[np.int64]
    cpu_ghz: NDArray[np.float64]
    free_ram_gb: NDArray[np.float64]
    link_mbit_s: NDArray[np.float64]
    loss_drop: NDArray[np.float64]
    gradient_norm: NDArray[np.float64]


Draw: TypeAlias = Callable[[Candidates, int, np.random.Generator], ArrayLike]
"""(devices, n >= 1, random numbers) -> positions of at most n different devices, in any order."""


@alias_members(sizes="divide_cohort")
class Rule(Struct, frozen=True, kw_only=True):
    """A rule that learns. An instance holds what the rule knows of one cluster, and is stored between rounds.

    Therefore every field has a default, and holds numbers, texts, tuples, dictionaries or frozen structs of these.
    """

    CLUSTERS: ClassVar[bool] = False
    """Whether `divide_cohort` says how many of each cluster train; methods without clusters refuse such a rule."""

    def select(self, devices: Candidates, n: int, rng: np.random.Generator) -> ArrayLike:
        """Return the positions of at most `n` >= 1 different devices."""
        raise NotImplementedError

    def observe(self, outcomes: Mapping[str, Participation | None]) -> Self:  # noqa: ARG002 - it learns nothing
        """Return the rule with what it knows after a round.

        `outcomes`: by id; None if the device failed. A device that declined is missing.
        """
        return self

    def divide_cohort(
        self, clusters: Mapping[int, Sequence[str]], n: int, rng: np.random.Generator, last_visit: Mapping[int, int]
    ) -> Mapping[int, int]:
        """Return how many devices >= 1 of each cluster train, `n` in all; clusters left out rest. For `CLUSTERS` alone.

        `last_visit`: a number by cluster that grows with the last round in which a device of it was chosen.
        """
        raise NotImplementedError

    def load(self, learned: bytes) -> Self:
        """Load what `encode_after` stored; the rule itself if nothing, or another rule or version, was stored."""
        try:
            return msgspec.msgpack.decode(learned, type=type(self)) if learned else self
        except msgspec.DecodeError:
            return self

    def encode_after(self, how: str, outcomes: Mapping[str, Participation | None]) -> bytes:
        """Return what the rule knows after the round, as bytes.

        Raises:
            ConfigError: `observe` fails, or returns what cannot be stored.
        """
        try:
            return msgspec.msgpack.encode(self.observe(outcomes), order="deterministic")
        except FAILURES as error:
            raise ConfigError(f"selection {how} cannot observe the round: {describe_error(error)}") from error


def load_rule(how: str) -> Draw | Rule:
    """Load the rule of that name or path (`package.module:name`); a rule that learns knows nothing yet.

    Raises:
        ConfigError: there is no such rule (the text lists the installed ones), or the object is no rule.
    """
    found = load_named(how, GROUP, "selection")
    if isinstance(found, type) and issubclass(found, Rule):
        try:
            return found()
        except TypeError as error:
            raise ConfigError(f"selection {how} knows nothing at first: its fields need defaults ({error})") from error
    if not callable(found) or isinstance(found, type):
        raise ConfigError(
            f"{how} is no selection: it must be a function (devices, n, rng), or a subclass of "
            "coordinator.selection.contract.Rule"
        )
    return cast("Draw", found)


def draw_positions(how: str, draw: Callable[[], Any], n_devices: int, n: int) -> list[int]:
    """Return the positions that a rule chooses.

    Raises:
        ConfigError: the rule fails, or does not return at most `n` different positions of `n_devices`.
    """
    try:
        given = np.asarray(draw())
    except FAILURES as error:
        raise ConfigError(f"selection {how} failed: {describe_error(error)}") from error
    chosen = given.astype(np.int64) if given.size == 0 or given.dtype.kind in "iu" else np.array([-1])
    fits = chosen.ndim == 1 and len(np.unique(chosen)) == len(chosen) <= n
    if not fits or not ((chosen >= 0) & (chosen < n_devices)).all():
        raise ConfigError(
            f"selection {how} chose {str(given.tolist())[:100]}: it must give at most {n} different positions, whole "
            f"numbers from 0 to {n_devices - 1}"
        )
    return [int(i) for i in chosen]
