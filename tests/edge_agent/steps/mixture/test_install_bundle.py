"""A bundle that the server made: what is put in place, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np
import pytest

import deploy
from export import write_bundle
from fedge.bundle.campaign import read_campaign
from fedge.bundle.manifest import MANIFEST, SKELETON
from fedge.errors import StoreError
from fedge.steps.contract import Failed
from fedge.steps.mixture.install import Installed
from fedge.system.files import compute_digest
from fedge.wire.messages import Role
from tests.support.cold_device import TASK, ColdDevice
from tests.support.tables import inputs, layout_of, mixture_of

LOGITS = np.random.default_rng(0).normal(size=(1, 6, 3))


@pytest.fixture
def files(tmp_path: Path) -> dict[str, bytes]:
    """A bundle of release 1."""
    return bundle_files(tmp_path / "made" / "1")


def bundle_files(folder: Path, release: int = 1, logits: np.ndarray = LOGITS) -> dict[str, bytes]:
    write_bundle(
        folder,
        task=TASK,
        layout=layout_of(logits[0]),
        mixture=mixture_of(logits, roles=[Role.GLOBAL]),
        validation=inputs(6),
        release=release,
        method="fedcoe",
        metrics={},
    )
    return {file.name: file.read_bytes() for file in folder.iterdir()}


def test_an_installed_bundle_is_the_one_that_was_sent_and_runs(tmp_path: Path, files: dict[str, bytes]) -> None:
    device = ColdDevice(tmp_path / "pi")
    result = device.install(files)
    runtime = deploy.load(tmp_path / "pi" / "bundles" / "1")
    assert isinstance(result, Installed)
    assert runtime.digest == compute_digest(files[MANIFEST])
    assert result.release == 1
    expected = np.exp(LOGITS[0]) / np.exp(LOGITS[0]).sum(axis=1, keepdims=True)
    np.testing.assert_allclose(runtime.predict(inputs(6)).probabilities, expected, atol=1e-6)


def test_a_bundle_is_replaced_by_the_next_order_of_its_release(tmp_path: Path, files: dict[str, bytes]) -> None:
    device = ColdDevice(tmp_path / "pi")
    device.install(files)
    other = bundle_files(tmp_path / "other" / "1", logits=LOGITS + np.eye(6, 3))
    assert isinstance(device.install(other), Installed)
    assert [p.name for p in (tmp_path / "pi" / "bundles").iterdir()] == ["1"]
    assert (tmp_path / "pi" / "bundles" / "1" / MANIFEST).read_bytes() == other[MANIFEST]


def test_a_bundle_of_a_campaign_says_so_beside_its_manifest(tmp_path: Path, files: dict[str, bytes]) -> None:
    device = ColdDevice(tmp_path / "pi")
    assert isinstance(device.install(files, campaign=3), Installed)
    assert read_campaign(tmp_path / "pi" / "bundles" / "1") == 3


def flipped(data: bytes) -> bytes:
    return data[:-1] + bytes([data[-1] ^ 1])


def manifest_with(files: dict[str, bytes], **changes: object) -> dict[str, bytes]:
    """The files with another manifest."""
    fields = json.loads(files[MANIFEST]) | changes
    return files | {MANIFEST: json.dumps(fields).encode()}


def part_of(files: dict[str, bytes]) -> str:
    return next(name for name in files if name.endswith(".safetensors"))


STRANGE = {"0" * 64 + ".safetensors": b"x"}
OTHER_TASK = msgspec.to_builtins(msgspec.structs.replace(TASK, name="other"))
TAMPERED: dict[str, tuple[Callable[[dict[str, bytes]], dict[str, bytes]], str]] = {
    "a weight": (lambda f: f | {part_of(f): flipped(f[part_of(f)])}, "does not hash"),
    "the graph": (lambda f: f | {SKELETON: flipped(f[SKELETON])}, "not the one of the manifest"),
    "the manifest": (lambda f: f | {MANIFEST: f[MANIFEST][:-3]}, "manifest"),
    "a part is missing": (lambda f: {n: d for n, d in f.items() if n != part_of(f)} | STRANGE, "missing"),
    "a file too many": (lambda f: f | STRANGE, "does not name"),
    "a way out": (lambda f: f | {"../../evil": b"x"}, "not a file of a bundle"),
    "an absolute path": (lambda f: f | {"/tmp/evil": b"x"}, "not a file of a bundle"),
    "a name with a line break": (lambda f: f | {"0" * 64 + ".safetensors\n": b"x"}, "not a file of a bundle"),
    "another task": (lambda f: manifest_with(f, task=OTHER_TASK), "another fingerprint"),
    "another release": (lambda f: manifest_with(f, release=7), "release 7"),
}  # fmt: skip


@pytest.mark.parametrize("what", TAMPERED)
def test_tampered_files_are_refused_and_what_was_installed_stays(
    tmp_path: Path, files: dict[str, bytes], what: str
) -> None:
    device = ColdDevice(tmp_path / "pi")
    device.install(files)
    tamper, reason = TAMPERED[what]
    result = device.install(tamper(files))
    assert isinstance(result, Failed)
    assert reason in result.reason
    found = {p.relative_to(tmp_path / "pi").as_posix(): p for p in (tmp_path / "pi").rglob("*") if p.is_file()}
    assert {name: p.read_bytes() for name, p in found.items()} == {
        f"bundles/1/{name}": data for name, data in files.items()
    }
    assert sorted(p.name for p in tmp_path.iterdir()) == ["made", "pi"]


def test_a_graph_that_cannot_be_run_is_refused(tmp_path: Path, files: dict[str, bytes]) -> None:
    """The manifest is right about it: only running it tells."""
    graph = b"\x08\x08"  # a model of IR version 8, without a graph
    skeleton = {"digest": compute_digest(graph), "size_bytes": len(graph)}
    result = ColdDevice(tmp_path / "pi").install(manifest_with(files | {SKELETON: graph}, skeleton=skeleton))
    assert isinstance(result, Failed)
    assert "cannot be run" in result.reason
    assert not (tmp_path / "pi" / "bundles" / "1").exists()


def test_a_folder_that_cannot_be_written_ends_the_agent(tmp_path: Path, files: dict[str, bytes]) -> None:
    (tmp_path / "pi").mkdir()
    (tmp_path / "pi" / "bundles").write_text("in the way")
    with pytest.raises(StoreError, match="cannot write bundle"):
        ColdDevice(tmp_path / "pi").install(files)
