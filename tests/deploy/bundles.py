"""Bundles like the golden one, of other releases, with another gate or none that works. No torch needed."""

import hashlib
import json
import shutil
from pathlib import Path

import numpy as np

GOLDEN = Path(__file__).parent / "golden" / "bundle"
CLASSES = len(json.loads((GOLDEN / "manifest.json").read_bytes())["task"]["classes"])


def sha256(data):
    return hashlib.sha256(data).hexdigest()


def variant(folder, *, release, gate=None, **changes):
    """Write a bundle of this release; `gate`: a function that changes the bytes of the gate's tensors."""
    shutil.copytree(GOLDEN, folder)
    path = folder / "manifest.json"
    manifest = json.loads(path.read_bytes()) | {"release": release} | changes
    if gate is not None:
        old = folder / f"{manifest['gate']['digest']}.safetensors"
        data = gate(old.read_bytes())
        old.unlink()
        manifest["gate"] = {"digest": sha256(data), "size_bytes": len(data)}
        (folder / f"{sha256(data)}.safetensors").write_bytes(data)
    path.write_text(json.dumps(manifest, indent=2) + "\n")
    return folder


def other_gate(data):
    """A gate part of the same shape whose weights differ in their last bit: a new part for a bundle that works."""
    start = 8 + int.from_bytes(data[:8], "little")
    begin, end = json.loads(data[8:start])["gate.hidden.weight"]["data_offsets"]
    changed = bytearray(data)
    for i in range(start + begin, start + end, 4):
        changed[i] ^= 1
    return bytes(changed)


def poor_gate(data):
    """Class priors so strong that one class is always the answer: a bundle that runs and is wrong."""
    return _with(data, "prior", lambda n: np.tile(np.array([50.0] + [0.0] * (CLASSES - 1), np.float32), n // CLASSES))


def broken_gate(data):
    """A bundle that runs and puts out NaN."""
    return _with(data, "prior", lambda n: np.full(n, np.nan, np.float32))


def _with(data, tensor, values):
    start = 8 + int.from_bytes(data[:8], "little")
    begin, end = json.loads(data[8:start])[tensor]["data_offsets"]
    return data[: start + begin] + values((end - begin) // 4).tobytes() + data[start + end :]


def digest(folder):
    return sha256((folder / "manifest.json").read_bytes())


def source(folder):
    """What `Slots.stage` takes: a bundle's manifest, and where its files lie."""
    return (folder / "manifest.json").read_bytes(), folder
