"""`fedge export`: verify the bundles that agents wrote, and pack the newest for other devices."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
import msgspec
import numpy as np

from export import parity
from export.bundle import pack_bundle
from export.int8 import Int8Limits, Int8Report, quantise_bundle
from fedge.bundle.manifest import MANIFEST, Bundle, read_bundle, read_manifest
from fedge.data.validation import load_validation
from fedge.errors import ConfigError, UpdateRejected
from fedge.system.help import Command, json_lines_option, option
from fedge.system.text import Heading


@click.command(cls=Command)
@click.argument("homes", nargs=-1, required=True, metavar="HOME...", type=click.Path(path_type=Path))
@option(
    "--out",
    heading=Heading.OUTPUT,
    type=click.Path(path_type=Path),
    help="The newest bundle of HOME is copied to this folder.",
)
@option(
    "--int8",
    heading=Heading.BUNDLES,
    is_flag=True,
    help="The copy also has the graph in 8 bits, calibrated on HOME's validation samples.",
)
@option(
    "--int8-agreement",
    heading=Heading.BUNDLES,
    type=click.FloatRange(0, 1),
    default=Int8Limits().agreement,
    show_default=True,
    help="The graph in 8 bits must give the class of float32 on at least this share of samples.",
)
@option(
    "--int8-accuracy-drop",
    heading=Heading.BUNDLES,
    type=click.FloatRange(0, 1),
    default=Int8Limits().accuracy_drop,
    show_default=True,
    help="The graph in 8 bits may lose at most this much accuracy on the device's samples.",
)
@option(
    "--int8-latency-ratio",
    heading=Heading.BUNDLES,
    type=click.FloatRange(0),
    default=Int8Limits().latency_ratio,
    show_default=True,
    help="The graph in 8 bits may take at most this time per sample on this machine, relative to float32.",
)
@json_lines_option("home")
def export(
    homes: tuple[Path, ...],
    out: Path | None,
    int8_agreement: float,
    int8_accuracy_drop: float,
    int8_latency_ratio: float,
    *,
    int8: bool,
    as_json: bool,
) -> None:
    """Write the bundle of a device or a model for ONNX Runtime.

    HOME is an agent's home, or a bundle. Its newest bundle is verified: every digest, and a run in ONNX Runtime. --out
    copies it; with several homes, each to a folder of its name. With --int8 the copy can also run in 8 bits (`fedge
    infer --runtime int8`), if that keeps the limits. Run it on the board that will predict.

    Examples:
      fedge export cam1
      fedge export cam1 --out bundle
      fedge export cam1 cam2 --out bundles --json
      fedge export cam1 --out small --int8

    Exit codes: 0 verified, 2 no bundle or validation samples there or --out exists, 4 the copy cannot be written, 5 a
    bundle is not what its manifest says, or 8 bits predict too badly or too slowly.
    """
    if int8 and out is None:
        raise ConfigError("--int8 makes a copy: name a folder for it with --out")
    for home in homes:
        bundle = find_newest_bundle(home)
        _run_once(bundle)
        target = None if out is None else out / home.resolve().name if len(homes) > 1 else out
        record = _make_record(home, bundle, target)
        if target is not None and int8:
            validation = load_validation(home, bundle.manifest.task)
            limits = Int8Limits(
                accuracy_drop=int8_accuracy_drop, agreement=int8_agreement, latency_ratio=int8_latency_ratio
            )
            record["int8"] = quantise_bundle(bundle, validation, target, limits)
        elif target is not None:
            with pack_bundle(bundle, target):
                pass
        click.echo(msgspec.json.encode(record).decode() if as_json else _format_record(record))


def find_newest_bundle(home: Path) -> Bundle:
    """Return the verified bundle in HOME itself or, if there is none, that of the highest release in HOME/bundles.

    Raises:
        ConfigError: there is no bundle.
        UpdateRejected: the bundle is not what its manifest says.
    """
    if (home / MANIFEST).exists():
        return read_bundle(home)
    found = [path.parent for path in sorted(home.glob(f"bundles/[!.]*/{MANIFEST}"))]
    if not found:
        raise ConfigError(f"no bundle in {home / 'bundles'}: an agent writes one at the end of a federation")
    return read_bundle(max(found, key=lambda folder: read_manifest(folder)[0].release))


def _run_once(bundle: Bundle) -> None:
    x = np.random.default_rng(0).random((2, *bundle.manifest.task.input_shape), dtype=np.float32)
    probabilities = parity.run_graph(bundle.graph, bundle.folder, x)[0]
    if not np.allclose(probabilities.sum(axis=1), 1, atol=1e-5):
        raise UpdateRejected(f"{bundle.folder}: its probabilities do not sum to 1")


def _make_record(home: Path, bundle: Bundle, target: Path | None) -> dict[str, Any]:
    manifest = bundle.manifest
    return {
        "home": str(home),
        "bundle": str(bundle.folder),
        "digest": bundle.digest,
        "release": manifest.release,
        "task": manifest.task.name,
        "method": manifest.method,
        "candidates": [{"name": c.name, "role": c.role, "weight": c.weight} for c in manifest.candidates],
        "size_bytes": sum(part.size_bytes for part in manifest.files.values()),
        "max_abs_diff": manifest.max_abs_diff,
        "verified": True,
        "out": None if target is None else str(target),
    }


def _format_record(record: dict[str, Any]) -> str:
    shares = ", ".join(f"{c['name']} {c['weight']:.2f}" for c in record["candidates"])
    copied = f" -> {record['out']}" if record["out"] else ""
    small = ""
    if "int8" in record:
        report: Int8Report = record["int8"]
        small = (
            f"\n  8 bits: {report.size_bytes / 1e6:.2f} MB, the class of float32 on {report.agreement:.3f} of "
            f"{report.n} samples, 99 % of probabilities within {report.p99_difference:.3f}\n"
            f"  {report.latency_int8_ms:.3f} ms for a sample on this machine, float32 {report.latency_ms:.3f} ms"
        )
    return (
        f"{record['bundle']}{copied}\n  release {record['release']}, {record['task']}, {record['method']}: {shares}\n"
        f"  {record['size_bytes'] / 1e6:.2f} MB, digests verified, runs in ONNX Runtime, "
        f"largest difference to torch {record['max_abs_diff']:.1e}{small}"
    )
