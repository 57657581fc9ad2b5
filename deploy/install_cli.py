"""`fedge install`: give a device its first bundle, and its root of trust, by hand."""

from __future__ import annotations

from pathlib import Path

import click
import msgspec

from deploy.examination import Limits, examine
from deploy.slots import Slots, owned
from deploy.trust import MAX_METADATA_BYTES, install_root
from fedge.bundle import Bundle, read
from fedge.errors import ConfigError, UpdateRejected


@click.command()
@click.argument("bundle", required=False, type=click.Path(path_type=Path))
@click.option("--home", required=True, type=click.Path(path_type=Path), help="Folder of the device's runtime.")
@click.option("--root", type=click.Path(path_type=Path), help="Root of trust of the releases: `fedge release show`.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object.")
def install(bundle: Path | None, home: Path, root: Path | None, *, as_json: bool) -> None:
    """Give a device its first bundle and its root of trust, by hand.

    The bundle is verified, run once in a process of its own and, where one is installed already, compared with it on
    the device's own samples (HOME/validation.npz); then it answers. Later ones come by `fedge rollout`. Stop
    `fedge serve` on this HOME before.

    \b
    Examples:
      fedge install --home cam1 bundle
      fedge install --home cam1 --root releases/metadata/1.root.json bundle
      fedge install --home cam1 --root 1.root.json --json

    \b
    Exit codes: 0 done, 2 no bundle or root of trust there, nothing to do, or HOME in use, 4 the disk is full or
    broken, 5 the bundle is not what its manifest says, or not fit for this device; what answered before goes on.
    """  # noqa: D301 - click needs the character itself
    if bundle is None and root is None:
        raise click.UsageError("name a bundle, --root, or both")
    if bundle is not None and not bundle.is_dir():
        raise ConfigError(f"no bundle at {bundle}: name the folder that holds manifest.json")
    trusted = None if root is None else _read_root(root)
    new = None if bundle is None else read(bundle)
    with owned(home) as slots:
        if trusted is not None:
            install_root(home, trusted)
        if bundle is not None and new is not None:
            _install(bundle, new, home, slots)
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
    try:
        with path.open("rb") as file:
            return file.read(MAX_METADATA_BYTES)
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error}") from error


def _install(folder: Path, new: Bundle, home: Path, slots: Slots) -> None:
    """Stage, examine, switch; confirmed at once, since a person stands by."""
    if slots.state.trial is not None:
        raise ConfigError(f"a bundle is on trial in {home}: start `fedge serve` and wait until it has proved itself")
    if slots.running is not None:
        task = read(slots.running).manifest.task
        if task.fingerprint() != new.manifest.task.fingerprint():
            raise UpdateRejected(f"task: {home} does {task.name}, the bundle is for {new.manifest.task.name}")
    slots.may_take(new.manifest, new.digest)
    slots.stage(slots.take_in(folder))
    found = examine(slots.running, slots.staged, home, Limits())
    if found.reason:
        raise UpdateRejected(found.reason)
    slots.switch()
    slots.confirm()
