"""Makes a release for a whole fleet: a coordinator's model for any device, as a signed bundle."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Container
from contextlib import closing
from pathlib import Path

import msgspec

from coordinator.methods.catalogue import make
from coordinator.methods.method import Server
from coordinator.methods.option_values import code_of
from coordinator.methods.server.assembling import bundle_in_subprocess
from coordinator.methods.settings import MethodSettings
from coordinator.methods.state import load
from coordinator.store.blobs import undeleted
from coordinator.store.store import Store, reading
from coordinator.watch.options import opened
from coordinator.watch.state import read_summary
from export.signing import Repository
from fedge.data.task import TaskSpec
from fedge.errors import MALFORMED, ConfigError, StoreError, failing_as
from fedge.models import weights
from fedge.models.weights import needed_on_devices
from fedge.system.files import write_atomically
from fedge.system.loading import code_in, require_allowed
from fedge.tensors import codecs
from fedge.tensors.layout import Layout, Model
from fedge.wire.messages import BlobRef


def make_release(repo: Path, home: Path, store: str | None, allow: Container[str] = ()) -> str:
    """Sign a bundle of a federation's model for any device.

    Its number is higher than all releases there and all bundles that devices have reported.

    Args:
        repo: the signed repository.
        home: the coordinator's.
        store: address of its store, if that is not in the home.
        allow: the code, package.module:name, that the home may name as its method, task or network; it may be a copy
            from elsewhere.

    Returns:
        The path of the target, such as "8/manifest.json".

    Raises:
        ConfigError: no repository or no coordinator's home, nothing learned together yet, the method needs more than
            the home has, or the home names code that is not allowed.
        StoreError: the disk is full or broken.
    """
    repository, summary = Repository(repo), read_summary(home)
    with closing(opened(home, store)) as tables, undeleted(home):
        task, layout, model = _learned(tables, allow)
    known = [*repository.releases(), *(device["release"] or 0 for device in summary["fleet"].values())]
    files = bundle_in_subprocess(task, layout, model, release=1 + max(known, default=0), method=summary["method"])
    with tempfile.TemporaryDirectory(prefix="fedge-release-") as folder:
        for name, data in files.items():
            write_atomically(Path(folder, name), data)
        return repository.add(Path(folder))


def _learned(store: Store, allow: Container[str]) -> tuple[TaskSpec, Layout, Model]:
    """The task, and the model for any device after the last finished round."""
    identity, start, saved = store.recall("identity"), store.recall("start"), store.state()
    if identity is None or start is None or saved is None:
        raise ConfigError(f"no round is done in {store.home} yet")
    with reading(store):
        _, name, fingerprint, seed, rounds, options = json.loads(identity)
    with failing_as(StoreError, f"{store.home / 'task.json'} cannot be read", on=(OSError, *MALFORMED)):
        task = msgspec.json.decode((store.home / "task.json").read_bytes(), type=TaskSpec)
    if task.fingerprint() != fingerprint:  # it may name code
        raise ConfigError(f"{store.home / 'task.json'} is not the task of this federation any more")
    require_allowed(f"the run in {store.home}", (*code_in(name), *code_of(options), *task.code), allow, "--allow")
    if (frozen := needed_on_devices(task)) is not None:
        weights.keep(store.blobs.get(frozen.digest))
    method = make(name, MethodSettings(rounds=rounds, seed=seed, options=options), Server(task))
    with reading(store):
        state = load(saved, type(method.begin(*msgspec.json.decode(start, type=tuple[Layout, BlobRef]))))
    if not state.history:
        raise ConfigError(f"the devices in {store.home} have learned nothing together yet")
    ref = method.for_anybody(state)
    return task, state.layout, codecs.decode(store.blobs.get(ref.digest), ref.codec, state.layout, again=True)
