"""Initial weights of a network, from the user's file: `--weights FILE.safetensors`.

A task names the weights by digest, so that all machines of a federation use the same. Only the coordinator has the
file. A device needs them only if a part of the network is frozen (`fedge.models.adapters`); it then fetches them once
into the cache folder. The file is never unpickled.
"""

from __future__ import annotations

import io
import logging
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Final

from fedge.data.task import HEAD_CLASS, TaskSpec
from fedge.errors import ConfigError, StoreError
from fedge.settings import CODE
from fedge.system.files import compute_digest, get_cache_folder, write_atomically
from fedge.system.text import Heading
from fedge.tensors.layout import Layout, read_places
from fedge.wire.messages import BlobRef

log = logging.getLogger("fedge.models")

WEIGHTS: Final = "weights"
SIZE: Final = "weights_bytes"
ADAPT: Final = "adapt"
RESERVED: Final = (WEIGHTS, SIZE, ADAPT, HEAD_CLASS)
"""Names of the entries in a task's `model_options` that are no options of its network: they say with which weights it
begins, and what takes the place of its head."""

_held: dict[str, bytes] = {}  # weights by digest, if the cache folder cannot be written
_whole: set[Path] = set()  # files that this process has verified

TaskName = Annotated[
    str,
    CODE,
    Heading.TASK,
    "The task is digits, mnist, fashion-mnist, uci-har, spoken-digits, image-folder, arrays, a .json, a table's schema "
    "(.toml) or package.module:Class.",
]
Allow = Annotated[
    str,
    CODE,
    Heading.CODE,
    "The configuration and the .json of a task may name this code: package.module:name, comma-separated.",
]
ModelName = Annotated[
    str | None,
    CODE,
    Heading.TASK,
    "The network is mlp, cnn, ... or package.module:factory; by default it is the task's.",
]
Weights = Annotated[
    Path | None,
    Heading.TASK,
    "The network begins with the weights of this .safetensors file, which fits by names and shapes.",
]
Adapt = Annotated[
    str | None,
    Heading.TASK,
    "Only these parts of the network are trained; the rest of --weights is frozen and not sent. They are lora or "
    "lora:RANK, head, or layers such as head,layer4.*; !norm is all but the normalisation. By default everything is "
    "trained.",
]


def find_weights(task: TaskSpec) -> BlobRef | None:
    """Return the reference to the task's initial weights, or None if these are random."""
    digest, size = task.model_options.get(WEIGHTS), task.model_options.get(SIZE)
    return BlobRef(digest=digest, size_bytes=size) if isinstance(digest, str) and isinstance(size, int) else None


def find_device_weights(task: TaskSpec) -> BlobRef | None:
    """Return the reference to the weights of a partly frozen network, which no order includes, or None."""
    return find_weights(task) if ADAPT in task.model_options else None


def log_fresh_head(task: TaskSpec, layout: Layout) -> None:
    """Log that the head starts anew, if the weights are for other classes."""
    ref = find_weights(task)
    if ref is not None:
        stored = read_places(io.BytesIO(read_weights(ref.digest)))
        fresh = [i.name for i in layout.tensors if i.layer == "head" and i.name in stored]
        if any(stored[i.name].shape != i.shape for i in layout.tensors if i.name in fresh):
            log.warning("event=fresh_head tensors=%s detail='the weights are of other classes'", ",".join(fresh))


def store_weights(data: bytes) -> str:
    """Store weights for this and later processes; return their digest."""
    digest = compute_digest(data)
    if not has_weights(digest):
        try:
            write_atomically(_get_path(digest), data)
        except StoreError:  # for example a read-only home
            _held[digest] = data
    return digest


def has_weights(digest: str) -> bool:
    """Return whether the weights are here and intact."""
    with suppress(ConfigError):
        path = _get_path(digest)
        if digest in _held or (path in _whole and path.exists()) or read_weights(digest):
            _whole.add(path)
            return True
    return False


def read_weights(digest: str) -> bytes:
    """Read the weights of this digest.

    Raises:
        ConfigError: the weights are missing or damaged.
    """
    if digest in _held:
        return _held[digest]
    path = _get_path(digest)
    try:
        data = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"the weights {digest} of the task's network are not here: give --weights again") from error
    if compute_digest(data) != digest:
        raise ConfigError(f"{path} is damaged: delete it, and give --weights again")
    return data


def _get_path(digest: str) -> Path:
    return get_cache_folder("weights") / f"{digest}.safetensors"
