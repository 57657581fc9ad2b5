"""`fedge install`: gives a device its first bundle and its root of trust by hand."""

from __future__ import annotations

import contextlib
import shutil
import time
from pathlib import Path
from typing import Final

import click
import msgspec

from deploy.updates.examination import Limits, examine_bundle
from deploy.updates.slots import Slots, find_inbox_bundle, find_slot, lock_slots, read_state
from fedge.bundle.manifest import MANIFEST, Bundle, compute_bundle_digest, read_bundle, read_manifest, require_bundle
from fedge.data.classes import has_grown
from fedge.data.task import TaskSpec, list_differences
from fedge.errors import ConfigError, StoreError, UpdateRejected, raise_as
from fedge.system.files import InUseError, fill_folder, write_atomically
from fedge.system.help import Command, json_option, option
from fedge.system.text import Heading
from fedge.wire.rollout import MAX_METADATA_BYTES

HANDED_S: Final = 300.0
"""Time limit for the process that serves HOME to try a new bundle; one already on trial there may first take a
minute."""
LOOK_S: Final = 0.2


@click.command(cls=Command)
@click.argument("bundle", required=False, type=click.Path(path_type=Path))
@option(
    "--home",
    heading=Heading.FOLDERS,
    required=True,
    type=click.Path(path_type=Path),
    help="This is the folder of the device's runtime.",
)
@option(
    "--root",
    heading=Heading.BUNDLES,
    type=click.Path(path_type=Path),
    help="This file is the root of trust; `fedge release show` names it.",
)
@json_option()
def install(bundle: Path | None, home: Path, root: Path | None, *, as_json: bool) -> None:
    """Give a device its first bundle and its root of trust, by hand.

    The bundle is verified, run once in a separate process, and compared with an installed one on the device's own
    samples (HOME/validation.npz). Then it goes into service. If `fedge serve` runs on this HOME, it gets a bundle of a
    higher release, does the same, and serves the bundle on trial. --root needs it stopped. Later bundles come by `fedge
    rollout`.

    Examples:
      fedge install --home cam1 bundle
      fedge install --home cam1 --root releases/metadata/1.root.json bundle
      fedge install --home cam1 --root 1.root.json --json

    Exit codes: 0 done, 2 no bundle or root of trust there, nothing to do, or HOME in use by another command, 4 the disk
    is full or broken, 5 the bundle is not what its manifest says, or not fit for this device; the previous one stays in
    service.
    """
    if bundle is None and root is None:
        raise click.UsageError("name a bundle, --root, or both")
    if bundle is not None:
        require_bundle(bundle)
    trusted = None if root is None else _read_root(root)
    new = None if bundle is None else read_bundle(bundle)
    try:
        with lock_slots(home) as slots:
            if trusted is not None:
                from deploy.updates.trust import install_root

                install_root(home, trusted)
            if new is not None:
                install_bundle(home, slots, new)
    except InUseError:
        if new is None or trusted is not None or read_state(home).running is None:
            raise
        _hand_over(new, home)
    if as_json:
        record = {"home": str(home), "root": root is not None}
        if new is not None:
            record |= {"release": new.manifest.release, "digest": new.digest, "task": new.manifest.task.name}
        click.echo(msgspec.json.encode(record).decode())
        return
    if root is not None:
        click.echo(f"{home}: root of trust installed")
    if new is not None:
        click.echo(f"{home}: release {new.manifest.release} of {new.manifest.task.name} answers")


def _read_root(path: Path) -> bytes:
    with raise_as(ConfigError, f"cannot read {path}"), path.open("rb") as file:
        return file.read(MAX_METADATA_BYTES)


def install_bundle(home: Path, slots: Slots, new: Bundle) -> None:
    """Stage a verified bundle, examine it, switch to it, and confirm it at once.

    It needs no trial, because a person is present, or nothing served before. A damaged bundle in a slot does not count;
    a device without a second bundle gets this one in both slots.

    Raises:
        ConfigError: a bundle is on trial.
        UpdateRejected: the bundle is for another task, was refused before, is older than one that ran, or is not fit.
        StoreError: the disk is full or broken.
    """
    if slots.state.trial is not None:
        raise ConfigError(f"a bundle is on trial in {home}: start `fedge serve` and wait until it has proved itself")
    task = _find_task(slots)
    if task is not None and not has_grown(task, new.manifest.task):
        differences = "; ".join(list_differences(task, new.manifest.task))
        raise UpdateRejected(f"task: the bundle is for another task than the one that {home} runs: {differences}")
    slots.require_acceptable(new.manifest, new.digest)
    slots.stage((new.folder / MANIFEST).read_bytes(), new.folder)
    found = examine_bundle(slots.running, slots.staged, home, Limits())
    if found.reason:
        raise UpdateRejected(found.reason)
    slots.switch()
    slots.confirm()
    slots.repair()


def _find_task(slots: Slots) -> TaskSpec | None:
    """Return the device's task from the first slot with a readable manifest, or None."""
    for folder in (slots.running, slots.staged):
        if folder is not None:
            with contextlib.suppress(UpdateRejected, OSError):
                return read_manifest(folder)[0].task
    return None


def _hand_over(new: Bundle, home: Path) -> None:
    """Hand the bundle to the process that serves HOME through the inbox, and wait until it is in service."""
    if _read_serving(home)[1] == new.digest:
        return
    _require_highest(new, home)
    inbox = home / "bundles" / str(new.manifest.release)
    ours = not inbox.exists()
    with raise_as(StoreError, f"cannot write {inbox}"):
        if ours:
            with fill_folder(inbox) as unfinished:
                for name in (MANIFEST, *new.manifest.files):
                    write_atomically(unfinished / name, (new.folder / name).read_bytes())
        elif compute_bundle_digest(inbox) != new.digest:
            raise ConfigError(f"{inbox} already holds another bundle: give this one another release number")
    until = time.monotonic() + HANDED_S
    try:
        while not _is_serving(new, home):
            if time.monotonic() >= until:
                ours = False  # leave the bundle, which is taken in later
                raise ConfigError(f"no `fedge serve` has taken in {inbox}; it does when it is started on {home}")
            time.sleep(LOOK_S)
            _require_highest(new, home)
    finally:
        if ours:
            shutil.rmtree(inbox, ignore_errors=True)


def _is_serving(new: Bundle, home: Path) -> bool:
    """Return whether the new bundle is in service by now."""
    state = read_state(home)
    if new.digest in state.refused:
        raise UpdateRejected(state.refused[new.digest])
    return (state.trial is None or state.trial.starts > 0) and _read_serving(home)[1] == new.digest


def _require_highest(new: Bundle, home: Path) -> None:
    """Refuse unless the bundle is newer than the one in service and any in the inbox."""
    release, (now, digest) = new.manifest.release, _read_serving(home)
    if digest != new.digest and now >= release:
        raise ConfigError(
            f"release {now} answers in {home}, and `fedge serve` takes in higher ones alone, not {release}:"
            " stop it first"
        )
    newer = find_inbox_bundle(home, release, read_state(home).refused)
    if newer is not None:
        raise ConfigError(f"release {newer.name} is being taken in from {newer}, so no older release can be installed")


def _read_serving(home: Path) -> tuple[int, str]:
    """Return release and digest of the bundle in service in a HOME that has one."""
    folder = find_slot(home, read_state(home).running or "a")
    try:
        manifest, digest = read_manifest(folder)
    except (UpdateRejected, OSError) as error:
        raise StoreError(f"the bundle in {folder} is damaged: stop `fedge serve`, then install ({error})") from error
    return manifest.release, digest
