"""Our client of signed repositories behind the command line that tuf-conformance drives (its CLIENT-CLI.md).

What is under test is `deploy.updates.trust.Trust`; only where bytes come from is different: a web server instead of a
broker.
"""

from __future__ import annotations

import os
import shutil
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.error import HTTPError
from urllib.parse import quote
from urllib.request import urlopen

import click
from tuf.api.exceptions import DownloadHTTPError
from tuf.ngclient import FetcherInterface

from deploy.updates import trust
from fedge.errors import FedgeError


class Web(FetcherInterface):
    """A fetcher that turns our names into addresses of a web server."""

    def __init__(self, metadata_url: str, targets_url: str) -> None:
        self._metadata_url = metadata_url.rstrip("/")
        self._targets_url = targets_url.rstrip("/")

    def _fetch(self, url: str) -> Iterator[bytes]:
        metadata = url.removeprefix(trust._METADATA)
        target = quote(url.removeprefix(trust._TARGETS))
        address = f"{self._targets_url}/{target}" if metadata == url else f"{self._metadata_url}/{metadata}"
        try:
            with urlopen(address) as response:
                while piece := response.read(1 << 14):
                    yield piece
        except HTTPError as error:
            raise DownloadHTTPError(str(error), error.code) from error


@click.group()
@click.option("--metadata-dir", type=click.Path(path_type=Path), required=True)
@click.option("--metadata-url", default="")
@click.option("--target-name", "targets", multiple=True)
@click.option("--target-base-url", default="")
@click.option("--target-dir", type=click.Path(path_type=Path))
@click.pass_context
def main(context: click.Context, metadata_dir: Path, metadata_url: str, target_base_url: str, **_: object) -> None:
    """One step of a test. The device's home lies beside the folder, which is its HOME/trust."""
    home = metadata_dir.parent / "home"
    if not home.is_dir():
        home.mkdir()
        (home / "trust").symlink_to(metadata_dir)
    trust._given = lambda files: Web(metadata_url, target_base_url)  # type: ignore[assignment]
    context.obj = home
    context.call_on_close(lambda: _by_this_clock(home / "trust" / "timestamp.json"))


def _by_this_clock(file: Path) -> None:
    """The suite sets this process's clock, not that of the file system; on a device they are one."""
    if file.exists():
        os.utime(file, (time.time(), time.time()))


@main.command()
@click.argument("root", type=click.Path(path_type=Path))
@click.pass_obj
def init(home: Path, root: Path) -> None:
    """Give the device its root of trust."""
    trust.install_root(home, root.read_bytes())
    shutil.copy(root, home / "trust" / "root.json")


@main.command()
@click.pass_obj
def refresh(home: Path) -> None:
    """Verify the newest metadata."""
    client = trust.Trust(home)
    client._require_clock()
    with client._translate_errors():
        client._make_updater({}).refresh()


@main.command()
@click.pass_context
def download(context: click.Context) -> None:
    """Verify targets, and keep them."""
    given = context.parent.params if context.parent else {}
    for name in given["targets"]:
        data = trust.Trust(context.obj).verify_manifest({}, name)
        (given["target_dir"] / quote(name, "")).write_bytes(data)


if __name__ == "__main__":
    try:
        main()
    except FedgeError as error:
        click.echo(error, err=True)
        sys.exit(1)
