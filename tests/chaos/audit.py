"""Reads what a federation has left, and what was said in it: was everything that counts counted, once?"""

from __future__ import annotations

import contextlib
import sqlite3
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from coordinator.store.records import Device
from edge_agent.agent.outbox import Outbox
from fedge.steps.contract import REFUSALS, Refusal
from fedge.wire.messages import Ack, Order, Outcome, Report, Why, decode_message, encode_message
from tests.support.federation import Federation

Rows = dict[str, tuple[str, bytes | None]]
"""Status and report by order id."""
Refused = dict[tuple[int, str, str], Refusal | None]
"""What came of orders without a result, by round, label and device."""


def has_store(federation: Federation) -> bool:
    """Whether the coordinator has made its store."""
    made = (federation.home / "store.db").exists()
    return made and bool(federation.rows("SELECT 1 FROM sqlite_master WHERE name = 'orders'"))


def n_closed(federation: Federation) -> int:
    """How many orders are done with; 0 where nobody can tell, such as on a full disk."""
    with contextlib.suppress(sqlite3.OperationalError):
        if has_store(federation):
            return int(federation.rows("SELECT count(*) FROM orders WHERE status != 'open'")[0][0])
    return 0


def rows(federation: Federation) -> Rows:
    """All orders in the coordinator's store; none before it is made."""
    if not has_store(federation):
        return {}
    found = federation.rows("SELECT id, status, report FROM orders")
    return {order_id: (status, report) for order_id, status, report in found}


def lost(before: Rows, now: Rows) -> list[str]:
    """What was closed and is not any more, or in another way."""
    return [
        f"{order_id} was {entry[0]} and is {now.get(order_id, ('gone',))[0]}"
        for order_id, entry in before.items()
        if entry[0] != "open" and now.get(order_id) != entry
    ]


def books(federation: Federation, said: Mapping[str, set[bytes]]) -> list[str]:
    """Everything that contradicts: the store, the devices' folders, and the messages that were seen."""
    found, wrong = rows(federation), []
    twice = federation.rows("SELECT round, label, device_id FROM orders GROUP BY 1, 2, 3 HAVING count(*) > 1")
    wrong += [f"two orders for {one}" for one in twice]
    wrong += [f"{order_id} is still open" for order_id, (status, _) in found.items() if status == "open"]
    wrong += _spoken(found, said)
    for device in federation.devices:
        wrong += _believed(found, federation.folder / device)
    return wrong


def history(federation: Federation) -> dict[str, Any]:
    """Who was there in each round, and what came of the orders that have no result: what a replay needs."""
    snapshots = federation.rows("SELECT round, devices FROM rounds")
    there = {
        number: frozenset(device.id for device in msgspec.msgpack.decode(devices, type=tuple[Device, ...]))
        for number, devices in snapshots
    }
    refused: Refused = {}
    for number, label, device, status, body in federation.rows(
        "SELECT round, label, device_id, status, report FROM orders"
    ):
        report = None if body is None else msgspec.msgpack.decode(body, type=Report)
        if status != "accepted" or report is None:
            refused[number, label, device] = None
        elif report.outcome is not Outcome.DONE:
            refused[number, label, device] = REFUSALS[report.outcome](why=report.why or Why.OTHER)
    return {"there": there, "refused": refused}


def _spoken(found: Rows, said: Mapping[str, set[bytes]]) -> list[str]:
    """Orders, reports and acknowledgements as they were seen at the broker."""
    wrong = []
    orders = {encode_message(_timeless(decode_message(data, Order))) for data in said["orders"]}
    if len(orders) > len({decode_message(order, Order).id for order in orders}):
        wrong.append("an order was sent in two versions")
    reports: dict[str, set[Report]] = defaultdict(set)
    for data in said["reports"]:
        report = decode_message(data, Report)
        reports[report.order_id].add(msgspec.structs.replace(report, again=0))  # each copy counts the earlier ones
    for order_id, versions in reports.items():
        status, body = found.get(order_id, ("unknown", None))
        if len(versions) > 1:
            wrong.append(f"{order_id} was reported in {len(versions)} versions")
        if status == "accepted" and body is not None and msgspec.msgpack.decode(body, type=Report) not in versions:
            wrong.append(f"{order_id} was accepted with a report that its device did not send")
    wrong += [f"{report} of an order that nobody wrote" for report in reports if report not in found]
    for data in said["acks"]:
        ack = decode_message(data, Ack)
        if ack.accepted and found.get(ack.order_id, ("unknown",))[0] != "accepted":
            wrong.append(f"{ack.order_id} was acknowledged and is {found.get(ack.order_id, ('unknown',))[0]}")
    return wrong


def _believed(found: Rows, home: Path) -> list[str]:
    """What a device takes for accepted, and what it has left to do."""
    with Outbox(home / "outbox") as outbox:
        return [
            f"{home.name} was told that {verdict.order_id} is accepted"
            for verdict in outbox.verdicts
            if verdict.accepted and found.get(verdict.order_id, ("unknown",))[0] != "accepted"
        ]


def _timeless(order: Order) -> Order:
    """An order without the time that was left when it was sent, and without the ways to its models at that time."""
    return msgspec.structs.replace(order, left_s=1.0, differences={})
