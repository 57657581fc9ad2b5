"""`fedge export`: verify the bundles that agents wrote, and pack the newest for other devices."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import Any

import click
import msgspec
import numpy as np

from export import parity
from fedge.bundle import MANIFEST, SKELETON, Bundle, read
from fedge.errors import ConfigError, StoreError, UpdateRejected
from fedge.files import sync_folder


@click.command()
@click.argument("homes", nargs=-1, required=True, metavar="HOME...", type=click.Path(path_type=Path))
@click.option("--out", type=click.Path(path_type=Path), help="Copy the newest bundle of HOME there.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object per home, a line each.")
def export(homes: tuple[Path, ...], out: Path | None, *, as_json: bool) -> None:
    """Write the bundle of a device or a model for ONNX Runtime.

    HOME is an agent's home, or a bundle. Its newest bundle is verified: every digest, and a run in ONNX Runtime. With
    --out it is copied, of several homes each to a folder of its name.

    \b
    Examples:
      fedge export cam1
      fedge export cam1 --out bundle
      fedge export cam1 cam2 --out bundles --json

    \b
    Exit codes: 0 verified, 2 no bundle there or --out exists, 4 the copy cannot be written, 5 a bundle is not what its
    manifest says.
    """  # noqa: D301 - click needs the character itself
    for home in homes:
        bundle = newest(home)
        _run_once(bundle)
        target = None if out is None else out / home.resolve().name if len(homes) > 1 else out
        if target is not None:
            pack(bundle, target)
        record = _record(home, bundle, target)
        click.echo(msgspec.json.encode(record).decode() if as_json else _text(record))


def newest(home: Path) -> Bundle:
    """The verified bundle with the highest release in HOME/bundles, or that in HOME itself.

    Raises:
        ConfigError: there is none.
        UpdateRejected: it is not what its manifest says.
    """
    if (home / MANIFEST).exists():
        return read(home)
    found = [read(path.parent) for path in sorted(home.glob(f"bundles/[!.]*/{MANIFEST}"))]
    if not found:
        raise ConfigError(f"no bundle in {home / 'bundles'}: an agent writes one at the end of a federation")
    return max(found, key=lambda bundle: bundle.manifest.release)


def pack(bundle: Bundle, target: Path) -> None:
    """Copy the files that the manifest names, and only those, all or nothing.

    Raises:
        ConfigError: `target` exists.
        StoreError: it cannot be written.
    """
    if target.exists():
        raise ConfigError(f"{target} exists already: name a new folder")
    names = {MANIFEST, SKELETON, *(part.file_name for part in bundle.manifest.parts)}
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent, prefix=".unfinished-") as folder:
            copy = Path(folder) / "bundle"
            copy.mkdir()
            for name in sorted(names):
                shutil.copyfile(bundle.folder / name, copy / name)
            read(copy)
            copy.rename(target)
        sync_folder(target.parent)
    except OSError as error:
        raise StoreError(f"cannot write {target}: {error}") from error


def _run_once(bundle: Bundle) -> None:
    x = np.random.default_rng(0).random((2, *bundle.manifest.task.input_shape), dtype=np.float32)
    probabilities = parity.run(bundle.graph, str(bundle.folder), x)[0]
    if not np.allclose(probabilities.sum(axis=1), 1, atol=1e-5):
        raise UpdateRejected(f"{bundle.folder}: its probabilities do not sum to 1")


def _record(home: Path, bundle: Bundle, target: Path | None) -> dict[str, Any]:
    manifest = bundle.manifest
    return {
        "home": str(home),
        "bundle": str(bundle.folder),
        "digest": bundle.digest,
        "release": manifest.release,
        "task": manifest.task.name,
        "method": manifest.method,
        "candidates": [{"name": c.name, "role": c.role, "weight": c.weight} for c in manifest.candidates],
        "size_bytes": manifest.skeleton.size_bytes + sum(part.size_bytes for part in set(manifest.parts)),
        "max_abs_diff": manifest.max_abs_diff,
        "verified": True,
        "out": None if target is None else str(target),
    }


def _text(record: dict[str, Any]) -> str:
    shares = ", ".join(f"{c['name']} {c['weight']:.2f}" for c in record["candidates"])
    copied = f" -> {record['out']}" if record["out"] else ""
    return (
        f"{record['bundle']}{copied}\n  release {record['release']}, {record['task']}, {record['method']}: {shares}\n"
        f"  {record['size_bytes'] / 1e6:.2f} MB, digests verified, runs in ONNX Runtime, "
        f"largest difference to torch {record['max_abs_diff']:.1e}"
    )
