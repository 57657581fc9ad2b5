"""The description of a task that both sides agree on. It needs no torch; `fedge.tasks` and `fedge.models` do."""

from __future__ import annotations

from typing import Annotated, Final

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType

PRINTABLE: Final = r"^[^\x00-\x1f\x7f-\x9f]*\Z"
"""Text that gives a terminal no command: without control characters."""


Word = Annotated[str, Meta(pattern=PRINTABLE, min_length=1, max_length=200)]


class Column(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A column that the network sees: a number, (value - mean) / std, or with `categories` a 1 in the place of its own.

    `missing`: stands for a cell without a value; None: such a row is refused.
    """

    name: Word
    mean: float = 0.0
    std: Annotated[float, Meta(gt=0)] = 1.0
    categories: tuple[Word, ...] = ()
    missing: float | Word | None = None

    @property
    def width(self) -> int:
        """How many inputs of the network it becomes."""
        return len(self.categories) or 1


class Schema(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What the columns of a table mean (`fedge.table`).

    `target`: the column of the class, one of `classes`. `sensitive`: the column of marks, 0 or 1. `user`: whose row it
    is, for `--partition natural`. `ignore`: columns that may be there and mean nothing.
    """

    target: Word
    classes: Annotated[tuple[Word, ...], Meta(min_length=2)]
    columns: Annotated[tuple[Column, ...], Meta(min_length=1)]
    sensitive: Word | None = None
    user: Word | None = None
    ignore: tuple[Word, ...] = ()

    @property
    def width(self) -> int:
        """How many inputs the network has."""
        return sum(column.width for column in self.columns)


class Preprocessing(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """How a raw sample becomes a model input: (x / scale - mean) / std, after an image was resized.

    `image_mode` None: samples are arrays, not images. "L" is grey, "RGB" colour. `table`: samples are rows of one, and
    each column has its own mean and std.
    """

    scale: Annotated[float, Meta(gt=0)] = 1.0
    mean: float = 0.0
    std: Annotated[float, Meta(gt=0)] = 1.0
    image_mode: str | None = None
    table: Schema | UnsetType = UNSET  # not in the text of other tasks, whose fingerprints are older than tables


class TaskSpec(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What is learned: classes, input and network. Coordinator and agents must have equal fingerprints."""

    name: Annotated[str, Meta(pattern=PRINTABLE)]
    classes: Annotated[tuple[Annotated[str, Meta(pattern=PRINTABLE)], ...], Meta(min_length=2)]
    input_shape: Annotated[tuple[int, ...], Meta(min_length=1, max_length=3)]  # without batch, channels first
    model: str  # "mlp", "cnn", or "package.module:factory" of the user's own
    model_options: dict[str, int | float | str | bool] = {}
    preprocessing: Preprocessing = Preprocessing()

    def __post_init__(self) -> None:
        table = self.preprocessing.table
        if table and self.input_shape != (table.width,):
            raise ValueError(f"the table makes {table.width} numbers, the network takes {self.input_shape}")

    @property
    def n_classes(self) -> int:
        """C, at least 2."""
        return len(self.classes)

    def fingerprint(self) -> str:
        """16 hex digits that differ when anything of the task differs."""
        import hashlib  # 3.5 MB of OpenSSL: only where something is hashed

        return hashlib.sha256(msgspec.json.encode(self, order="deterministic")).hexdigest()[:16]


SMALL_WINDOW: Final = 16
"""Up to so many pixels in a window, images of 32 x 32, it is faster to multiply every pixel by the gate's first layer
than to take means first; with more of them that layer's weights are too much to read for one sample."""


def gate_pool(input_shape: tuple[int, ...]) -> tuple[int, int]:
    """Window of the means that the gate sees of an image, so that at most 8 x 8 remain (scmoe_pfl.md 11.1).

    (1, 1), that is no pooling, for inputs other than (channels, height, width) and for small images.
    """
    if len(input_shape) != 3:
        return (1, 1)
    return (-(-input_shape[1] // 8), -(-input_shape[2] // 8))
