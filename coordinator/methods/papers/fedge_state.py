"""The state of fedge between two rounds, and its parts; docs/methods/fedge.md."""

from __future__ import annotations

from typing import Literal

from msgspec import UNSET, Struct, UnsetType

from coordinator.fleet.fleet import AcceptedUpdate
from coordinator.methods.parts.grouping import Description
from coordinator.methods.parts.server_optimizer import ServerModel
from coordinator.methods.parts.unresponsive import AskingState
from coordinator.selection import ccmab
from fedge.data.problems.calibration import Calibration
from fedge.steps.mixture.fit_weights import Products
from fedge.wire.messages import BlobRef, Role


class LastUpdate(Struct, frozen=True, kw_only=True):
    """The update Delta_i of a device's last participation before the trial, and n_i."""

    update: BlobRef
    n_samples: int


class PrimaryExpert(Struct, frozen=True, kw_only=True):
    """The expert that a device starts from, and the round in which the device chose it."""

    cluster: int
    round: int


class TrialOutcome(Struct, frozen=True, kw_only=True):
    """The trial's outcome (section 5). `places`: of the devices `ids` in a plane (`project_to_plane`), for plots."""

    ids: tuple[str, ...]
    clusters: tuple[tuple[str, ...], ...]
    tau: float
    separability: float
    statistic: float | None
    deltas: dict[str, float]
    split: bool
    places: tuple[tuple[float, float], ...] = ()


class PastSplit(Struct, frozen=True, kw_only=True):
    """The split of the last campaign: its trial, its experts as they ended, and w as it was then, `shared`.

    `changed`: the devices whose samples have changed since.
    """

    trial: TrialOutcome
    experts: tuple[ServerModel, ...]
    shared: BlobRef
    changed: tuple[str, ...] = ()


class Fate(Struct, frozen=True, kw_only=True):
    """What became of experts in a campaign. `expert`: its number now; None if there is none.

    `sources`: the numbers, in the campaign before, of the experts that it comes from.
    """

    campaign: int
    kind: Literal["kept", "merged", "split", "born", "died"]
    expert: int | None = None
    sources: tuple[int, ...] = ()


class PooledSettings(Struct, frozen=True, kw_only=True):
    """The settings that are pooled over the devices at the end (sections 7 to 9)."""

    calibration: dict[Role, Calibration]
    weights: dict[Role, float]
    beta: float
    local: bool
    n_validation: int
    products: Products | UnsetType = UNSET


class FedgeState(AskingState, frozen=True, kw_only=True):
    """The state of fedge between two rounds. `past`: the last campaign's split; `lineage`: of all experts so far."""

    initial_model: BlobRef
    shared: ServerModel  # w, v
    extractor: BlobRef | None = None
    profiles: dict[str, Description] = {}
    groups: tuple[tuple[str, ...], ...] = ()
    bandits: tuple[ccmab.State, ...] = ()
    n_moved: int = 0  # devices that joined or changed since the groups were made
    directions: BlobRef | None = None  # per device the sum of its unit updates
    last: dict[str, LastUpdate] = {}
    trial: TrialOutcome | None = None
    experts: tuple[ServerModel, ...] = ()
    primary: dict[str, PrimaryExpert] = {}
    past: PastSplit | None = None
    lineage: tuple[Fate, ...] = ()
    pool: PooledSettings | None = None
    seen: tuple[AcceptedUpdate, ...] = ()  # the latest updates of asynchronous rounds
