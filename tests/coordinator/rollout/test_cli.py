"""`fedge rollout` without a broker: plans, requests, status. With one: tests/integration/test_rollout.py."""

import json

import msgspec
import pytest
from click.testing import CliRunner

from coordinator.rollout.cli import RolloutSettings, _make_observer, make_plan, rollout
from coordinator.rollout.decision import Plan, Progress
from coordinator.rollout.folder import DeviceLine, Folder, Record, Request
from coordinator.rollout.service import Release
from export.signing import Repository
from fedge.errors import ConfigError
from fedge.wire.messages import Phase, Quality, RolloutState
from tests.deploy.bundles import variant
from tests.support.clock import Clock


def run(*arguments):
    result = CliRunner().invoke(rollout, [*map(str, arguments)])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.stdout


@pytest.fixture
def release(tmp_path):
    Repository.make(tmp_path / "repo").add(variant(tmp_path / "bundle", release=2))
    return Release(Repository(tmp_path / "repo"), tmp_path / "repo", "2/manifest.json")


def plan(release, **settings):
    return make_plan(RolloutSettings(broker="b:1", federation="f", **settings), "2/manifest.json", release)


def test_stages_and_canaries(release):
    assert plan(release).stages == (0.1, 0.5, 1.0)
    named = plan(release, stages="0.2, 1", canary="cam1, cam2")
    assert (named.stages, named.canaries) == ((0.0, 0.2, 1.0), ("cam1", "cam2"))


@pytest.mark.parametrize("stages", ["", "x", "0.5", "0,1", "0.5,0.5,1", "1,0.5", "0.5,2", "nan,1"])
def test_stages_that_are_none(release, stages):
    with pytest.raises(ConfigError, match="stages"):
        plan(release, stages=stages)


def test_a_canary_that_cannot_be_a_device(release):
    with pytest.raises(ConfigError, match="canary"):
        plan(release, canary="no/device")


@pytest.fixture
def repo(tmp_path):
    record = Record(
        plan=Plan(id="2-ab", target="2/manifest.json", release=2, digest="a" * 64),
        progress=Progress(began=0.0, state=RolloutState.ABORTED, share=0.1, reasons=("cam1 refused: accuracy: x",)),
        devices={
            "cam1": DeviceLine(
                phase=Phase.REFUSED,
                release=1,
                reason="accuracy: x",
                before=Quality(n=20, accuracy=0.9),
                now=Quality(n=20, accuracy=0.5),
                takes_part=True,
            ),
            "cam2": DeviceLine(phase=Phase.SERVING, release=1, drift=True),
        },
    )
    Folder(tmp_path).write(record)
    return tmp_path


def test_status_for_people(repo):
    code, out = run("status", repo)
    assert code == 0
    assert "aborted (nobody supervises it now)" in out
    assert "stage    1 of 3: 1 of 2 devices take part" in out
    assert "reason   cam1 refused: accuracy: x" in out
    assert "* cam1: refused, release 1, score 0.900 -> 0.500 (accuracy: x)" in out
    assert "  cam2: serving, release 1, drift" in out


def test_what_a_device_writes_commands_no_terminal(repo, capsys):
    folder = Folder(repo)
    record = folder.read()
    evil = "digest: \x1b[2J\x9b1A\nstate    done"
    hostile = {name: msgspec.structs.replace(line, reason=evil) for name, line in record.devices.items()}
    folder.write(msgspec.structs.replace(record, devices=hostile))

    out = run("status", repo)[1]
    _make_observer(as_json=False)("device", {"device": "cam1", "phase": "failed", "release": 1, "reason": evil})

    for shown in (out, capsys.readouterr().err):
        assert r"digest: \x1b[2J\x9b1A\nstate    done" in shown
        assert all(line.isprintable() for line in shown.splitlines())


def test_status_as_json(repo):
    record = json.loads(run("status", repo, "--json")[1])
    assert record["progress"]["state"] == "aborted"
    assert record["devices"]["cam1"]["phase"] == "refused"
    assert record["supervised"] is False


def set_state(repo, state):
    record = Folder(repo).read()
    Folder(repo).write(msgspec.structs.replace(record, progress=msgspec.structs.replace(record.progress, state=state)))


def test_a_rollout_that_has_ended_says_so_when_it_is_asked(repo):
    for request in Request:
        with pytest.raises(ConfigError, match=rf"{request}: it was aborted \(cam1 refused: accuracy: x\)"):
            run(request, repo)
    set_state(repo, RolloutState.DONE)
    for request in (Request.PAUSE, Request.RESUME):
        with pytest.raises(ConfigError, match="it is done"):
            run(request, repo)
    assert Folder(repo).take_request() is None
    assert run(Request.ABORT, repo)[0] == 0


def test_a_coordinators_home_that_has_introduced_nothing_says_when_it_will(tmp_path):
    (tmp_path / "summary.json").write_text("{}")
    with pytest.raises(ConfigError, match="at the end of a campaign"):
        run("status", tmp_path)


@pytest.mark.parametrize("request_", Request)
def test_requests(repo, request_):
    set_state(repo, RolloutState.RUNNING)
    code, out = run(request_, repo)
    assert (code, Folder(repo).take_request()) == (0, request_)
    assert "nobody supervises it" in out
    with Folder(repo).supervise():
        assert json.loads(run(request_, repo, "--json")[1])["supervised"] is True


@pytest.mark.parametrize("command", ["status", "pause", "resume", "abort"])
def test_without_a_rollout(tmp_path, command):
    with pytest.raises(ConfigError, match="fedge rollout start"):
        run(command, tmp_path)


def test_a_release_whose_signatures_have_expired_is_not_begun(tmp_path, monkeypatch):
    Clock(monkeypatch).advance(days=-31)  # of the machine that signs; its timestamp is good for 30
    Repository.make(tmp_path / "repo").add(variant(tmp_path / "bundle", release=2))

    with pytest.raises(ConfigError, match=r"timestamp have expired.*fedge release renew"):
        run("start", tmp_path / "repo", "2/manifest.json", "--broker", "localhost:1", "--federation", "f")

    assert Folder(tmp_path / "repo").read() is None


def test_without_a_target_there_must_be_a_rollout_to_go_on_with(release, tmp_path):
    assert release
    with pytest.raises(ConfigError, match="no rollout in"):
        run("start", tmp_path / "repo", "--broker", "localhost:1", "--federation", "f")


def test_start_needs_a_repository(tmp_path):
    with pytest.raises(ConfigError, match="fedge release init"):
        run("start", tmp_path, "1/manifest.json", "--broker", "localhost:1", "--federation", "f")
