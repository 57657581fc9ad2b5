"""`fedge campaign`, on a home that a coordinator has left."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

import pytest

from coordinator.page.campaign_cli import campaign
from coordinator.store.requests import StandingRequests, read_requests
from coordinator.store.store import Store
from fedge.data.task import TaskSpec
from fedge.errors import ConfigError
from fedge.tasks import write_task

CAMPAIGN = {
    "number": 2, "state": "resting", "began_at": 1000.0, "ended_at": 1100.0, "why": "500 new samples on 12 devices",
    "next_at": None, "history": [
        {"number": 1, "began_at": 0.0, "ended_at": 60.0, "why": "", "rounds": 30, "accuracy": 0.875, "experts": 1,
         "lineage": []},
        {"number": 2, "began_at": 1000.0, "ended_at": 1100.0, "why": "500 new samples on 12 devices", "rounds": 10,
         "accuracy": None, "experts": 2, "lineage": ["expert 1 is new"]},
    ],
}  # fmt: skip


@pytest.fixture
def home(tmp_path: Path) -> Path:
    Store(tmp_path / "shop").close()
    summary: dict[str, Any] = {
        "at": 0.0,
        "ended": True,
        "campaign": CAMPAIGN,
        "devices": {},
        "fleet": {},
        "federation": "f",
    }
    summary |= {name: {} for name in ("retired", "problems", "quarantined", "clocks", "refused", "installed")}
    (tmp_path / "shop" / "summary.json").write_text(json.dumps(summary))
    return tmp_path / "shop"


def test_a_campaign_is_asked_for(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert campaign.main(["run", "--home", str(home)], standalone_mode=False) == 0
    assert capsys.readouterr().out == "A campaign begins as soon as none is running.\n"
    with contextlib.closing(Store(home)) as store:
        assert read_requests(store).campaign == 0


def test_classes_are_to_join_with_the_next_campaign(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    task = TaskSpec(name="pets", classes=("cat", "dog"), input_shape=(2,), model="mlp")
    write_task(task, home / "task.json")
    for names in (["bird"], ["fish", "newt"]):
        words = [word for name in names for word in ("--add-class", name)]
        assert campaign.main(["run", "--home", str(home), *words], standalone_mode=False) == 0
    assert capsys.readouterr().out.splitlines()[1].endswith("With it fish, newt join the classes.")
    with contextlib.closing(Store(home)) as store:
        assert read_requests(store) == StandingRequests(campaign=0, classes=("bird", "fish", "newt"))
    with pytest.raises(ConfigError, match="dog is a class already"):
        campaign.main(["run", "--home", str(home), "--add-class", "dog"], standalone_mode=False)


def test_the_campaigns_are_listed_with_their_reasons(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert campaign.main(["status", "--home", str(home)], standalone_mode=False) == 0
    first, head, one, two = capsys.readouterr().out.splitlines()
    assert first.startswith("campaign 2 ended ")
    assert first.endswith(": 500 new samples on 12 devices")
    assert head.split() == ["campaign", "began", "took", "rounds", "accuracy", "experts", "why"]
    assert one.split()[-5:] == ["1", "min", "30", "0.875", "1"]
    assert two.endswith("2 min  10      -         2        500 new samples on 12 devices; expert 1 is new")
    assert campaign.main(["status", "--home", str(home), "--json"], standalone_mode=False) == 0
    assert json.loads(capsys.readouterr().out) == CAMPAIGN
