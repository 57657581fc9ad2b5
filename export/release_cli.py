"""`fedge release`: the signed repository of releases from the command line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from export.cli import find_newest_bundle
from export.signing import LIFETIMES, ROLES, Repository
from fedge.errors import ConfigError
from fedge.system.help import CommandGroup, json_option, option
from fedge.system.text import Heading

_json = json_option()
_repo = click.argument("repo", type=click.Path(path_type=Path))


@click.group(cls=CommandGroup)
def release() -> None:
    """Sign bundles, so that devices can tell what is genuine.

    REPO is a folder of The Update Framework: keys, signed metadata, manifests and parts. Devices hold its first root
    (`fedge install --root REPO/metadata/1.root.json`); `fedge rollout` brings its releases to them.

    Examples:
      fedge release init releases
      fedge release add releases bundle
      fedge release renew releases
      fedge release show releases --json

    Exit codes: 0 done, 2 no repository there, a key is missing, or that release exists, 4 the disk is full or broken,
    5 the bundle is not what its manifest says.
    """


@release.command()
@_repo
@_json
def init(repo: Path, *, as_json: bool) -> None:
    """Make a repository with new keys, one for each role.

    Keep REPO/keys/root.*.pem and REPO/keys/targets.*.pem offline. `rotate` needs the first, `add` the second; `renew`,
    which runs online, needs only the keys of snapshot and timestamp.

    Examples:
      fedge release init releases

    Exit codes: 0 done, 2 REPO is not empty, 4 it cannot be written.
    """
    _print_state(repo, Repository.make(repo), as_json=as_json)


@release.command()
@_repo
@click.argument("bundle", type=click.Path(path_type=Path))
@option(
    "--name",
    heading=Heading.BUNDLES,
    default="manifest",
    show_default=True,
    help="This name distinguishes bundles of one release.",
)
@option(
    "--number",
    heading=Heading.BUNDLES,
    type=click.IntRange(1),
    help="The release has this number; by default it is that of the bundle.",
)
@_json
def add(repo: Path, bundle: Path, name: str, number: int | None, *, as_json: bool) -> None:
    """Release a bundle, or the newest one of an agent's home: sign its manifest, keep its files for devices to fetch.

    A release never changes: count up. A device takes no release below the highest that it has had, whoever made it.
    `fedge rollout make` releases what a coordinator has learned.

    Examples:
      fedge release add releases bundle
      fedge release add releases cam1 --number 8
      fedge release add releases cam1/bundles/7 --name cam1

    Exit codes: 0 done, 2 no repository or no bundle there, a key is missing, or that release exists with another
    content, 4 the disk is full or broken, 5 the bundle is not what its manifest says.
    """
    if not bundle.is_dir():
        raise ConfigError(f"no bundle at {bundle}: name the folder that holds manifest.json")
    target = Repository(repo).add(find_newest_bundle(bundle).folder, name, number=number)
    click.echo(json.dumps({"repo": str(repo), "target": target}) if as_json else target)


@release.command()
@_repo
@click.argument("role", type=click.Choice(ROLES))
@_json
def rotate(repo: Path, role: str, *, as_json: bool) -> None:
    """Replace the key of a role that was lost, leaked or is old. Devices follow through the new root.

    A lost root key cannot be replaced this way, since the old one must sign the new one: devices then need a new root
    of trust by hand.

    Examples:
      fedge release rotate releases timestamp

    Exit codes: 0 done, 2 no repository there or a key is missing, 4 the disk is full or broken.
    """
    repository = Repository(repo)
    repository.rotate(role)
    _print_state(repo, repository, as_json=as_json)


@release.command()
@_repo
@_json
def renew(repo: Path, *, as_json: bool) -> None:
    """Sign the newest state again before it expires; run it daily, for example by cron.

    The command needs the keys of snapshot and timestamp, and those of root and targets only after half of their
    lifetime. A device that hears nothing new within a role's lifetime refuses all updates.

    Examples:
      fedge release renew releases

    Exit codes: 0 done, 2 no repository there or a key is missing, 4 the disk is full or broken.
    """
    repository = Repository(repo)
    repository.renew()
    _print_state(repo, repository, as_json=as_json)


@release.command()
@_repo
@_json
def show(repo: Path, *, as_json: bool) -> None:
    """Show the releases, and when the signatures expire.

    Examples:
      fedge release show releases

    Exit codes: 0 done, 2 no repository there.
    """
    _print_state(repo, Repository(repo), as_json=as_json)


def _print_state(repo: Path, repository: Repository, *, as_json: bool) -> None:
    record: dict[str, Any] = {
        "repo": str(repo),
        "root": str(repo / "metadata" / "1.root.json"),
        "targets": repository.list_targets(),
        "expires": {role: date.isoformat() for role, date in repository.get_expiries().items()},
    }
    if as_json:
        click.echo(json.dumps(record))
        return
    click.echo(f"{repo}: root of trust for devices: {record['root']}")
    for role, date in record["expires"].items():
        click.echo(f"  {role:<10} signed until {date} (renewed: {LIFETIMES[role].days} days)")
    for target in record["targets"] or ["nothing released yet"]:
        click.echo(f"  {target}")
