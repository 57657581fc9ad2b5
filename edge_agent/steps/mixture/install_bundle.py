"""Install a finished bundle after verifying it and running it once. Needs no torch."""

from __future__ import annotations

import re
from typing import Final

import numpy as np

from edge_agent.device.device import Device, FailedError, prune_bundles
from fedge.bundle.campaign import make_campaign_files
from fedge.bundle.manifest import GRAPHS, MANIFEST, Bundle, read_bundle
from fedge.bundle.runtime import make_session
from fedge.data.task import INPUT, TaskSpec
from fedge.errors import StoreError, raise_as
from fedge.steps.mixture.install import Installed
from fedge.steps.mixture.install_bundle import InstallBundle
from fedge.system.files import fill_folder, write_atomically

_PART: Final = re.compile(r"[0-9a-f]{64}\.safetensors\Z")


def run(device: Device, action: InstallBundle) -> Installed:
    """Put the files in place as HOME/bundles/RELEASE, after verifying them and running the graph once.

    Raises:
        FailedError: a file name does not belong to a bundle, or the bundle is for another task or release.
        UpdateRejected: the files do not match their manifest. What was installed before is untouched.
        StoreError: the disk is full or the folder cannot be written.
    """
    strange = [name for name in action.files if name not in {MANIFEST, *GRAPHS} and not _PART.match(name)]
    if strange:
        raise FailedError(f"{strange[0]!r} is not a file of a bundle")
    folder = device.home / "bundles" / str(action.release)
    with raise_as(StoreError, f"cannot write bundle {folder}"), fill_folder(folder) as unfinished:
        for name, ref in action.files.items():
            write_atomically(unfinished / name, device.fetch(ref))
        for name, data in make_campaign_files(device.campaign).items():
            write_atomically(unfinished / name, data)
        bundle = read_bundle(unfinished)
        _require_valid(bundle, action, device.task)
    prune_bundles(device.home)
    return Installed(release=bundle.manifest.release)


def _require_valid(bundle: Bundle, action: InstallBundle, task: TaskSpec) -> None:
    manifest = bundle.manifest
    if {MANIFEST, *manifest.files} != set(action.files):
        raise FailedError("there are files that the manifest does not name")
    if manifest.task.compute_fingerprint() != task.compute_fingerprint():
        raise FailedError(f"the bundle is for task {manifest.task.name} of another fingerprint")
    if manifest.release != action.release:
        raise FailedError(f"the bundle has release {manifest.release}, but the order {action.release}")
    sample = np.zeros((1, *task.input_shape), np.float32)
    with raise_as(FailedError, "the bundle cannot be run", on=Exception):  # ONNX Runtime's exception tree starts here
        outputs = make_session(bundle.graph, bundle.folder).run(None, {INPUT: sample})
    if outputs[0].shape != (1, task.n_classes):
        raise FailedError("the bundle's output is not that of the task")
