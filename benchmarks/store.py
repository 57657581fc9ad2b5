"""The coordinator's store: how many reports a second it takes, and how large it is after many rounds.

    reports    reports that are accepted, with so many under way at a time; one under way is a commit for each, as the
               store did before it committed on a thread. `fsync`: what the disk itself allows
    size       MB of HOME/store.db after rounds of so many devices, with the rule (`--keep-rounds`) and without; here
               nothing is forced to the disk

Run: python benchmarks/store.py [--reports 2000] [--store postgresql://USER@HOST/DATABASE] [--json FILE]
     python benchmarks/store.py --rounds 50 500 5000 --devices 100
"""

from __future__ import annotations

import contextlib
import os
import tempfile
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from script import finish, parser_of, show

from coordinator.store.records import Device
from coordinator.store.store import RECALLED_ROUNDS, Store
from fedge.wire.messages import Context, Order, Outcome, Report

BODY = os.urandom(300)  # of an order or a report
STATE = os.urandom(20_000)


def order(device: str, number: int) -> Order:
    return Order(
        id=f"run.{number}.train.{device}",
        device_id=device,
        run="run",
        round=number,
        label="train",
        seed=number,
        task_fingerprint="t" * 16,
        left_s=60.0,
        step="train",
        body=BODY,
    )


def report(device: str, number: int) -> Report:
    order_id = f"run.{number}.train.{device}"
    return Report(order_id=order_id, device_id=device, seconds=1.0, outcome=Outcome.DONE, body=BODY)


@contextlib.contextmanager
def stores(url: str | None) -> Iterator[Store]:
    with (
        tempfile.TemporaryDirectory() as folder,
        contextlib.closing(Store(Path(folder), url, federation=f"b{time.time_ns()}")) as store,
    ):
        yield store


def reports_per_s(url: str | None, n: int, under_way: int) -> float:
    """How many reports a second are accepted when so many wait at a time."""
    names = [f"d{i}" for i in range(n)]
    with stores(url) as store:
        store.start_round(1, [], 0.0)
        store.write_orders(order(name, 1) for name in names)
        waiting: deque[Any] = deque()
        began = time.perf_counter()
        for name in names:
            waiting.append(store.accept(report(name, 1), 1.0))
            if len(waiting) >= under_way:
                waiting.popleft().result()
        for future in waiting:
            future.result()
        return n / (time.perf_counter() - began)


def fsyncs_per_s(n: int) -> float:
    """Forcing one page to the disk, again and again."""
    with tempfile.TemporaryFile() as file:
        began = time.perf_counter()
        for _ in range(n):
            file.seek(0)
            file.write(os.urandom(4096))
            file.flush()
            os.fsync(file.fileno())
        return n / (time.perf_counter() - began)


def sizes(rounds: list[int], n_devices: int, keep: int) -> dict[int, float]:
    """MB after so many rounds."""
    found = {}
    there = [Device(f"d{i:04}", 60, Context(device_id=f"d{i:04}", load=0.5)) for i in range(n_devices)]
    with stores(None) as store:
        store._writer.db.execute("PRAGMA synchronous = OFF")  # noqa: SLF001
        for number in range(1, max(rounds) + 1):
            store.start_round(number, there, 0.0)
            store.write_orders(order(device.id, number) for device in there)
            for future in [store.accept(report(device.id, number), 1.0) for device in there]:
                future.result()
            store.commit_round(number, STATE, 2.0, {"bytes_up": 1}, keep=keep)
            if number in rounds:
                found[number] = sum(path.stat().st_size for path in store.home.glob("store.db*")) / 1e6
    return found


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--reports", type=int, default=2000, help="(default 2000)")
    parser.add_argument("--store", help="postgresql://...; without it SQLite")
    parser.add_argument("--rounds", type=int, nargs="*", default=[], help="measure the size after so many rounds")
    parser.add_argument("--devices", type=int, default=100, help="in each of these rounds (default 100)")
    args = parser.parse_args()
    rows: dict[str, Any] = {}
    if args.rounds:
        for name, keep in (("all rounds kept", max(args.rounds)), ("the last 8", RECALLED_ROUNDS)):
            rows[f"MB, {name}"] = sizes(args.rounds, args.devices, keep)
    else:
        rows = {f"reports/s, {n} under way": round(reports_per_s(args.store, args.reports, n)) for n in (1, 10, 100)}
        rows["fsyncs/s"] = round(fsyncs_per_s(min(args.reports, 500)))
    show({"": name, "figure": figure} for name, figure in rows.items())
    finish(args, rows)


if __name__ == "__main__":
    main()
