"""Values outside its state with which a network computes. They are never sent, so every build must make the same ones.

Such values are tensors, arrays and numbers in plain attributes, buffers that are not persistent, and layers in a plain
list. An exported graph holds them as constants.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor, nn

from fedge.models import network

_EVERY_MODULES: Final = frozenset(vars(nn.Module()))
"""Names of the attributes that torch gives every module."""


def collect_constants(module: nn.Module) -> dict[str, Any]:
    """Return tensors, arrays, numbers and words by their place, such as `layers[0].weight`.

    Example:
        >>> net = nn.Sequential(nn.Dropout(0.1))
        >>> net.scale = {"low": 0.5}
        >>> collect_constants(net)
        {"scale['low']": 0.5, '0.p': 0.1, '0.inplace': False}
    """
    found: dict[str, Any] = {}
    _collect("", module, {id(tensor) for _, tensor in network.iterate_tensors(module)}, found)
    return {place.removeprefix("."): value for place, value in found.items()}


def compute_digest(value: Any) -> str:
    """Return a string that identifies a value: equal only for equal values."""
    if isinstance(value, Tensor) and value.layout is torch.strided:
        value = value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy()
    if isinstance(value, np.ndarray):
        return hashlib.sha256(f"{value.dtype}{value.shape}".encode() + value.tobytes()).hexdigest()
    return repr(value)


def _collect(place: str, value: Any, seen: set[int], found: dict[str, Any]) -> None:
    """Add the values at and below a place to `found`, without objects in `seen`, such as those reached before."""
    if isinstance(value, bool | int | float | complex | str | np.generic):
        found[place] = value
    elif id(value) not in seen:
        seen.add(id(value))
        if isinstance(value, Tensor | np.ndarray):
            found[place] = value
        for name, inner in _iterate_parts(value):
            _collect(place + name, inner, seen, found)


def _iterate_parts(value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, nn.Module):
        own = (named for named in vars(value).items() if named[0] not in _EVERY_MODULES)
        parts = (value.named_parameters(recurse=False), value.named_buffers(recurse=False), value.named_children())
        yield from ((f".{name}", inner) for each in (own, *parts) for name, inner in each)
    elif isinstance(value, Mapping):
        yield from ((f"[{key!r}]", inner) for key, inner in value.items())
    elif isinstance(value, list | tuple):
        yield from ((f"[{number}]", inner) for number, inner in enumerate(value))
