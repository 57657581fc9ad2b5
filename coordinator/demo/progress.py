"""A demo's progress: a live bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Self

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from coordinator.demo.outcome import megabytes


class Rounds:
    """A coordinator's progress, from the events that it prints with --json."""

    def __init__(self, rounds: int, agents: int) -> None:
        self.completed = 0
        self.detail = ""
        self._rounds = rounds
        self._agents = agents
        self._online: set[str] = set()
        self._now = ""
        self._answers = 0
        self._so_far = ""

    def take(self, event: Mapping[str, Any]) -> bool:
        """Process an event; True if it is worth a line."""
        kind = event["event"]
        if kind == "device":
            self._online.add(event["device"])
            self._now = f"{len(self._online)} of {self._agents} devices online"
        elif kind == "round_begun":
            number = event["round"]
            self._now = f"round {number} of {self._rounds}" if number <= self._rounds else "personal mixtures"
            self._answers = 0
        elif kind == "answer":
            self._answers += 1
        elif kind == "round_done":
            self.completed = event["round"]
            self._so_far = _so_far(event)
        answers = f", {self._answers} reports" if self._answers else ""
        self.detail = f"{self._now}{answers}{self._so_far}"
        return bool(kind == "round_done")


def _so_far(summary: Mapping[str, Any]) -> str:
    accuracy = summary["history"][-1]["accuracy"] if summary["history"] else None
    shown = "" if accuracy is None else f", validation accuracy {100 * accuracy:.1f} %"
    return f"{shown}, {megabytes(summary['bytes_up'])} up, {megabytes(summary['bytes_down'])} down"


class Watch:
    """Shows the phase of a demo and its progress. Context manager."""

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

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def phase(self, description: str, total: int | None = None) -> None:
        """Begin the next phase. `total`: its number of parts, if known."""
        if self._task is not None:
            self._bar.stop_task(self._task)
            self._bar.remove_task(self._task)
        self._task = self._bar.add_task(description, total=total, detail="")
        self._line(description)

    def update(self, completed: int, detail: str, *, milestone: bool = True) -> None:
        """Show `completed` parts and `detail`; without a bar, only milestones make a line."""
        assert self._task is not None
        self._bar.update(self._task, completed=completed, detail=detail)
        if milestone:
            self._line(f"  {detail}")

    def _line(self, text: str) -> None:
        """Print each new text as a line if there is no bar."""
        if not self._console.is_terminal and text != self._last:
            self._console.print(text, highlight=False, markup=False, soft_wrap=True)
        self._last = text
