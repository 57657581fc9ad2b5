"""What a person should look at follows from the summary, and nothing else is shown as well."""

from __future__ import annotations

import contextlib
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest

from coordinator.watch.attention import HABIT_S, REFUSED_S, Kind, describe_attention, list_attention
from coordinator.watch.state import Watch, read_summary
from tests.support.shop import NOW, device, make_shop, set_last_sign

FINE: dict[str, Any] = {
    "at": NOW,
    "coordinator": {"state": "running", "age_s": 1.0, "text": ""},
    "fleet": {"cam1": device(), "cam2": device()},
    "quarantined": {},
    "clocks": {},
    "retired": [],
    "failed": "",
    "second": None,
}


def kinds(**changes: Any) -> list[tuple[str, str]]:
    return [(item.kind, item.device) for item in list_attention(FINE | changes, NOW)]


def of_device(**changes: Any) -> dict[str, Any]:
    return {"fleet": {"cam1": device() | changes}}


def test_nothing_needs_attention_while_all_is_well() -> None:
    assert list_attention(FINE, NOW) == []
    assert kinds(**of_device(serving="serving", since={"presence": NOW - 9e9})) == []


SILENT = {"coordinator": {"state": "silent", "age_s": 60.0, "text": ""}}
NO_BROKER = {"broker": {"connected": False, "since": NOW - 30, "address": "edge:1883"}}
STREAK = {"count": 3, "since": NOW - 50, "reason": "failed: its own code failed"}
REFUSAL = {"name": "task-mismatch", "reason": "task-mismatch: other classes", "since": NOW - 9, "last": NOW - 2}
QUARANTINE = {"until": 9, "evidence": [{"name": "forged", "round": 2, "detail": ""}]}
WAITING = of_device(serving="serving", health={"release": 4}) | {
    "introduction": {"state": "running", "campaign": 3, "silent": {"cam1": NOW - 700}},
    "installed": {"cam1": {"release": 5}},
}
CERTIFICATE = {"device": "", "what": "its certificate", "since": NOW - 5, "until": NOW + 60, "do": "renew it"}
CASES: list[tuple[Kind, str, dict[str, Any], float | None, str]] = [
    (Kind.COORDINATOR_SILENT, "", SILENT, NOW - 60, "gives no sign of life"),
    (Kind.BROKER_UNREACHABLE, "", NO_BROKER, NOW - 30, "edge:1883"),
    (Kind.RUN_FAILED, "", {"failed": "nothing was learned"}, NOW, "nothing was learned"),
    (Kind.SECOND_COORDINATOR, "", {"second": {"where": "box:/copy", "at": NOW - 3}}, NOW - 3, "box:/copy"),
    (Kind.TWO_PROCESSES, "cam1", of_device(twins={"b": NOW - 4, "a": NOW - 90}), NOW - 4, "incarnation a since"),
    (Kind.SERVE_DOWN, "cam1", of_device(serving="down", since={"serving": NOW - 5}), NOW - 5, "is down"),
    (
        Kind.OFFLINE,
        "cam1",
        of_device(presence="offline", since={"presence": NOW - HABIT_S - 1}),
        NOW - HABIT_S - 1,
        "10 min",
    ),
    (Kind.OFFLINE, "cam1", of_device(presence="sleeping", habit_s=60, since={"presence": NOW - 61}), NOW - 61, "1 min"),
    (Kind.DRIFTING, "cam1", of_device(health={"drift": True}, since={"drift": NOW - 7}), NOW - 7, "unlike those"),
    (Kind.DRIFTING, "cam1", of_device(health={"drift": True}, drift_kind="shares"), None, "in other shares"),
    (Kind.BUNDLE_REFUSED, "cam1", of_device(health={"phase": "refused", "reason": "0.9 < 1.0"}), None, "0.9 < 1.0"),
    (
        Kind.WAITING,
        "cam1",
        WAITING,
        NOW - 700,
        "campaign 3 admits it",
    ),
    (Kind.DISK_NEAR_FULL, "cam1", of_device(context={"free_disk_gb": 0.4}), None, "less than 500 MB"),
    (Kind.DISK_NEAR_FULL, "", {"free_disk_gb": 0.9}, None, "less than 1000 MB"),
    (Kind.REFUSED, "cam9", {"refusals": {"cam9": REFUSAL}}, NOW - 9, "other classes"),
    (Kind.FAILED_REPEATEDLY, "cam1", {"failing": {"cam1": STREAK}}, NOW - 50, "its own code failed"),
    (Kind.QUARANTINED, "cam1", {"quarantined": {"cam1": QUARANTINE}}, None, "until round 9: forged"),
    (Kind.WRONG_CLOCK, "cam1", {"clocks": {"cam1": 90}}, None, "ahead of"),
    (Kind.EXPIRING, "cam1", {"expiring": [CERTIFICATE | {"device": "cam1"}]}, NOW - 5, "certificate expires on 2026-"),
    (Kind.EXPIRING, "", {"signatures": [CERTIFICATE | {"until": NOW - 1}]}, NOW - 5, "certificate expired on 2026-"),
    (Kind.EXPIRING, "", {"expiring": [CERTIFICATE | {"since": None, "until": None}]}, None, "its certificate"),
    (Kind.ROLLOUT_ABORTED, "", {"rollout": {"state": "aborted", "release": 4, "since": NOW - 2}}, NOW - 2, "release 4"),
    (
        Kind.INTRODUCTION_ABORTED,
        "",
        {"introduction": {"state": "aborted", "campaign": 3, "reasons": ["cam1: 0.94 < 1.00 on 31 samples"]}},
        None,
        "0.94 < 1.00",
    ),
]


@pytest.mark.parametrize(
    ("kind", "of", "changes", "since", "text"), CASES, ids=lambda x: x if isinstance(x, Kind) else ""
)
def test_each_item_says_what_since_when_and_what_to_do(
    kind: Kind, of: str, changes: dict[str, Any], since: float | None, text: str
) -> None:
    (item,) = list_attention(FINE | changes, NOW)
    assert (item.kind, item.device, item.since) == (kind, of, since)
    assert text in item.text
    assert item.do


def test_every_kind_has_a_case() -> None:
    assert {kind for kind, *_ in CASES} == set(Kind)


@pytest.mark.parametrize(
    "changes",
    [
        {"installed": {"cam1": {"release": 4}}},  # it answers already, or a later release does
        of_device(serving="down", health={"release": 4}),
        of_device(serving="serving", presence="offline", since={"presence": NOW - 5}),
        {"introduction": None},
    ],
)
def test_a_bundle_that_cannot_be_in_service_yet_waits_for_nobody(changes: dict[str, Any]) -> None:
    assert "waiting" not in [kind for kind, _ in kinds(**(WAITING | changes))]


@pytest.mark.parametrize("silence", [SILENT, NO_BROKER])
def test_what_nobody_can_know_is_not_told(silence: dict[str, Any]) -> None:
    gone = of_device(presence="offline", since={"presence": NOW - 9e9}, serving="down", health={"drift": True})
    assert [kind for kind, _ in kinds(**gone, **silence)][1:] == [Kind.DRIFTING]


def test_a_device_that_is_away_serves_nobody_and_is_told_of_once() -> None:
    assert kinds(**of_device(presence="offline", since={"presence": NOW - 9e9}, serving="down")) == [
        ("offline", "cam1")
    ]
    assert kinds(**of_device(presence="offline", since={"presence": NOW - 5}, serving="down")) == []


def test_few_failures_old_refusals_and_retired_devices_need_nobody() -> None:
    assert kinds(failing={"cam1": STREAK | {"count": 2}}) == []
    assert kinds(refusals={"cam9": REFUSAL | {"last": NOW - REFUSED_S}}) == []
    gone = of_device(health={"drift": True}, twins={"a": NOW}, presence="offline", since={"presence": 0.0})
    of_cam1 = {"quarantined": {"cam1": QUARANTINE}, "clocks": {"cam1": 99}, "failing": {"cam1": STREAK}}
    assert kinds(retired=["cam1"], refusals={"cam1": REFUSAL}, **gone, **of_cam1) == []


def test_a_summary_of_an_earlier_version_says_less() -> None:
    assert list_attention({"at": NOW, "coordinator": FINE["coordinator"]}, NOW) == []


def test_errors_come_before_warnings_and_devices_by_name() -> None:
    fleet = {i: device(health={"drift": True}) for i in ("b", "a")}
    fleet["a"] |= {"serving": "down"}
    assert kinds(fleet=fleet) == [("serve-down", "a"), ("drifting", "a"), ("drifting", "b")]


def test_a_text_names_few_devices_and_counts_the_others() -> None:
    fleet = {f"cam{k}": device(health={"drift": True}, since={"drift": time.time() - 3600}) for k in range(9)}
    items = msgspec.to_builtins(list_attention(FINE | {"fleet": fleet}, NOW))
    lines = describe_attention(items)
    assert len(lines) == 7
    assert lines[0] == "warning   cam0: its inputs are unlike those that its bundle learned (since 1 h)"
    assert lines[1].strip().startswith("look at what the device sees")
    assert lines[-1] == "warning   6 more devices: drifting"
    assert len(describe_attention(items[:4])) == 8
    assert describe_attention([]) == []


def test_page_and_commands_read_the_same_items(tmp_path: Path) -> None:
    with contextlib.closing(make_shop(tmp_path)) as store:
        drifting, *rest = [(item["kind"], item["device"]) for item in read_summary(tmp_path)["attention"]]
        assert (drifting, rest) == (("drifting", "cam4"), [])
        assert Watch(tmp_path, store).get_state()["attention"] == read_summary(tmp_path)["attention"]
        set_last_sign(tmp_path, 600)
        first, *_ = read_summary(tmp_path)["attention"]
        assert (first["kind"], first["severity"]) == ("coordinator-silent", "error")
        assert msgspec.json.encode(first)


def test_without_its_broker_a_coordinator_knows_no_presence(tmp_path: Path) -> None:
    make_shop(tmp_path, **NO_BROKER).close()
    summary = read_summary(tmp_path)
    assert {d["presence"] for d in summary["fleet"].values()} == {"unknown"}
    assert summary["coordinator"]["state"] == "running"
