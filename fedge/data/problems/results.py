"""What a runtime gives its callers: outputs of a model server, and columns of a table for people."""

from __future__ import annotations

from typing import NamedTuple


class Result(NamedTuple):
    """An output of a model server: its name, its datatype in the Open Inference Protocol, its shape for one sample."""

    name: str
    datatype: str
    shape: tuple[int, ...]


class Column(NamedTuple):
    """A column of a table for people, at least `width` characters wide; `left` aligned or not."""

    head: str
    cells: tuple[str, ...]
    width: int = 0
    left: bool = True

    def format_cells(self) -> list[str]:
        """Return head and cells, each as wide as the widest.

        >>> Column("class", ("cat",), 7).format_cells()
        ['class  ', 'cat    ']
        """
        width = max(self.width, *map(len, (self.head, *self.cells)))
        return [f"{text:<{width}}" if self.left else f"{text:>{width}}" for text in (self.head, *self.cells)]
