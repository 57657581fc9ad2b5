"""`fedge install`: what a person puts on a device by hand is examined like everything else."""

import hashlib
import json
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from click.testing import CliRunner

from deploy.commands.install import LOOK_S, install
from deploy.updates.answering import ActiveBundle
from deploy.updates.examination import Limits
from deploy.updates.slots import Slots, lock_slots
from fedge.bundle.manifest import read_bundle
from fedge.errors import ConfigError, UpdateRejected

from ..bundles import GOLDEN, broken_gate, other_gate, source, variant
from ..repository import Simulator

pytestmark = pytest.mark.torch_free


def run(*arguments):
    result = CliRunner().invoke(install, [*map(str, arguments)])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.stdout


def release(home):
    return read_bundle(Slots(home).running).manifest.release


def test_the_first_bundle_answers(tmp_path):
    code, out = run("--home", tmp_path / "pi", GOLDEN, "--json")

    assert code == 0
    assert json.loads(out)["task"] == read_bundle(GOLDEN).manifest.task.name
    assert Slots(tmp_path / "pi").running == Slots(tmp_path / "pi").good


def test_a_part_is_hashed_where_it_comes_in_and_in_both_slots(tmp_path, monkeypatch):
    hashed, real = [], hashlib.file_digest
    monkeypatch.setattr(
        hashlib, "file_digest", lambda file, name: (hashed.append(Path(file.name)), real(file, name))[1]
    )

    run("--home", tmp_path / "pi", GOLDEN)

    home, parts = tmp_path / "pi", {part.file_name for part in read_bundle(GOLDEN).manifest.parts}
    del hashed[-len(parts) :]  # by this test
    assert sorted(path.name for path in hashed if path.parent == GOLDEN) == sorted(parts)
    assert parts <= {path.name for path in hashed if path.parent == home / "slot-a"}
    assert release(home) == read_bundle(home / "slot-b").manifest.release


def test_a_root_of_trust_alone(tmp_path):
    root = tmp_path / "1.root.json"
    root.write_bytes(Simulator().files["1.root.json"])

    assert run("--home", tmp_path / "pi", "--root", root)[0] == 0
    assert (tmp_path / "pi" / "root.json").read_bytes() == root.read_bytes()


@pytest.mark.parametrize("data", [b"", b"{}", b"no json"])
def test_what_is_no_root_is_refused(tmp_path, data):
    (tmp_path / "root").write_bytes(data)

    with pytest.raises(ConfigError):
        run("--home", tmp_path / "pi", "--root", tmp_path / "root")

    assert not (tmp_path / "pi" / "root.json").exists()


def test_a_device_that_is_being_served_is_left_alone(tmp_path):
    home = tmp_path / "pi"
    (tmp_path / "root").write_bytes(Simulator().files["1.root.json"])

    with lock_slots(home), pytest.raises(ConfigError, match="fedge serve"):
        run("--home", home, "--root", tmp_path / "root", GOLDEN)

    assert not (home / "root.json").exists()
    assert Slots(home).running is None


def test_a_bundle_that_is_not_there_is_wrong_usage(tmp_path):
    with pytest.raises(ConfigError, match="no bundle at"):
        run("--home", str(tmp_path / "home"), str(tmp_path / "nowhere"))
    assert not (tmp_path / "home").exists()


def test_nothing_to_do_is_wrong_usage(tmp_path):
    assert run("--home", tmp_path / "pi")[0] == 2


@pytest.mark.parametrize(
    ("changes", "reason"),
    [({"gate": broken_gate, "release": 9}, "not-finite"), ({"release": 1}, "older")],
)
def test_what_is_not_fit_leaves_the_old_one(tmp_path, changes, reason):
    home = tmp_path / "pi"
    run("--home", home, variant(tmp_path / "5", release=5))

    with pytest.raises(UpdateRejected, match=reason):
        run("--home", home, variant(tmp_path / "new", **changes))

    assert release(home) == 5


def test_another_task_is_refused(tmp_path):
    home = tmp_path / "pi"
    run("--home", home, variant(tmp_path / "5", release=5))
    other = variant(tmp_path / "6", release=6)
    text = (other / "manifest.json").read_text()
    (other / "manifest.json").write_text(text.replace('"name": "digits"', '"name": "cats"', 1))

    with pytest.raises(UpdateRejected, match=r"^task: "):
        run("--home", home, other)

    assert release(home) == 5


def test_a_bundle_that_is_handed_over_answers_before_the_command_ends(tmp_path):
    """The process that serves switches on the disk first and loads afterwards; the command waits for both."""
    home = tmp_path / "pi"
    run("--home", home, variant(tmp_path / "5", release=5))
    new = variant(tmp_path / "6", release=6)
    with lock_slots(home) as slots, ThreadPoolExecutor(1) as person:
        answering = ActiveBundle(slots, Limits())
        command = person.submit(run, "--home", home, new)
        while not (home / "bundles" / "6").exists():
            time.sleep(0.01)
        slots.stage(*source(home / "bundles" / "6"))
        slots.switch()
        time.sleep(3 * LOOK_S)
        assert not command.done()
        answering.swap()

        assert command.result(timeout=300)[0] == 0
        assert answering.runtime.manifest.release == 6


def test_one_that_a_newer_one_overtakes_says_so_at_once(tmp_path):
    home = tmp_path / "pi"
    run("--home", home, variant(tmp_path / "5", release=5))
    eight, nine = variant(tmp_path / "8", release=8), variant(tmp_path / "9", release=9, gate=other_gate)
    with lock_slots(home) as slots, ThreadPoolExecutor(1) as person:
        command = person.submit(run, "--home", home, eight)
        while not (home / "bundles" / "8").exists():
            time.sleep(0.01)
        nine.rename(home / "bundles" / "9")  # the agent's
        with pytest.raises(ConfigError, match="release 9 is being taken in"):
            command.result(timeout=300)
        assert sorted(path.name for path in (home / "bundles").iterdir()) == ["9"]
        with pytest.raises(ConfigError, match="release 9 is being taken in"):
            run("--home", home, eight)
        assert sorted(path.name for path in (home / "bundles").iterdir()) == ["9"]

        slots.record_refusal(read_bundle(home / "bundles" / "9").digest, "accuracy: worse")
        command = person.submit(run, "--home", home, eight)  # now it is the newest
        while not (home / "bundles" / "8").exists():
            time.sleep(0.01)
        slots.stage(*source(variant(tmp_path / "10", release=10)))
        slots.switch()  # a rollout's
        with pytest.raises(ConfigError, match="release 10 answers"):
            command.result(timeout=300)


def test_one_that_nobody_takes_in_waits_in_the_inbox(tmp_path, monkeypatch):
    monkeypatch.setattr("deploy.commands.install.HANDED_S", 3 * LOOK_S)
    home = tmp_path / "pi"
    run("--home", home, variant(tmp_path / "5", release=5))
    with lock_slots(home), pytest.raises(ConfigError, match="when it is started"):
        run("--home", home, variant(tmp_path / "6", release=6))
    assert read_bundle(home / "bundles" / "6").manifest.release == 6
