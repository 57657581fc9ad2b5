"""Finds inputs that a network turns into whole numbers, such as tokens for an embedding, which must not be scaled."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any, Final

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from torch.overrides import TorchFunctionMode

from fedge.data.task import Preprocessing, TaskSpec
from fedge.errors import ConfigError
from fedge.models.build import make_network
from fedge.system.loading import FAILURES

log = logging.getLogger("fedge.models")

MOST_COLUMNS: Final = 512
"""Most columns that are tried one by one; of more columns, all or none count as whole numbers."""
TRIED: Final = (1.0, 2.0)
"""Numbers tried in place of 0: one that a table of two rows has, and one that differs even if 0 stands for padding."""
_CASTS: Final = (
    torch.Tensor.long, torch.Tensor.int, torch.Tensor.short, torch.Tensor.byte, torch.Tensor.to, torch.Tensor.type,
    torch.Tensor.type_as,
)  # fmt: skip
_WHOLE: Final = (torch.int64, torch.int32, torch.int16, torch.uint8)


def unscale_lookups(task: TaskSpec) -> TaskSpec:
    """Return the task without scaling of the inputs that its network turns into whole numbers.

    Task classes and table schemas define their own scaling, so such tasks are unchanged. A task whose network cannot be
    built, or does not take its inputs, is unchanged, too; whoever builds the network next reports that.
    """
    how = task.preprocessing
    if ":" in task.name or how.table or ":" not in task.model:
        return task
    columns = find_lookups(task)
    if not columns.any():
        return task
    log.info(
        "event=not_scaled columns=%s detail='the network turns them into whole numbers'",
        "all" if columns.all() else ",".join(map(str, np.flatnonzero(columns))),
    )
    if columns.all():
        how = msgspec.structs.replace(Preprocessing(), image_mode=how.image_mode)
    else:
        mean, std = (np.broadcast_to(np.asarray(of, np.float64), columns.shape) for of in (how.mean, how.std))
        how = msgspec.structs.replace(
            how, mean=tuple(np.where(columns, 0, mean).tolist()), std=tuple(np.where(columns, 1, std).tolist())
        )
    return msgspec.structs.replace(task, preprocessing=how)


def find_lookups(task: TaskSpec) -> NDArray[np.bool_]:
    """Return which columns of one-dimensional samples become whole numbers, (d,); for others, whether any do, (1,)."""
    one_by_one = len(task.input_shape) == 1 and task.input_shape[0] <= MOST_COLUMNS and task.preprocessing.scale == 1
    n = task.input_shape[0] if one_by_one else 1
    found = np.zeros(n, np.bool_)
    none = torch.zeros((n, *task.input_shape))
    try:
        with torch.random.fork_rng(devices=[]):
            module = make_network(task).eval()
        before = _trace_whole_numbers(module, none)
        for value in TRIED if before else ():
            changed = none + value * (torch.eye(n) if one_by_one else 1)
            for old, new in zip(before, _trace_whole_numbers(module, changed), strict=False):
                if old.shape == new.shape and old.numel() % n == 0:
                    found |= (old != new).reshape(n, -1).any(dim=1).numpy()
    except ConfigError:
        pass
    return found


def _trace_whole_numbers(module: torch.nn.Module, x: torch.Tensor) -> Sequence[torch.Tensor]:
    """Return the whole numbers that a network makes of inputs, in order, up to any failure."""
    casts = _Casts()
    with casts, torch.no_grad():
        try:
            module(x)
        except FAILURES as error:  # the user's code; a table may have no such row
            log.debug("event=network_refused error=%r", str(error))
    return casts.seen


class _Casts(TorchFunctionMode):
    """A dispatch mode that records the results of casts from real to whole numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[torch.Tensor] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call a function of torch, and record its result if it is such a cast."""
        found = func(*args, **(kwargs or {}))
        if func in _CASTS and args[0].is_floating_point() and found.dtype in _WHOLE:
            self.seen.append(found)
        return found
