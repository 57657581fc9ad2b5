"""The manifest and the names of parts. What a tampered bundle meets: tests/deploy/inference/test_runtime.py."""

import json
import struct
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import save

from fedge.bundle.manifest import (
    MANIFEST,
    SKELETON,
    Part,
    decode_manifest,
    encode_manifest,
    format_slot,
    insert_file_names,
    read_bundle,
)
from fedge.errors import UpdateRejected
from fedge.system.files import compute_digest
from tests.deploy.bundles import sha256, variant

GOLDEN = Path(__file__).parents[2] / "deploy" / "golden" / "bundle"


def test_round_trip():
    data = (GOLDEN / MANIFEST).read_bytes()
    assert encode_manifest(decode_manifest(data)) == data


def test_every_prefix_is_refused():
    data = (GOLDEN / MANIFEST).read_bytes().rstrip()
    for end in range(0, len(data), 7):
        with pytest.raises(UpdateRejected):
            decode_manifest(data[:end])


def test_text_that_is_no_utf_8_is_refused():
    data = (GOLDEN / MANIFEST).read_bytes()
    with pytest.raises(UpdateRejected, match="utf-8"):
        decode_manifest(data.replace(b'"digits"', b'"digit\xf3"', 1))


@given(st.binary(max_size=300))
def test_bytes_never_raise_anything_else(data):
    with pytest.raises(UpdateRejected):
        decode_manifest(data)


def test_slots_are_as_long_as_file_names():
    part = Part(digest=compute_digest(b""), size_bytes=1)
    assert {len(format_slot(k)) for k in (0, 9, 10, 64)} == {len(part.file_name)}
    assert len({format_slot(k) for k in range(65)}) == 65


def test_slots_become_file_names():
    parts = [Part(digest=compute_digest(bytes([k])), size_bytes=1) for k in range(12)]
    text = " ".join(format_slot(k) for k in range(12)).encode()
    assert insert_file_names(text, parts) == " ".join(part.file_name for part in parts).encode()


def header(**tensors):
    text = json.dumps(tensors).encode()
    return struct.pack("<Q", len(text)) + text


def tensor(start, stop, shape, dtype="F32"):
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, stop]}


@pytest.mark.parametrize(
    "data",
    [
        b"1234567",
        struct.pack("<Q", 2**60) + b"{}",
        struct.pack("<Q", 1) + b"{}",
        struct.pack("<Q", 4) + b"nope",
        struct.pack("<Q", 2) + b"[]",
        header(a=tensor(0, 8, [2])) + bytes(4),
        header(a=tensor(0, 4, [1])) + bytes(8),
        header(a=tensor(4, 8, [1])) + bytes(8),
        header(a=tensor(0, 8, [2]), b=tensor(4, 12, [2])) + bytes(12),
        header(a=tensor(0, 8, [3])) + bytes(8),
        header(a=tensor(0, 8, [-1, -2])) + bytes(8),
        header(a=tensor(0, 4, [1], "F64")) + bytes(4),
        header(a=tensor(0, 4, ["1"])) + bytes(4),
        header(a={"dtype": "F32"}) + bytes(4),
        header(__metadata__={"note": "x"}, a=tensor(0, 4, [1])) + bytes(4),
    ],
)
def test_malformed_parts_are_refused_though_their_digest_is_right(tmp_path, data):
    write(tmp_path, data)
    with pytest.raises(UpdateRejected, match="header"):
        read_bundle(tmp_path)


def test_a_sound_part_is_read(tmp_path):
    write(tmp_path, save({"a": np.zeros((2, 3), np.float32), "n": np.zeros((), np.int64)}))
    assert read_bundle(tmp_path).manifest.release == 3


def test_what_this_device_has_verified_before_is_not_hashed_again_but_must_still_be_sound(tmp_path):
    data = save({"a": np.zeros((2, 3), np.float32)})
    write(tmp_path, data)
    (part,) = tmp_path.glob("*.safetensors")
    part.write_bytes(data[:-1] + b"\1")
    assert read_bundle(tmp_path, again=True).manifest.release == 3
    with pytest.raises(UpdateRejected, match="does not hash"):
        read_bundle(tmp_path)
    part.write_bytes(data + b"\1")
    with pytest.raises(UpdateRejected, match="bytes, the manifest says"):
        read_bundle(tmp_path, again=True)


def write(folder, data):
    """The golden bundle with `data` as its only part."""
    content = json.loads((GOLDEN / MANIFEST).read_bytes())
    part = {"digest": compute_digest(data), "size_bytes": len(data)}
    content["gate"] = part
    for candidate in content["candidates"]:
        candidate["part"] = part
    (folder / f"{part['digest']}.safetensors").write_bytes(data)
    (folder / "skeleton.onnx").write_bytes((GOLDEN / "skeleton.onnx").read_bytes())
    (folder / MANIFEST).write_text(json.dumps(content))


def test_a_graph_that_may_never_end_is_refused_before_it_is_run(tmp_path):
    folder = variant(tmp_path / "1", release=1)
    graph = bytes.fromhex("3a0c0a0a22044c6f6f702a023200")  # graph { node { op_type: "Loop" attribute { g {} } } }
    (folder / SKELETON).write_bytes(graph)
    manifest = json.loads((folder / MANIFEST).read_bytes())
    manifest["skeleton"] = {"digest": sha256(graph), "size_bytes": len(graph)}
    (folder / MANIFEST).write_text(json.dumps(manifest))

    with pytest.raises(UpdateRejected, match="node Loop has a graph of its own"):
        read_bundle(folder)
