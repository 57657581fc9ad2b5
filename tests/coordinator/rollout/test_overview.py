"""What a page shows of rollouts and may ask of them; with a fleet: tests/integration/test_ui_in_a_browser.py."""

from __future__ import annotations

from pathlib import Path

import pytest
from msgspec.structs import replace

from coordinator.rollout.decision import Plan, Progress
from coordinator.rollout.folder import Folder, Record, Request
from coordinator.rollout.overview import Overview
from export.signing import Repository
from fedge.errors import ConfigError
from fedge.wire.messages import RolloutState
from tests.deploy.bundles import variant

RECORD = Record(plan=Plan(id="r", target="2/manifest.json", release=2, digest="a" * 64), progress=Progress(began=1.0))


@pytest.fixture
def repo(tmp_path: Path) -> Path:
    Repository.make(tmp_path / "repo").add(variant(tmp_path / "bundle", release=2))
    return tmp_path / "repo"


@pytest.fixture
def overview(repo: Path, tmp_path: Path) -> Overview:
    config = tmp_path / "fleet.toml"
    config.write_text('[rollout]\nbroker = "localhost:1"\nfederation = "f"\n')
    return Overview([repo], config)


def test_what_may_be_asked_depends_on_where_it_stands(overview: Overview, repo: Path) -> None:
    def actions(state: RolloutState) -> list[str]:
        Folder(repo).write(replace(RECORD, progress=replace(RECORD.progress, state=state)))
        return list(overview.list_states()[0]["actions"])

    assert overview.list_states() == [
        {"rollout": "repo", "targets": ["2/manifest.json"], "aborted": [], "supervised": False, "actions": ["start"]}
    ]
    assert [actions(state) for state in RolloutState] == [["go-on"], ["go-on"], ["start"], ["start"]]
    with Folder(repo).supervise():
        supervised = [actions(state) for state in RolloutState]
    assert supervised == [["pause", "abort"], ["resume", "abort"], [], ["abort"]]
    assert Overview([repo], None).list_states()[0]["actions"] == []


def test_the_newest_release_that_was_not_aborted_is_offered_first(
    overview: Overview, repo: Path, tmp_path: Path
) -> None:
    for number in (9, 10):
        Repository(repo).add(variant(tmp_path / str(number), release=number))
    assert Repository(repo).list_targets() == ["2/manifest.json", "9/manifest.json", "10/manifest.json"]
    (found,) = overview.list_states()
    assert found["targets"] == ["10/manifest.json", "9/manifest.json", "2/manifest.json"]

    aborted = replace(RECORD.progress, state=RolloutState.ABORTED)
    Folder(repo).write(replace(RECORD, plan=replace(RECORD.plan, target="10/manifest.json"), progress=aborted))
    (found,) = overview.list_states()
    assert (found["aborted"], found["targets"][0], found["targets"][-1]) == (
        ["10/manifest.json"], "9/manifest.json", "10/manifest.json",
    )  # fmt: skip


def test_an_introduction_is_shown_and_steered_like_a_rollout(tmp_path: Path) -> None:
    overview = Overview([], None, tmp_path)
    assert overview.list_states() == []
    with pytest.raises(ConfigError, match="no introduction can be asked to pause"):
        overview.request_action("introduction", "pause")
    Folder(tmp_path).write(RECORD)
    (found,) = overview.list_states()
    assert (found["rollout"], found["supervised"], found["actions"]) == ("introduction", False, [])
    with pytest.raises(ConfigError, match="no coordinator runs"):
        overview.request_action("introduction", "pause")
    with Folder(tmp_path).supervise():
        assert overview.list_states()[0]["actions"] == ["pause", "abort"]
        assert overview.request_action("introduction", "pause") == "No further device begins with its new bundle."
        assert Folder(tmp_path).take_request() is Request.PAUSE
        ended = replace(RECORD.progress, state=RolloutState.ABORTED, reasons=("cam1 refused: latency: x",))
        Folder(tmp_path).write(replace(RECORD, progress=ended))
        with pytest.raises(ConfigError, match=r"it was aborted \(cam1 refused: latency: x\)"):
            overview.request_action("introduction", "pause")


def test_what_is_asked_is_left_for_the_supervisor(overview: Overview, repo: Path) -> None:
    Folder(repo).write(RECORD)
    with Folder(repo).supervise():
        before = overview.get_version()
        assert overview.request_action("repo", "pause") == "No further device begins with the release."
    assert Folder(repo).take_request() is Request.PAUSE
    Folder(repo).write(RECORD)
    assert overview.get_version() != before


def test_what_makes_no_sense_is_refused(overview: Overview, repo: Path) -> None:
    with pytest.raises(ConfigError, match="no repository 'other'"):
        overview.request_action("other", "start")
    for action in ("pause", "go-on", "explode"):
        with pytest.raises(ConfigError, match=f"cannot be asked to {action}"):
            overview.request_action("repo", action)
    with pytest.raises(ConfigError, match="no release '--json'"):
        overview.request_action("repo", "start", "--json")
    with pytest.raises(ConfigError, match="did not begin: stages: could not convert string to float"):
        overview.request_action("repo", "start", "2/manifest.json", stages="1,0.5 --json")
    for text in ("0.5,1\0", "\ud800"):
        with pytest.raises(ConfigError, match="without control characters"):
            overview.request_action("repo", "start", "2/manifest.json", canary=text)
    assert Folder(repo).read() is None


def test_a_supervisor_that_is_not_seen_has_not_begun(
    overview: Overview, repo: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("coordinator.rollout.overview.BEGIN_S", 0.0)
    with pytest.raises(ConfigError, match="the rollout's supervisor did not start within"):
        overview.request_action("repo", "start", "2/manifest.json")
    (process,) = overview._begun
    process.kill()
    process.wait()


def test_each_repository_has_a_name_of_its_own(repo: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="two repositories have one name"):
        Overview([repo, tmp_path / "elsewhere" / "repo"], None)
    with pytest.raises(ConfigError, match="no repository at"):
        Overview([tmp_path], None)
