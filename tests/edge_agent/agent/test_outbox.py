"""The agent's durable folder: round trips, damage, and a real death at every single file operation."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

from edge_agent.agent.outbox import Outbox
from edge_agent.agent.session import MAX_ACKED
from fedge.errors import ConfigError, StoreError
from fedge.system.files import compute_digest
from fedge.wire.messages import Ack, BlobRef, Order, Outcome, Report, Why, encode_message

DEVICE = "pi-1"


def order(order_id: str = "a", left_s: float = 100.0) -> Order:
    return Order(
        id=order_id,
        device_id=DEVICE,
        run="r",
        round=1,
        label="train",
        seed=0,
        task_fingerprint="f",
        left_s=left_s,
        step="train",
        body=b"what is to be done",
    )


def report(order_id: str = "a", blob: bytes | None = None) -> Report:
    if blob is None:
        return Report(order_id=order_id, device_id=DEVICE, seconds=1.0, outcome=Outcome.DECLINED, why=Why.HOT)
    update = BlobRef(digest=compute_digest(blob), size_bytes=len(blob))
    return Report(order_id=order_id, device_id=DEVICE, seconds=1.0, outcome=Outcome.DONE, body=b"x", blobs=(update,))


def ack(order_id: str = "a", accepted: bool = True, reason: str = "") -> Ack:
    return Ack(order_id=order_id, device_id=DEVICE, accepted=accepted, reason=reason)


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[float]]:
    """A clock that stands still unless a test sets it."""
    now = [1000.0]
    monkeypatch.setattr("edge_agent.agent.outbox.get_uptime_s", lambda: now[0])
    return now


def files(folder: Path) -> set[str]:
    return {str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file()} - {"lock", "version"}


def test_everything_written_is_there_after_a_restart(tmp_path: Path) -> None:
    with Outbox(tmp_path) as outbox:
        outbox.save_order(order("a"))
        outbox.save_order(order("b", left_s=7))
        outbox.put_blob(compute_digest(b"update"), b"update")
        outbox.save_report(report("a", b"update"))
    with Outbox(tmp_path) as outbox:
        assert outbox.load_orders() == [order("a"), order("b", left_s=7)]
        assert outbox.load_reports() == [report("a", b"update")]
        path = outbox.find_blob(compute_digest(b"update"))
        assert path is not None
        assert path.read_bytes() == b"update"


def test_an_acknowledged_order_leaves_only_its_verdict(tmp_path: Path) -> None:
    with Outbox(tmp_path) as outbox:
        outbox.save_order(order("a"))
        outbox.put_blob(compute_digest(b"update"), b"update")
        outbox.save_report(report("a", b"update"))
        outbox.acknowledge(ack("a", accepted=False, reason="layout: wrong shape"), remember=MAX_ACKED)
        assert files(tmp_path) == {"acked"}
        assert outbox.find_blob(compute_digest(b"update")) is None
    with Outbox(tmp_path) as outbox:
        assert [(v.order_id, v.accepted, v.reason) for v in outbox.verdicts] == [("a", False, "layout: wrong shape")]


def test_only_the_last_verdicts_are_remembered(tmp_path: Path) -> None:
    with Outbox(tmp_path) as outbox:
        for n in range(5):
            outbox.acknowledge(ack(f"o{n}"), remember=3)
        assert [v.order_id for v in outbox.verdicts] == ["o2", "o3", "o4"]


def test_a_new_deadline_replaces_the_old_one(tmp_path: Path) -> None:
    with Outbox(tmp_path) as outbox:
        outbox.save_order(order("a", left_s=1))
        outbox.save_order(order("a", left_s=2))
        assert outbox.load_orders() == [order("a", left_s=2)]


def test_what_is_left_is_counted_while_no_agent_runs(tmp_path: Path, clock: list[float]) -> None:
    with Outbox(tmp_path) as outbox:
        outbox.save_order(order("a", left_s=100))
    for now, left in ((1040.0, 60), (1040.0, 60), (1099.0, 1), (1200.0, 0), (9e9, 0)):
        clock[0] = now
        with Outbox(tmp_path) as outbox:
            assert outbox.load_orders() == [order("a", left_s=left)]


@pytest.mark.parametrize("boots", [("first", "second", "third"), ("", "", "")])
def test_while_the_machine_was_off_half_of_it_passed(
    tmp_path: Path, clock: list[float], monkeypatch: pytest.MonkeyPatch, boots: tuple[str, str, str]
) -> None:
    """Nobody knows how long it was off; a device that is switched on again and again must not keep it for ever."""
    for name, left in zip(boots, (100, 50, 25), strict=True):
        monkeypatch.setattr("edge_agent.agent.outbox.read_boot_id", lambda name=name: name)
        clock[0] = 3.0  # the clock of each boot begins anew
        with Outbox(tmp_path) as outbox:
            if left == 100:
                outbox.save_order(order("a", left_s=100))
            assert [round(o.left_s) for o in outbox.load_orders()] == [left if name else left // 2]


def test_a_blob_lives_as_long_as_a_report_names_it(tmp_path: Path) -> None:
    with Outbox(tmp_path) as outbox:
        for name in ("a", "b"):
            outbox.save_order(order(name))
            outbox.put_blob(compute_digest(b"same update"), b"same update")
            outbox.save_report(report(name, b"same update"))
        outbox.remove_order("a")
        assert outbox.find_blob(compute_digest(b"same update")) is not None
        outbox.remove_order("b")
        assert outbox.find_blob(compute_digest(b"same update")) is None


def test_a_blob_whose_report_is_still_being_written_is_not_swept_away(tmp_path: Path) -> None:
    with Outbox(tmp_path) as outbox:
        outbox.save_order(order("a"))
        outbox.save_order(order("b"))
        outbox.put_blob(compute_digest(b"update"), b"update")
        outbox.save_report(report("a", b"update"))
        outbox.put_blob(compute_digest(b"update"), b"update")  # of order b, equal bytes, not yet reported
        outbox.acknowledge(ack("a"), remember=MAX_ACKED)
        outbox.save_report(report("b", b"update"))
    with Outbox(tmp_path) as outbox:
        assert outbox.load_reports() == [report("b", b"update")]


def test_one_agent_at_a_time(tmp_path: Path) -> None:
    with Outbox(tmp_path), pytest.raises(ConfigError, match="another agent uses"):
        Outbox(tmp_path)
    Outbox(tmp_path).close()


@pytest.mark.parametrize("damage", [b"", b"\xff" * 40, encode_message(order("other")), encode_message(ack("a"))])
def test_a_damaged_order_is_dropped_so_that_the_coordinator_repeats_it(tmp_path: Path, damage: bytes) -> None:
    with Outbox(tmp_path) as outbox:
        outbox.save_order(order("a"))
        outbox.save_report(report("a"))
        outbox.save_order(order("b"))
    (tmp_path / "orders" / "a").write_bytes(damage)
    with Outbox(tmp_path) as outbox:
        assert outbox.load_orders() == [order("b")]
        assert outbox.load_reports() == []


@pytest.mark.parametrize("lost", ["report", "blob"])
def test_a_report_that_lost_a_part_is_made_again(tmp_path: Path, lost: str) -> None:
    with Outbox(tmp_path) as outbox:
        outbox.save_order(order("a"))
        digest = compute_digest(b"update")
        outbox.put_blob(digest, b"update")
        outbox.save_report(report("a", b"update"))
    if lost == "report":
        (tmp_path / "reports" / "a").write_bytes(b"\x00")
    else:
        (tmp_path / "blobs" / digest).unlink()
    with Outbox(tmp_path) as outbox:
        assert outbox.load_orders() == [order("a")]
        assert outbox.load_reports() == []
        assert files(tmp_path) == {"orders/a"}


@pytest.mark.parametrize("damaged", [b'[{"order_id": "a", "acc', b'[{"order_id": "\xe1", "accepted": true}]'])
def test_damaged_verdicts_are_forgotten(tmp_path: Path, damaged: bytes) -> None:
    (tmp_path / "acked").write_bytes(damaged)
    with Outbox(tmp_path) as outbox:
        assert outbox.verdicts == []


def test_what_is_damaged_beside_the_orders_keeps_no_agent_from_its_work(tmp_path: Path) -> None:
    for damage in ("bytes", "folder"):
        home = tmp_path / damage
        with Outbox(home) as outbox:
            outbox.save_order(order("a"))
            outbox.acknowledge(ack("b"), remember=MAX_ACKED)
            outbox.save_order(order("c"))
        for file in ("version", "acked", "orders/c"):
            (home / file).unlink()
            if damage == "bytes":
                (home / file).write_bytes(b"\xff")
            else:
                (home / file / "lost+found").mkdir(parents=True)
        with Outbox(home) as outbox:
            assert outbox.load_orders() == [order("a")]
            assert outbox.verdicts == []
            outbox.acknowledge(ack("a"), remember=MAX_ACKED)
        assert (home / "version").read_text() == "2"
        assert (home / "version.damaged").exists()
    (home / "version").write_text("3")
    with pytest.raises(StoreError, match="update fedge"):
        Outbox(home)


def test_a_folder_that_cannot_be_used_is_a_store_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(StoreError):
        Outbox(tmp_path / "file")
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "orders").write_bytes(b"")
    with pytest.raises(StoreError):
        Outbox(tmp_path / "home")


DIES = """
    import json, os, sys
    from pathlib import Path
    import edge_agent.agent.outbox
    from edge_agent.agent.outbox import Outbox
    from fedge.system.files import compute_digest
    from tests.edge_agent.agent.test_outbox import ack, order, report

    edge_agent.agent.outbox.get_uptime_s = lambda: 1000.0
    STEPS = [
        ("persist a", lambda o: o.save_order(order("a"))),
        ("put a", lambda o: o.put_blob(compute_digest(b"update"), b"update")),
        ("keep a", lambda o: o.save_report(report("a", b"update"))),
        ("persist b", lambda o: o.save_order(order("b"))),
        ("move b", lambda o: o.save_order(order("b", left_s=200))),
        ("ack a", lambda o: o.acknowledge(ack("a"), remember=8)),
        ("keep b", lambda o: o.save_report(report("b"))),
        ("discard b", lambda o: o.remove_order("b")),
    ]
    WRITES = {"open", "os.rename", "os.remove", "os.mkdir"}

    def die_at(n, folder, pipe):
        left = n

        def hook(event, args):
            nonlocal left
            if event in WRITES:
                left -= 1
                if left < 0:
                    os._exit(9)

        with Outbox(folder) as outbox:
            sys.addaudithook(hook)
            for name, step in STEPS:
                step(outbox)
                os.write(pipe, name.encode() + b";")
        os._exit(0)

    deaths = []
    for n in range(10_000):
        folder = Path(sys.argv[1]) / str(n)
        read, write = os.pipe()
        child = os.fork()
        if not child:
            die_at(n, folder, write)
        os.close(write)
        _, status = os.waitpid(child, 0)
        done = [name for name in os.read(read, 4096).decode().split(";") if name]
        os.close(read)
        with Outbox(folder) as outbox:
            left = {
                "done": done,
                "orders": {o.id: round(o.left_s) for o in outbox.load_orders()},
                "reports": [r.order_id for r in outbox.load_reports()],
                "acked": [v.order_id for v in outbox.verdicts],
                "files": sorted(str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file()),
            }
        deaths.append(left)
        if os.waitstatus_to_exitcode(status) == 0:
            break
    print(json.dumps(deaths))
"""


def test_killed_at_any_file_operation_it_holds_either_the_old_or_the_new_state(tmp_path: Path) -> None:
    """A child process dies (without clean-up) at its n-th file operation, for every n; then the folder is opened."""
    program = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(DIES), str(tmp_path)],
        capture_output=True,
        text=True,
        check=True,
        cwd=Path(__file__).parents[3],
    )
    deaths = json.loads(program.stdout)
    blob = f"blobs/{compute_digest(b'update')}"
    a, both = {"a": 100.0}, {"a": 100.0, "b": 100.0}
    moved = {"a": 100.0, "b": 200.0}
    # (steps known to be done) -> the only two states allowed: before and after the step that was cut.
    states = [
        ({}, [], []),
        (a, [], []),
        (a, [], []),
        (a, ["a"], []),
        (both, ["a"], []),
        (moved, ["a"], []),
        ({"b": 200.0}, [], ["a"]),
        ({"b": 200.0}, ["b"], ["a"]),
        ({}, [], ["a"]),
    ]
    assert len(deaths) > 30, "every write, rename and deletion of eight steps"
    assert len(deaths[-1]["done"]) == len(states) - 1, "the last child was not killed"
    for death in deaths:
        n = len(death["done"])
        state = (death["orders"], death["reports"], death["acked"])
        allowed = states[n : n + 2]
        if n == 7:  # a discarded order may be left without its report: it is past its deadline and expires
            allowed = [*allowed, ({"b": 200.0}, [], ["a"])]
        assert state in allowed, death
        expected = {"lock", "version"} | {f"orders/{o}" for o in state[0]} | {f"reports/{r}" for r in state[1]}
        expected |= {blob} if "a" in state[1] else set()
        expected |= {"acked"} if state[2] else set()
        assert set(death["files"]) == expected, "nothing stray is left"
