"""Who was asked to train, and why: the choices of a run, device by device."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from typing import Any

from msgspec import Struct


class Choice(Struct, frozen=True, kw_only=True):
    """A device in the choices of who trains.

    `asked`: number of choices that took the device, of `among`. `seconds`, `gain`, `bonus`: expected time of a round,
    expected reward and exploration bonus at the last choice; the latter two are None where another rule than the bandit
    chose. `context`: clock in GHz, free memory in GB, samples, mean gradient norm and mean loss drop when the device
    was last asked; empty if it never was. `why`: what decided at the last choice.
    """

    id: str
    asked: int
    among: int
    seconds: float
    gain: float | None
    bonus: float | None
    context: tuple[float, ...]
    why: str


class Choices:
    """Collects the choices of a run from its events."""

    def __init__(self) -> None:
        self._asked, self._among = Counter[str](), Counter[str]()
        self._last: dict[str, Mapping[str, Any]] = {}
        self._contexts: dict[str, tuple[float, ...]] = {}

    def observe(self, event: str, fields: Mapping[str, Any]) -> None:
        """Add a choice. Other events count as none, and so do draws from all, which look at no context."""
        if event != "chosen" or "contexts" not in fields:
            return
        self._among.update(fields["seconds"].keys())
        self._last.update(dict.fromkeys(fields["seconds"], fields))
        self._asked.update(fields["ids"])
        self._contexts.update({i: tuple(context) for i, context in fields["contexts"].items()})

    def list_choices(self, ids: Collection[str]) -> tuple[Choice, ...]:
        """Return the choices of these devices, by ascending id; none if every choice took everybody."""
        if self._asked == self._among:
            return ()
        return tuple(self._describe(i, self._last[i]) for i in sorted(set(ids) & set(self._last)))

    def _describe(self, device_id: str, last: Mapping[str, Any]) -> Choice:
        gain, bonus = last["estimates"].get(device_id, (None, None))
        return Choice(
            id=device_id,
            asked=self._asked[device_id],
            among=self._among[device_id],
            seconds=last["seconds"][device_id],
            gain=gain,
            bonus=bonus,
            context=self._contexts.get(device_id, ()),
            why=explain_choice(device_id, last),
        )


def explain_choice(device_id: str, fields: Mapping[str, Any]) -> str:
    """Explain in a few words what a choice decided about a device."""
    if device_id in fields["overdue"]:
        return "asked, had waited long"
    if device_id in fields["ids"]:
        return "asked"
    deadline_s = fields["deadline_s"]
    if deadline_s is not None and fields["seconds"][device_id] > deadline_s:
        return f"too slow for {deadline_s:.2g} s"
    return "others came first"
