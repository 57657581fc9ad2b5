"""The manifest of a bundle: what `export` writes and `deploy` reads.

A bundle is a folder that holds

    manifest.json            the struct below; its SHA-256 is the bundle's digest
    skeleton.onnx            the graph without numbers: gate, one branch per candidate, fusion
    <sha256>.safetensors     one file per candidate and one for the gate and the calibration

The skeleton is the same for all devices of an architecture and number of candidates, so it cannot name files by what
they hold: it names *slots*. Slot names are as long as file names, so that the reader puts the files' names into the
serialised graph by replacing bytes (`with_parts`), and a new expert is one new file.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Final, Literal

import msgspec
from msgspec import Meta, Struct

from fedge.errors import UpdateRejected
from fedge.messages import Count, Digest, NonNegative, Role, Share
from fedge.task import TaskSpec

SCHEMA_VERSION: Final = 1
MANIFEST: Final = "manifest.json"
SKELETON: Final = "skeleton.onnx"
INPUT: Final = "x"
OUTPUTS: Final = ("probabilities", "weights", "energies")
MAX_MANIFEST_BYTES: Final = 1 << 20

Name = Annotated[str, Meta(min_length=1, max_length=100)]
Positive = Annotated[float, Meta(gt=0)]


class _Part(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    pass


class Part(_Part, frozen=True, kw_only=True):
    """A file of the bundle, by what it holds."""

    digest: Digest
    size_bytes: Annotated[int, Meta(ge=1, le=2**40)]

    @property
    def file_name(self) -> str:
        """Name of the file in the bundle's folder."""
        return f"{self.digest}.safetensors"


class CandidateInfo(_Part, frozen=True, kw_only=True):
    """A model of the mixture, its calibration and weight (fedge.md sections 7 to 9)."""

    role: Role
    name: Name
    part: Part
    temperature: Positive
    kappa: NonNegative
    energy_mean: float
    energy_std: NonNegative
    weight: Share


class GuardInfo(_Part, frozen=True, kw_only=True):
    """The alternative that has half of the output (fedge.md section 11)."""

    candidate: Count
    temperature: Positive
    kappa: NonNegative


class Fusion(_Part, frozen=True, kw_only=True):
    """How the candidates are mixed; all of it is in the graph already, here it is for people and tools."""

    beta: NonNegative
    energy_clip: Positive | None  # None: raw energy without bound
    top: Annotated[int, Meta(ge=1)]
    guard: GuardInfo | None


class Manifest(_Part, frozen=True, kw_only=True):
    """Everything about a bundle but the numbers of its models.

    `max_abs_diff` is the largest difference of a probability between torch and ONNX Runtime when the bundle was
    written. `expires`, `key_id` and `signature` are reserved for signed releases.
    """

    schema_version: Literal[1] = SCHEMA_VERSION
    task: TaskSpec
    method: Name
    release: Count
    skeleton: Part
    gate: Part
    candidates: Annotated[tuple[CandidateInfo, ...], Meta(min_length=1, max_length=64)]
    fusion: Fusion
    metrics: dict[str, float]
    max_abs_diff: NonNegative
    expires: None = None
    key_id: None = None
    signature: None = None

    @property
    def parts(self) -> tuple[Part, ...]:
        """The parts in the order of their slots: the candidates, then the gate."""
        return (*(candidate.part for candidate in self.candidates), self.gate)


class _Version(Struct):
    schema_version: int


def encode(manifest: Manifest) -> bytes:
    """JSON, equal bytes for equal manifests."""
    return msgspec.json.format(msgspec.json.encode(manifest, order="deterministic"), indent=2) + b"\n"


def decode(data: bytes) -> Manifest:
    """Parse a manifest from outside.

    Raises:
        UpdateRejected: it is not JSON, of another schema version, lacks a field, has an unknown one or a bad value.
    """
    if len(data) > MAX_MANIFEST_BYTES:
        raise UpdateRejected(f"manifest of {len(data)} bytes, at most {MAX_MANIFEST_BYTES} allowed")
    try:
        version = msgspec.json.decode(data, type=_Version).schema_version
        if version != SCHEMA_VERSION:
            raise UpdateRejected(f"manifest of schema version {version}, this runtime reads {SCHEMA_VERSION}")
        manifest = msgspec.json.decode(data, type=Manifest)
    except (msgspec.DecodeError, RecursionError) as error:
        raise UpdateRejected(f"manifest: {error}") from error
    guard = manifest.fusion.guard
    if guard is not None and guard.candidate >= len(manifest.candidates):
        raise UpdateRejected(f"manifest: guard names candidate {guard.candidate} of {len(manifest.candidates)}")
    return manifest


def slot(index: int) -> str:
    """The name by which a skeleton calls its part number `index`, as long as a part's file name."""
    return f"{f'slot-{index}-':.<64}.safetensors"


def with_parts(skeleton: bytes, parts: Sequence[Part]) -> bytes:
    """The serialised graph with the files' names in place of the slots'; lengths, and so the encoding, stay."""
    for index, part in enumerate(parts):
        skeleton = skeleton.replace(slot(index).encode(), part.file_name.encode())
    return skeleton
