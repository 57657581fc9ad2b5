"""A check's findings, and the few samples that it tries."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

if TYPE_CHECKING:
    pass


class Finding(Struct, frozen=True):
    """A problem (`what`) and its remedy (`do`). `stops`: whether a run would be useless."""

    what: str
    do: str
    stops: bool = False

    def __str__(self) -> str:
        return f"{self.what}: {self.do}"


class Samples(NamedTuple):
    """A few samples: model inputs (n, *input_shape) and labels (n,), n >= 1."""

    x: NDArray[np.float32]
    y: NDArray[np.int64]
