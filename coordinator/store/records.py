"""Records of devices and orders that the store, fleets and pages share."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import msgspec
from msgspec import Struct

from fedge.steps.contract import Action, Declined, Refusal, Unsupported
from fedge.steps.sgd import RECIPE, iterate_recipes
from fedge.wire.messages import Context, DriftKind, Order, Report, Why


@dataclass(frozen=True, slots=True)
class Device:
    """A device available in this round. `n_samples`: its non-sensitive samples, |D_L|.

    `incarnation`: a text that changes with each start of the agent, and with the bundle that drifts, if one does. A new
    value means that the device may have changed; a reconnect does not change it. `trains`: False for an inference-only
    device. `drift`: whether its runtime reports that inputs have left the bundle's reference. `steps`: versions of
    known steps, by name; None if all are known. `release`: the highest release of a bundle that the device has had.
    `withholds`: kinds (`fedge.steps.contract.Reveals`) that its owner does not let out. `via`: the device's relay.
    """

    id: str
    n_samples: int
    context: Context | None = None
    incarnation: str = ""
    trains: bool = True
    drift: bool = False
    steps: Mapping[str, int] | None = None
    release: int = 0
    withholds: tuple[str, ...] = ()
    via: str = ""

    def knows(self, action: Action) -> bool:
        """Return whether the device knows this step and its owner permits it."""
        return isinstance(self.prepare_action(action), Action)

    def prepare_action(self, action: Action) -> Action | Refusal:
        """Return the action without what the owner withholds, or a refusal, with which nothing is sent."""
        if self.steps is not None and self.steps.get(action.STEP) != action.VERSION:
            text = (
                f"it does not know step {action.STEP} version {action.VERSION}: update fedge there, or install the step"
            )
            return Unsupported(reason=text)
        if self.steps is not None and self.steps.get(RECIPE, 0) < action.recipe_version:
            parts = ", ".join(sorted({name for sgd in iterate_recipes(action) for name in sgd.parts}))
            return Unsupported(reason=f"its fedge does not know {parts or 'noise'} of the recipe: update fedge there")
        spared = action.without(self.withholds)
        if spared is None:
            kinds = ", ".join(sorted({*self.withholds} & {*action.reveals().values()}))
            return Declined(
                why=Why.NOT_ALLOWED, reason=f"its owner withholds {kinds}, which the step {action.STEP} reveals"
            )
        return spared


@dataclass(frozen=True, slots=True)
class DeviceFacts:
    """What a device last said of its samples and its bundle.

    data_version: rises when its non-sensitive samples change. n_arrived: its non-sensitive labelled samples that ever
    came. drift: whether its bundle drifts, other than by other class shares. drift_kind: in which way, if its runtime
    says so. held: whether that alarm is of an earlier bundle, and the present one has not been judged yet. at_work:
    share of right answers among its latest ones that were labelled later, n_answers in all; None if it does not tell.
    """

    id: str
    online: bool = True
    data_version: int = 0
    n_arrived: int = 0
    drift: bool = False
    drift_kind: DriftKind | None = None
    held: bool = False
    at_work: float | None = None
    n_answers: int = 0


class OrderStatus(StrEnum):
    """The status of an order in the store; it changes from OPEN once."""

    OPEN = "open"
    ACCEPTED = "accepted"
    REJECTED = "rejected"
    EXPIRED = "expired"


class Offence(Struct, frozen=True, kw_only=True):
    """Evidence against a device. `name`: the refusal's name, or `long-update`; `detail`: the measurement."""

    device_id: str
    round: int
    name: str
    detail: str


class Entry(Struct, frozen=True, kw_only=True):
    """An order and its outcome."""

    order: Order
    status: OrderStatus
    reason: str = ""
    report: Report | None = None
    arrival: int = 0  # when it was closed, among all orders: 1, 2, ...; 0: it is open


class Event(Struct, frozen=True, kw_only=True):
    """An event, for people. number: 1, 2, ...; 0 if not stored yet. device: the device's id, or empty."""

    number: int = 0
    at: float  # seconds since the epoch
    round: int
    name: str
    device: str = ""
    fields: dict[str, Any] = {}


def make_entry(row: tuple[bytes, str, str, bytes | None, int | None]) -> Entry:
    """Make an entry of an order's row in the table: body, status, reason, report, arrival."""
    body, status, reason, report, arrival = row
    return Entry(
        order=msgspec.msgpack.decode(body, type=Order),
        status=OrderStatus(status),
        reason=reason,
        report=None if report is None else msgspec.msgpack.decode(report, type=Report),
        arrival=arrival or 0,
    )
