"""Makes a release for a whole fleet: a coordinator's model for any device, as a signed bundle."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Container
from contextlib import closing
from pathlib import Path

import msgspec

from coordinator.methods.catalogue import make_method
from coordinator.methods.method import Reading
from coordinator.methods.option_values import list_code
from coordinator.methods.server.assembling import load_global_mixture, make_child_bundle
from coordinator.methods.settings import MethodSettings
from coordinator.methods.state import decode_state
from coordinator.store.blobs import prevent_deletion
from coordinator.store.classes import read_classes
from coordinator.store.store import Store, explain_unreadable
from coordinator.watch.options import open_store
from coordinator.watch.state import read_summary
from export import Mixture
from export.signing import Repository
from fedge.data.task import TaskSpec
from fedge.errors import MALFORMED, ConfigError, StoreError, raise_as
from fedge.models import weights
from fedge.models.weights import find_device_weights
from fedge.system.files import write_atomically
from fedge.system.loading import find_code, require_allowed
from fedge.tensors import codecs
from fedge.tensors.layout import Layout, Model, Tensors, view_bytes
from fedge.wire.messages import BlobRef


def make_release(repo: Path, home: Path, store: str | None, allow: Container[str] = ()) -> str:
    """Sign a bundle of a federation's model for any device.

    The bundle's release is higher than all releases in the repository and all bundles that devices have reported.

    Args:
        repo: the signed repository.
        home: the coordinator's home.
        store: address of the coordinator's store, if that is not in the home.
        allow: the code, package.module:name, that the home may name as its method, task or network, because the home
            may be a copy from elsewhere.

    Returns:
        The path of the target, such as "8/manifest.json".

    Raises:
        ConfigError: there is no repository or no coordinator's home, nothing is learned together yet, the method needs
            more than the home has, or the home names code that is not allowed.
        StoreError: the disk is full or broken.
    """
    repository, summary = Repository(repo), read_summary(home)
    with closing(open_store(home, store)) as tables, prevent_deletion(home):
        task, layout, mixture = _load_global_mixture(tables, allow)
    known = [*repository.list_releases(), *(device["release"] or 0 for device in summary["fleet"].values())]
    files = make_child_bundle(task, layout, mixture, release=1 + max(known, default=0), method=summary["method"])
    with tempfile.TemporaryDirectory(prefix="fedge-release-") as folder:
        for name, data in files.items():
            write_atomically(Path(folder, name), data)
        return repository.add(Path(folder))


def _load_global_mixture(store: Store, allow: Container[str]) -> tuple[TaskSpec, Layout, Mixture]:
    """Load the task, and what any device can predict with after the last finished round."""
    identity, start, saved = store.find_value("identity"), store.find_value("start"), store.get_state()
    if identity is None or start is None or saved is None:
        raise ConfigError(f"no round is done in {store.home} yet")
    with explain_unreadable(store):
        _, name, _, seed, rounds, options = json.loads(identity)
    with raise_as(StoreError, f"{store.home / 'task.json'} cannot be read", on=(OSError, *MALFORMED)):
        task = msgspec.json.decode((store.home / "task.json").read_bytes(), type=TaskSpec)
    if task.compute_fingerprint() != read_classes(store).fingerprint:  # it may name code
        raise ConfigError(f"{store.home / 'task.json'} is not the task of this federation any more")
    require_allowed(f"the run in {store.home}", (*find_code(name), *list_code(options), *task.code), allow, "--allow")
    if (frozen := find_device_weights(task)) is not None:
        weights.store_weights(store.blobs.get(frozen.digest))
    method = make_method(name, MethodSettings(rounds=rounds, seed=seed, options=options), Reading(task))
    with explain_unreadable(store):
        state = decode_state(
            saved, type(method.make_first_state(*msgspec.json.decode(start, type=tuple[Layout, BlobRef])))
        )
    if not state.history:
        raise ConfigError(f"the devices in {store.home} have learned nothing together yet")

    def get_model(ref: BlobRef) -> Model:
        return codecs.decode(store.blobs.get(ref.digest), ref.codec, state.layout, again=True)

    def get_tensors(ref: BlobRef) -> Tensors:
        return view_bytes(store.blobs.get(ref.digest))

    task = task.with_head_class(method.HEAD_CLASS)
    return task, state.layout, load_global_mixture(task, method.get_global_model(state), get_model, get_tensors)
