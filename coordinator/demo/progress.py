"""What a demo says while it runs: a live bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn, TimeRemainingColumn


class Watch:
    """Shows the phase a demo is in, and how far it has come. Context manager."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._bar = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(bar_width=28),
            TextColumn("{task.fields[detail]}"),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=console,
            disable=not console.is_terminal,
        )
        self._task: TaskID | None = None
        self._last = ""

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()

    def phase(self, description: str, total: int | None = None) -> None:
        """Begin the next phase, of so many parts if that is known."""
        if self._task is not None:
            self._bar.stop_task(self._task)
            self._bar.remove_task(self._task)
        self._task = self._bar.add_task(description, total=total, detail="")
        self._line(description)

    def update(self, completed: int, detail: str) -> None:
        """So many parts are done; `detail` says more."""
        assert self._task is not None
        self._bar.update(self._task, completed=completed, detail=detail)
        self._line(f"  {detail}")

    def _line(self, text: str) -> None:
        """Where there is no bar, each new text is one line."""
        if not self._console.is_terminal and text != self._last:
            self._console.print(text, highlight=False, markup=False, soft_wrap=True)
        self._last = text
