"""Writes bundles: parts, skeleton and manifest, checked against torch, all or nothing."""

from __future__ import annotations

import math
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
from msgspec import UNSET, structs
from numpy.typing import NDArray

from export import parity
from export.graph import encode_branch, encode_skeleton, make_gate_tensors
from export.mixture import Mixture
from export.pool import Pool, compute_expected, encode_pool_parts, encode_pool_skeleton
from fedge.bundle.conformal import summarise_scores
from fedge.bundle.energies import compute_reference
from fedge.bundle.manifest import (
    BRANCH,
    MANIFEST,
    OUTLIER_BELOW,
    SKELETON,
    Bundle,
    CandidateInfo,
    Fusion,
    GuardInfo,
    Manifest,
    Part,
    PoolInfo,
    Reference,
    encode_manifest,
    insert_file_names,
    read_bundle,
)
from fedge.data.task import TaskSpec
from fedge.errors import ConfigError, StoreError, raise_as
from fedge.system.files import compute_digest, fill_folder, write_atomically
from fedge.tensors.layout import Layout, to_bytes, unflatten
from fedge.wire.messages import Role


def write_bundle(
    folder: Path,
    *,
    task: TaskSpec,
    layout: Layout,
    mixture: Mixture | Pool,
    validation: NDArray[np.floating],
    release: int,
    method: str,
    metrics: Mapping[str, float],
    targets: NDArray[Any] | None = None,
    before: Mixture | None = None,
    compared: NDArray[np.floating] | None = None,
    beside: Mapping[str, bytes] = MappingProxyType({}),
    quarters: int = 0,
) -> Manifest:
    """Write a mixture as a bundle, replacing an older bundle in the folder; equal arguments give equal bytes.

    Parts that a bundle beside `folder` already holds are linked, not written again.

    Args:
        folder: the bundle's folder; its parent is made if missing.
        task: the task that the bundle is for.
        layout: layout of the candidates' models.
        mixture: see `Mixture` and `Pool`.
        validation: the device's model inputs (n, *input_shape), for the reference and the parity check; n may be 0.
        release: number of the release, which must increase, since a device refuses to go back.
        method: name of the method that made the candidates, for people.
        metrics: figures for people; all must be finite.
        targets: the validation samples' converted targets (n, ...), for the scores of prediction sets.
        before: the mixture before its models learned from the validation samples; by default they have not.
        compared: model inputs for the parity check, if not all of `validation`.
        beside: small files for the folder by name, of which the manifest says nothing.
        quarters: by how many the runtime turns images before the graph takes them; `validation` is turned already.

    Raises:
        ValueError: the mixture is inconsistent (shapes, a non-finite number, a weight outside [0, 1]).
        UpdateRejected: torch and ONNX Runtime disagree by more than 1e-4 in a probability. Nothing is left on disk.
        ConfigError: the network cannot be expressed in ONNX.
        StoreError: the disk is full or the folder cannot be written.
    """
    if not all(map(math.isfinite, metrics.values())):
        raise ValueError("a metric is not finite")
    if isinstance(mixture, Pool):
        parts = encode_pool_parts(mixture, layout)
        graph, alone = encode_pool_skeleton(task, layout, mixture, parts), None
    else:
        _require_consistent(task, mixture)
        parts = [to_bytes(unflatten(candidate.model, layout)) for candidate in mixture.candidates]
        parts.append(to_bytes(make_gate_tensors(task, mixture)))
        graph, alone = encode_skeleton(task, mixture, parts[0], parts[-1]), encode_branch(task, parts[0])
    names = [_make_part(data) for data in parts]
    with raise_as(StoreError, f"cannot write bundle {folder}"), fill_folder(folder) as unfinished:
        for part, data in zip(names, parts, strict=True):
            _put(unfinished / part.file_name, data, part)
        graphs = {SKELETON: graph} | ({} if alone is None else {BRANCH: alone})
        for name, data in {**graphs, **beside}.items():
            write_atomically(unfinished / name, data)
        found = _measure_parity(
            task, layout, mixture, insert_file_names(graph, names), unfinished, validation, compared
        )
        manifest = _make_manifest(task, mixture, names, graphs, release, method, metrics, found)
        scores = _compute_scores(task, layout, validation, targets, before, found.answers)
        manifest = structs.replace(manifest, turned=quarters or UNSET, scores=scores or UNSET)
        write_atomically(unfinished / MANIFEST, encode_manifest(manifest))
    return manifest


@contextmanager
def pack_bundle(bundle: Bundle, target: Path) -> Iterator[Path]:
    """Copy only the files that the manifest names; the `with` block may change the copy, which is then verified.

    If anything is raised, also in the block, nothing is left on disk.

    Raises:
        ConfigError: `target` exists.
        UpdateRejected: the copy is not what its manifest says.
        StoreError: the copy cannot be written.
    """
    if target.exists():
        raise ConfigError(f"{target} exists already: name a new folder")
    with raise_as(StoreError, f"cannot write {target}"), fill_folder(target) as copy:
        for name in (MANIFEST, *bundle.manifest.files):
            shutil.copyfile(bundle.folder / name, copy / name)
        yield copy
        read_bundle(copy)


def _make_part(data: bytes) -> Part:
    return Part(digest=compute_digest(data), size_bytes=len(data))


def _require_consistent(task: TaskSpec, mixture: Mixture) -> None:
    gate, m = mixture.gate, len(mixture.candidates)
    hidden, features = np.shape(gate.hidden_weight)
    shapes = {
        "gate.hidden_bias": (gate.hidden_bias, (hidden,)),
        "gate.out_weight": (gate.out_weight, (m, hidden)),
        "gate.out_bias": (gate.out_bias, (m,)),
    }
    offset = task.problem.make_no_offset(task.input_shape).shape
    shapes |= {f"the offset of {c.name}": (c.offset, offset) for c in mixture.candidates}
    for name, (array, shape) in shapes.items():
        if np.shape(array) != shape:
            raise ValueError(f"{name} has shape {np.shape(array)}, expected {shape}")
    if features not in (given := gate.count_inputs(task.input_shape)):
        raise ValueError(f"the gate takes {features} inputs, the task gives {given[0]}")
    for candidate in mixture.candidates:
        how = candidate.calibration
        numbers = (how.temperature, how.kappa, candidate.energy_mean, candidate.energy_std)
        if not (all(map(math.isfinite, numbers)) and how.temperature > 0 and 0 <= candidate.weight <= 1):
            raise ValueError(f"candidate {candidate.name}: temperature, kappa, energy or weight out of range")
    gate_arrays = (*gate.arrays, *mixture.offsets)
    if not all(np.isfinite(array).all() for array in gate_arrays) or not math.isfinite(mixture.beta):
        raise ValueError("gate, offset or beta holds a number that is not finite")


def _put(path: Path, data: bytes, part: Part) -> None:
    """Link a part from a neighbouring bundle that has it, else write it."""
    for other in path.parent.parent.glob(f"*/{part.file_name}"):
        try:
            if compute_digest(other.read_bytes()) == part.digest:
                os.link(other, path)
                return
        except OSError:  # the file has gone meanwhile, or the file system has no links
            continue
    write_atomically(path, data)


@dataclass(frozen=True, slots=True)
class _ParityResult:
    """The largest difference to torch; on validation samples the reference, largest energies and mean shares, answers.

    Energies and shares are (M,).
    """

    difference: float
    yardstick: tuple[Reference, float] | None
    energy_max: NDArray[np.floating] | None
    share: NDArray[np.floating] | None
    answers: Sequence[NDArray[np.floating]]


def _measure_parity(
    task: TaskSpec,
    layout: Layout,
    mixture: Mixture | Pool,
    graph: bytes,
    folder: Path,
    validation: NDArray[np.floating],
    compared: NDArray[np.floating] | None,
) -> _ParityResult:
    x = parity.select_samples(task, validation if compared is None else compared)
    found = parity.run_graph(graph, folder, x)

    def compute_wanted(lean: float) -> NDArray[np.floating]:
        if isinstance(mixture, Pool):
            return compute_expected(task, layout, mixture, x, found, lean)
        return _flatten(parity.compute_expected(task, layout, mixture, x, found, lean)[:-2])

    difference = parity.require_parity(_flatten(found[:-2]), compute_wanted)
    if not len(validation):
        return _ParityResult(difference, None, None, None, ())
    *answers, weights, energies = (
        found if compared is None else parity.run_graph(graph, folder, parity.select_samples(task, validation))
    )
    highest = np.where(np.isfinite(energies), energies, -np.inf).max(axis=0)
    reference = compute_reference(task.problem, answers, weights, energies)
    return _ParityResult(difference, reference, highest, np.minimum(weights.mean(axis=0), 1), answers)


def _compute_scores(
    task: TaskSpec,
    layout: Layout,
    validation: NDArray[np.floating],
    targets: NDArray[Any] | None,
    before: Mixture | None,
    answers: Sequence[NDArray[np.floating]],
) -> tuple[float, ...]:
    """Return the sorted scores of answers to validation samples, those of `before` if it is given."""
    if targets is None or not len(targets):
        return ()
    if before is not None and task.problem.SETS:
        *answers, _, _ = parity.compute_expected(task, layout, before, parity.select_samples(task, validation))
    return summarise_scores(task.problem, answers, targets[parity.select_rows(len(targets))])


def _flatten(answers: Sequence[NDArray[np.floating]]) -> NDArray[np.floating]:
    """Return all numbers of each answer, (n, k)."""
    return np.concatenate([each.reshape(len(each), -1) for each in answers], axis=1)


def _make_manifest(
    task: TaskSpec,
    mixture: Mixture | Pool,
    parts: list[Part],
    graphs: Mapping[str, bytes],
    release: int,
    method: str,
    metrics: Mapping[str, float],
    found: _ParityResult,
) -> Manifest:
    candidates, fusion, pool = (
        _make_pool_description(mixture, parts)
        if isinstance(mixture, Pool)
        else _make_description(mixture, parts, found)
    )
    return Manifest(
        task=task,
        method=method,
        release=release,
        skeleton=_make_part(graphs[SKELETON]),
        branch=_make_part(graphs[BRANCH]) if BRANCH in graphs else UNSET,
        gate=parts[len(candidates)],
        candidates=candidates,
        fusion=fusion,
        pool=pool or UNSET,
        reference=found.yardstick[0] if found.yardstick else UNSET,
        metrics={name: float(value) for name, value in metrics.items()}
        | ({OUTLIER_BELOW: found.yardstick[1]} if found.yardstick and math.isfinite(found.yardstick[1]) else {}),
        max_abs_diff=found.difference,
    )


_Description = tuple[tuple[CandidateInfo, ...], Fusion, PoolInfo | None]


def _make_description(mixture: Mixture, parts: list[Part], found: _ParityResult) -> _Description:
    energy_max, share = found.energy_max, found.share
    guard = None
    if mixture.guard is not None:
        how = mixture.guard.calibration
        guard = GuardInfo(candidate=mixture.guard.candidate, temperature=how.temperature, kappa=how.kappa)
    candidates = tuple(
        CandidateInfo(
            role=c.role,
            name=c.name,
            part=part,
            temperature=float(c.calibration.temperature),
            kappa=float(c.calibration.kappa),
            energy_mean=float(c.energy_mean),
            energy_std=float(c.energy_std),
            weight=float(c.weight),
            energy_max=UNSET if energy_max is None or not np.isfinite(energy_max[k]) else float(energy_max[k]),
            share=UNSET if share is None or not np.isfinite(share[k]) else float(share[k]),
        )
        for k, (c, part) in enumerate(zip(mixture.candidates, parts[:-1], strict=True))
    )
    fusion = Fusion(
        beta=float(mixture.beta),
        energy_clip=None if math.isinf(mixture.energy_clip) else float(mixture.energy_clip),
        top=mixture.top,
        guard=guard,
    )
    return candidates, fusion, None


def _make_pool_description(pool: Pool, parts: list[Part]) -> _Description:
    m = len(pool.modules)
    candidates = tuple(
        CandidateInfo(
            role=Role.PRIVATE if k == pool.own else Role.EXPERT,
            name=f"module-{k}",
            part=part,
            temperature=1.0,
            kappa=0.0,
            energy_mean=0.0,
            energy_std=1.0,
            weight=float(pool.keep[k]),
        )
        for k, part in enumerate(parts[:m])
    )
    fusion = Fusion(beta=0.0, energy_clip=None, top=pool.top, guard=None)
    return (
        candidates,
        fusion,
        PoolInfo(trunk=None if pool.trunk is None else parts[-1], own=pool.own, anchored=pool.anchored),
    )
