"""A release for the whole fleet, of what a coordinator's home holds."""

from __future__ import annotations

import contextlib
import json
import shutil
from pathlib import Path

import msgspec
import numpy as np
import pytest

import deploy
from coordinator.rollout.making import make_release
from coordinator.store.store import Store
from export.signing import Repository
from fedge.bundle.manifest import read_manifest
from fedge.commands.cli import main
from fedge.errors import ConfigError
from tests.homes.make import TASK

FINISHED = Path(__file__).parents[2] / "homes" / "0.2.0" / "finished"


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """Of a federation that has ended, by an earlier version; its devices' bundles have number 1, but for one's."""
    home = Path(shutil.copytree(FINISHED / "coordinator", tmp_path / "home"))
    summary = json.loads((home / "summary.json").read_bytes())
    fleet = {"cam0": {"release": 1}, "cam1": {"release": 4}, "cam2": {"release": None}}
    (home / "summary.json").write_text(json.dumps({**summary, "at": 1.0, "fleet": fleet}))
    Store(home).close()  # its schema is that of this version
    return home


@pytest.mark.process
def test_it_is_the_model_of_the_coordinator_with_a_number_above_all(
    home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    repo = tmp_path / "repo"
    repository = Repository.make(repo)
    repository.add(FINISHED / "cam0" / "bundles" / "1")
    assert make_release(repo, home, None) == "5/manifest.json"
    assert main(["rollout", "make", str(repo), "--home", str(home)]) == 0
    assert capsys.readouterr().out == "6/manifest.json\n"
    manifest = next(
        path for name, path in repository.find_files("6/manifest.json").items() if name.endswith("manifest.json")
    )
    bundle = tmp_path / "bundle"
    bundle.mkdir()
    shutil.copy(manifest, bundle / "manifest.json")
    assert read_manifest(bundle)[0].method == "fedavg"
    for name, part in read_manifest(bundle)[0].files.items():
        shutil.copy(repository.parts.get_path(part.digest), bundle / name)
    x = np.random.default_rng(0).normal(size=(3, 6)).astype(np.float32)
    assert deploy.load(bundle).predict(x).probabilities.shape == (3, 3)


@pytest.mark.parametrize("code", ["method", "task", "model"])
def test_code_that_the_home_names_is_not_run_unless_its_owner_allows_it(
    home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], code: str
) -> None:
    Repository.make(tmp_path / "repo")
    with contextlib.closing(Store(home)) as store:
        federation, method, _, *rest = json.loads(store.find_value("identity") or "")
        changes = {"task": {"name": "os:abort"}, "model": {"model": "os:abort"}}.get(code, {})
        task = msgspec.structs.replace(TASK, **changes)
        (home / "task.json").write_bytes(msgspec.json.encode(task))
        method = "os:abort+ft" if code == "method" else method
        identity = json.dumps([federation, method, task.compute_fingerprint(), *rest])
        store.put_value("identity", identity)
    assert main(["rollout", "make", str(tmp_path / "repo"), "--home", str(home)]) == 2
    told = f"the run in {home} names code that would be run here: os:abort; if you know and trust it, say so on the "
    assert f"{told}command line: --allow os:abort\n" in capsys.readouterr().err


@pytest.mark.parametrize("state", [b"garbage", b"", msgspec.msgpack.encode((b"\xc0", b"garbage"))])
def test_a_state_that_is_garbage_is_an_error_that_says_what_to_do(
    home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], state: bytes
) -> None:
    Repository.make(tmp_path / "repo")
    with contextlib.closing(Store(home)) as store:
        store._change(lambda db: db.execute("UPDATE states SET body = $1", state))
    assert main(["rollout", "make", str(tmp_path / "repo"), "--home", str(home)]) == 4
    told = (
        f"error: what {home} holds of the run cannot be read; restore another backup, or begin anew in another --home: "
    )
    assert told in capsys.readouterr().err


def test_a_home_without_a_round_has_nothing_to_release(home: Path, tmp_path: Path) -> None:
    Repository.make(tmp_path / "repo")
    with contextlib.closing(Store(home)) as store:
        store._change(lambda db: db.execute("DELETE FROM states"))
    with pytest.raises(ConfigError, match="no round is done"):
        make_release(tmp_path / "repo", home, None)
    (home / "task.json").write_bytes(msgspec.json.encode(msgspec.structs.replace(TASK, name="other")))
    shutil.copy(FINISHED / "coordinator" / "store.db", home / "store.db")
    Store(home).close()
    with pytest.raises(ConfigError, match="not the task of this federation"):
        make_release(tmp_path / "repo", home, None)
