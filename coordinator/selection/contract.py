"""Rules of selection: a function on arrays, or a frozen struct if the rule learns; found by entry point or path.

A rule chooses within one cluster; where a method has none, all devices are one. It sees `Candidates`, and has random
numbers of the round and cluster. docs/extending.md has an example of each form.
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
    """The N devices of a cluster that may be chosen, by ascending id; each array has shape (N,), NaN is unknown.

    Attributes:
        ids: names of the devices.
        n_samples: that a device trains on, >= 1.
        seconds: predicted time of a round, with the transfer.
        waited: rounds since it was last asked, >= 1; if it never was, since the first round.
        cpu_ghz: clock of its processor.
        free_ram_gb: free memory.
        link_mbit_s: rate of its link.
        loss_drop: in training, mean over its last five participations.
        gradient_norm: mean over the same.
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
    """A rule that learns: an instance is what it knows of one cluster, and is stored between rounds.

    So every field has a default, and holds numbers, texts, tuples, dictionaries or frozen structs of these.
    """

    CLUSTERS: ClassVar[bool] = False
    """Whether `divide_cohort` says how many of each cluster train; methods without clusters refuse such a rule."""

    def select(self, devices: Candidates, n: int, rng: np.random.Generator) -> ArrayLike:
        """Return the positions of at most `n` >= 1 different devices."""
        raise NotImplementedError

    def observe(self, outcomes: Mapping[str, Participation | None]) -> Self:  # noqa: ARG002 - it learns nothing
        """Return what the rule knows after a round. `outcomes`: by id; None: it failed; missing: it declined."""
        return self

    def divide_cohort(
        self, clusters: Mapping[int, Sequence[str]], n: int, rng: np.random.Generator, last_visit: Mapping[int, int]
    ) -> Mapping[int, int]:
        """Return how many >= 1 of each cluster train, `n` in all; those left out rest. For `CLUSTERS` alone.

        `last_visit`: grows with the last round in which a cluster was chosen from.
        """
        raise NotImplementedError

    def load(self, learned: bytes) -> Self:
        """Load what `encode_after` stored; itself if nothing was, or by another rule or version."""
        try:
            return msgspec.msgpack.decode(learned, type=type(self)) if learned else self
        except msgspec.DecodeError:
            return self

    def encode_after(self, how: str, outcomes: Mapping[str, Participation | None]) -> bytes:
        """Return what the rule knows after the round, as bytes.

        Raises:
            ConfigError: `observe` fails, or gives what cannot be stored.
        """
        try:
            return msgspec.msgpack.encode(self.observe(outcomes), order="deterministic")
        except FAILURES as error:
            raise ConfigError(f"selection {how} cannot observe the round: {describe_error(error)}") from error


def load_rule(how: str) -> Draw | Rule:
    """Load the rule of that name or path (`package.module:name`); one that learns knows nothing yet.

    Raises:
        ConfigError: there is none (the text lists the installed ones), or it is no rule.
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
        ConfigError: it fails, or does not give at most `n` different positions of `n_devices`.
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
