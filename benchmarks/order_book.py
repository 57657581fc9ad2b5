"""What the order book costs: processor time of one step of a round against the number of devices.

No network and no disk: the state machine of the orders alone (`coordinator.fleet.orders`), driven as the MQTT fleet
drives it, which after every event looks whether all is done and when it must wake up. Half of the devices appear again
in the middle of the step, and every second report comes twice. Promised: an event costs O(log n), so a step of 10,000
devices takes less than 2 s. `growth` is the exponent between two neighbours in the table.

Run: python benchmarks/order_book.py [--devices 250 500 1000 2000 5000 10000] [--repeats 5] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import statistics
import time
from pathlib import Path
from typing import Any

from coordinator.fleet.orders import Checked, DeviceAppeared, Event, OrderBook, ReportReceived, Tick
from fedge.messages import Order, Outcome, Report

DEADLINE_S = 600.0


def order(device: str) -> Order:
    return Order(
        id=f"r.1.s.{device}", device_id=device, run="r", round=1, label="s", seed=0, task_fingerprint="t",
        left_s=DEADLINE_S, step="describe_labels", body=b"",
    )  # fmt: skip


def events_of(orders: list[Order]) -> list[Event]:
    """Everything that happens in the step, in its order."""
    events: list[Event] = [Tick()]
    events += [DeviceAppeared(o.device_id) for o in orders[::2]]
    for n, o in enumerate(orders):
        report = Report(order_id=o.id, device_id=o.device_id, seconds=1.0, outcome=Outcome.DECLINED)
        events += [ReportReceived(report)] * (1 + n % 2) + [Checked(o.id)]
    return events


def one(n: int) -> float:
    """Processor time of one step, in seconds."""
    orders = [order(f"d{i}") for i in range(n)]
    events = events_of(orders)
    start = time.process_time()
    book = OrderBook(orders)
    for k, event in enumerate(events):
        book.handle(event, now=k * DEADLINE_S / (len(events) + 1))
        if not book.done:
            book.next_wakeup()
    taken = time.process_time() - start
    assert book.done
    return taken


def table(sizes: list[int], repeats: int) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for n in sizes:
        seconds = statistics.median(one(n) for _ in range(repeats))
        row = {"devices": n, "seconds": round(seconds, 4), "us_per_device": round(1e6 * seconds / n, 1)}
        if rows:
            before = rows[-1]
            ratio = max(seconds, 1e-6) / max(before["seconds"], 1e-6)
            row["growth"] = round(math.log(ratio) / math.log(n / before["devices"]), 2)
        rows.append(row)
        print("  ".join(f"{name} {value}" for name, value in row.items()), flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", type=int, nargs="+", default=[250, 500, 1000, 2000, 5000, 10_000])
    parser.add_argument("--repeats", type=int, default=5, help="the median of so many counts (default 5)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures to FILE")
    args = parser.parse_args()
    figures: dict[str, Any] = {
        "benchmark": "order book",
        "machine": platform.processor() or platform.machine(),
        "processors": len(os.sched_getaffinity(0)),
        "load": round(os.getloadavg()[0], 1),
        "step": table(sorted(set(args.devices)), args.repeats),
    }
    if args.json:
        args.json.write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
