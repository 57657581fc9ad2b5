"""The manifest of a bundle: `export` writes it, `deploy` reads it.

A bundle is a folder with

    manifest.json            the struct below; its SHA-256 is the bundle's digest
    skeleton.onnx            the graph without weights: gate, one branch per candidate, fusion
    branch.onnx              one candidate's network without weights, for engines that run candidates one by one
    int8.onnx                optional: the whole graph, candidates in 8 bits, weights inside
    <sha256>.safetensors     one file per candidate and one for the gate and the calibration

The skeleton is the same for all devices with the same architecture and number of candidates, so it cannot name files by
content; it names *slots* instead. Slot names are as long as file names, so the reader inserts file names into the
serialised graph by replacing bytes (`insert_file_names`). A new expert is one new file.

`read_bundle` verifies every byte before anything else sees it. It checks first the manifest (schema, version, ranges),
then the skeleton (size, SHA-256), then each part (a plain file, size, SHA-256, a safetensors header that describes
exactly its data). It does not check the manifest's origin. A release's manifest is a signed target
(`deploy.updates.trust`); a folder on the device is as trustworthy as those who can write to it.
"""

from __future__ import annotations

import math
import mmap
import os
from collections.abc import Sequence
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path
from typing import Annotated, Final, Literal

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType

from fedge.bundle.graph_reader import explain_unbounded
from fedge.data.preprocessing import is_square_image
from fedge.data.problems.names import PRINTABLE
from fedge.data.task import MAX_POOL, TaskSpec
from fedge.errors import MALFORMED, ConfigError, ProtocolError, UpdateRejected, raise_as
from fedge.system.files import compute_digest
from fedge.system.moved import alias_names
from fedge.tensors.layout import read_places
from fedge.wire.messages import Count, Digest, NonNegative, Role, Share

SCHEMA_VERSION: Final = 1
MANIFEST: Final = "manifest.json"
SKELETON: Final = "skeleton.onnx"
BRANCH: Final = "branch.onnx"
INT8: Final = "int8.onnx"
GRAPHS: Final = (SKELETON, BRANCH, INT8)
OUTPUTS: Final = ("weights", "energies")
"""Names of the outputs of every graph, after those of the task's problem."""
OUTLIER_BELOW: Final = "outlier_below"
"""Name of a metric: samples with a free energy below it are flagged as out of distribution."""
MAX_MANIFEST_BYTES: Final = 1 << 20
MAX_SKELETON_BYTES: Final = 1 << 26
MAX_INT8_BYTES: Final = 1 << 30
MAX_SCORES: Final = 1024

Name = Annotated[str, Meta(min_length=1, max_length=100, pattern=PRINTABLE)]
Positive = Annotated[float, Meta(gt=0)]


class _Part(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    pass


class Part(_Part, frozen=True, kw_only=True):
    """A file of the bundle, named by its content."""

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
    energy_max: float | UnsetType = UNSET  # largest standardised energy over the validation samples
    share: Share | UnsetType = UNSET  # mean share in the mixture over the validation samples, without the guard


class GuardInfo(_Part, frozen=True, kw_only=True):
    """The guard's candidate, which has half of the output (fedge.md section 11)."""

    candidate: Count
    temperature: Positive
    kappa: NonNegative


class Fusion(_Part, frozen=True, kw_only=True):
    """How the graph mixes the candidates. The graph contains this already; it is repeated for people and tools."""

    beta: NonNegative
    energy_clip: Positive | None  # None for unbounded raw energy
    top: Annotated[int, Meta(ge=1)]
    guard: GuardInfo | None
    space: Literal["logit"] | UnsetType = UNSET  # set by fedge 0.1, which could mix logits; only the graph still does
    energy_temperature: Positive | UnsetType = UNSET  # also set by fedge 0.1; 1 if omitted


class PoolInfo(_Part, frozen=True, kw_only=True):
    """PM-MoE's pool: the candidates are private modules, weighed by a gate on logits (pm_moe.md section 5).

    `trunk` is the shared network if the modules are heads, else None. `own` is the index of the device's own module.
    """

    trunk: Part | None
    own: Count
    anchored: bool


class Reference(_Part, frozen=True, kw_only=True):
    """Statistics of the mixture on the device's validation samples at export time, to detect drift and outliers.

    A sample's free energy is -sum_k alpha_k e_k, with the weights alpha_k and standardised energies e_k of the graph.
    Its gate entropy is -sum_k alpha_k log alpha_k, in nats.
    """

    n: Annotated[int, Meta(ge=2)]
    free_energy_mean: float
    free_energy_std: NonNegative
    gate_entropy_mean: NonNegative
    gate_entropy_std: NonNegative
    outlier_above: float  # a sample with larger free energy is flagged as out of distribution


class Manifest(_Part, frozen=True, kw_only=True):
    """Everything in a bundle except its weights.

    `metrics` holds figures for people. It also holds `OUTLIER_BELOW`, since a runtime of fedge 0.1 refuses unknown
    fields but reads any metric. `max_abs_diff` is the largest difference of a probability between torch and ONNX
    Runtime at export time. `scores` are sorted, one for each validation sample, from which sets of any coverage follow
    (docs/methods/conformal.md); a bundle without labelled validation samples, or of a problem without sets, has none.
    """

    schema_version: Literal[1] = SCHEMA_VERSION
    task: TaskSpec
    method: Name
    release: Count
    skeleton: Part
    branch: Part | UnsetType = UNSET  # omitted for pools and in older bundles
    int8: Part | UnsetType = UNSET
    gate: Part
    candidates: Annotated[tuple[CandidateInfo, ...], Meta(min_length=1, max_length=MAX_POOL)]
    fusion: Fusion
    pool: PoolInfo | UnsetType = UNSET  # omitted for mixtures
    reference: Reference | UnsetType = UNSET  # omitted with fewer than 2 validation samples
    scores: Annotated[tuple[float, ...], Meta(max_length=MAX_SCORES)] | UnsetType = UNSET
    metrics: dict[str, float]
    max_abs_diff: NonNegative
    turned: Annotated[int, Meta(ge=1, le=3)] | UnsetType = UNSET  # quarters; omitted if nothing is turned

    @property
    def quarters(self) -> int:
        """By how many quarters the runtime turns images counter-clockwise before the graph takes them."""
        return 0 if isinstance(self.turned, UnsetType) else self.turned

    @property
    def parts(self) -> tuple[Part, ...]:
        """The parts in slot order: the candidates', the gate's, then the trunk's if there is one."""
        trunk = (self.pool.trunk,) if isinstance(self.pool, PoolInfo) and self.pool.trunk else ()
        return (*(candidate.part for candidate in self.candidates), self.gate, *trunk)

    @property
    def usual_range(self) -> tuple[float, float]:
        """Lowest and highest free energy of a usual sample; infinite without a reference."""
        if isinstance(self.reference, UnsetType):
            return -math.inf, math.inf
        return self.metrics.get(OUTLIER_BELOW, -math.inf), self.reference.outlier_above

    @property
    def files(self) -> dict[str, Part]:
        """All files of the bundle except the manifest, by name: graphs, then parts, each once."""
        graphs = zip(GRAPHS, (self.skeleton, self.branch, self.int8), strict=True)
        named = {name: part for name, part in graphs if isinstance(part, Part)}
        return named | {part.file_name: part for part in self.parts}


class _Version(Struct):
    schema_version: int


_IF_NEWER: Final = "; if a newer fedge made this bundle, update fedge on this device"


def encode_manifest(manifest: Manifest) -> bytes:
    """Serialise the manifest as JSON; equal manifests give equal bytes."""
    return msgspec.json.format(msgspec.json.encode(manifest, order="deterministic"), indent=2) + b"\n"


def decode_manifest(data: bytes) -> Manifest:
    """Parse an untrusted manifest.

    Raises:
        UpdateRejected: the data is not JSON, has another schema version, lacks a field, or has an unknown field or a
            bad value.
    """
    if len(data) > MAX_MANIFEST_BYTES:
        raise UpdateRejected(f"the manifest has {len(data)} bytes; at most {MAX_MANIFEST_BYTES} allowed")
    try:
        version = msgspec.json.decode(data, type=_Version).schema_version
        if version != SCHEMA_VERSION:
            raise UpdateRejected(
                f"the manifest has schema version {version}; this runtime reads {SCHEMA_VERSION}{_IF_NEWER}"
            )
        manifest = msgspec.json.decode(data, type=Manifest)
    except MALFORMED as error:
        raise UpdateRejected(f"manifest: {error}{_IF_NEWER if 'unknown field' in str(error) else ''}") from error
    guard = manifest.fusion.guard
    if guard is not None and guard.candidate >= len(manifest.candidates):
        raise UpdateRejected(f"manifest: guard names candidate {guard.candidate} of {len(manifest.candidates)}")
    if manifest.scores and list(manifest.scores) != sorted(manifest.scores):
        raise UpdateRejected("manifest: the scores are not sorted")
    if manifest.quarters and not is_square_image(manifest.task.input_shape):
        raise UpdateRejected("manifest: only square images can be turned")
    return manifest


def format_slot(index: int) -> str:
    """Return the skeleton's name for part number `index`, as long as a part's file name."""
    return f"{f'slot-{index}-':.<64}.safetensors"


def insert_file_names(skeleton: bytes, parts: Sequence[Part]) -> bytes:
    """Replace the slot names in a serialised graph by file names, whose equal length keeps the encoding valid."""
    for index, part in enumerate(parts):
        skeleton = skeleton.replace(format_slot(index).encode(), part.file_name.encode())
    return skeleton


@dataclass(frozen=True, slots=True)
class Bundle:
    """A verified bundle: its manifest, the manifest's digest, the graph with the parts' file names, and the folder.

    `branch` is branch.onnx unchanged, with the name of slot 0; it is empty if the bundle has none.
    """

    manifest: Manifest
    digest: str
    graph: bytes
    folder: Path
    branch: bytes = b""

    def make_candidate_graph(self, index: int) -> bytes:
        """Return the graph of one candidate's network: input x, output `LOGITS`."""
        return insert_file_names(self.branch, [self.manifest.candidates[index].part])


def read_bundle(folder: Path, *, again: bool = False) -> Bundle:
    """Read and verify a bundle.

    If `again`, this device wrote and verified the folder before, so the parts are not hashed again.

    Raises:
        UpdateRejected: a file is missing, altered, of another size, not a plain file, or malformed; the text names it.
    """
    manifest, digest = read_manifest(folder)
    skeleton = _read_graph(folder / SKELETON, manifest.skeleton)
    branch = _read_graph(folder / BRANCH, manifest.branch) if isinstance(manifest.branch, Part) else b""
    if isinstance(manifest.int8, Part):
        if manifest.int8.size_bytes > MAX_INT8_BYTES:
            raise UpdateRejected(f"{INT8} has {manifest.int8.size_bytes} bytes; at most {MAX_INT8_BYTES} allowed")
        with _open_plain(folder / INT8) as file:
            _require_same(folder / INT8, file, manifest.int8, hashed=not again)
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data, memoryview(data) as view:
                _require_bounded(folder / INT8, view)
    for part in dict.fromkeys(manifest.parts):
        path = folder / part.file_name
        with _open_plain(path) as file:
            _require_same(path, file, part, hashed=not again)
            _require_tensors(path, file)
    return Bundle(manifest, digest, insert_file_names(skeleton, manifest.parts), folder, branch)


def require_bundle(folder: Path) -> None:
    """Refuse a folder that does not exist, or that only holds bundles, as a device's home does.

    Raises:
        ConfigError: there is no such folder, or the folder only holds bundles; the text then names the latest one.
    """
    if (folder / MANIFEST).exists():
        return
    within = sorted(folder.glob(f"bundles/*/{MANIFEST}"), key=lambda path: (path.stat().st_mtime, path))
    if within or not folder.is_dir():
        such_as = f", such as {within[-1].parent}" if within else ""
        raise ConfigError(f"no bundle at {folder}: name the folder that holds {MANIFEST}{such_as}")


def read_manifest(folder: Path) -> tuple[Manifest, str]:
    """Return the manifest in a folder and its digest; no other file is read.

    Raises:
        UpdateRejected: the manifest is missing or malformed.
    """
    data = _read_bytes(folder / MANIFEST, MAX_MANIFEST_BYTES)
    return decode_manifest(data), compute_digest(data)


def compute_bundle_digest(folder: Path) -> str:
    """Return the digest of the bundle in a folder; the manifest is not parsed.

    Raises:
        OSError: the manifest cannot be read.
    """
    return compute_digest((folder / MANIFEST).read_bytes())


def matches_part(path: Path, part: Part) -> bool:
    """Return whether a plain file has the size and hash of a part; the whole file is hashed."""
    try:
        with _open_plain(path) as file:
            _require_same(path, file, part, hashed=True)
    except (UpdateRejected, OSError):
        return False
    return True


def _open_plain(path: Path) -> BufferedReader:
    """Open a plain file; refuse links and anything else."""
    if path.is_symlink() or not path.is_file():
        raise UpdateRejected(f"{path} is missing or not a plain file")
    return path.open("rb")


def _read_bytes(path: Path, limit: int) -> bytes:
    with _open_plain(path) as file:
        data = file.read(limit + 1)
    if len(data) > limit:
        raise UpdateRejected(f"{path} is larger than {limit} bytes")
    return data


def _read_graph(path: Path, part: Part) -> bytes:
    data = _read_bytes(path, MAX_SKELETON_BYTES)
    if (len(data), compute_digest(data)) != (part.size_bytes, part.digest):
        raise UpdateRejected(f"{path} is not the one of the manifest")
    _require_bounded(path, memoryview(data))
    return data


def _require_bounded(path: Path, graph: memoryview) -> None:
    try:
        reason = explain_unbounded(graph)
    except ValueError as error:
        reason = f"it is not a graph: {error}"
    if reason:
        raise UpdateRejected(f"{path}: {reason}")


def _require_same(path: Path, file: BufferedReader, part: Part, *, hashed: bool) -> None:
    """Check that a file on disk matches the manifest, without reading it into memory."""
    import hashlib  # 3.5 MB of OpenSSL: import only when hashing

    if (size := file.seek(0, os.SEEK_END)) != part.size_bytes:
        raise UpdateRejected(f"{path} has {size} bytes, the manifest says {part.size_bytes}")
    file.seek(0)
    if hashed and hashlib.file_digest(file, "sha256").hexdigest() != part.digest:
        raise UpdateRejected(f"{path} does not hash to what the manifest says")


def _require_tensors(path: Path, file: BufferedReader) -> None:
    with raise_as(UpdateRejected, f"{path}: its header does not describe its data", on=ProtocolError):
        places = read_places(file, metadata=False)
    if odd := {place.dtype.name for place in places.values()} - {"float32", "int64"}:
        raise UpdateRejected(f"{path}: its header names tensors of {', '.join(sorted(odd))}")


__getattr__ = alias_names(__name__, read="read_bundle")
