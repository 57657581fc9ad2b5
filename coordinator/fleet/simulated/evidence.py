"""Evidence against simulated devices, their problems, and the log of both."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

from coordinator.fleet.problems import Problem
from coordinator.fleet.simulated.memory import InMemory
from coordinator.store.records import Offence
from fedge.data.task import TaskSpec
from fedge.errors import ProtocolError
from fedge.steps.contract import Failed, Refusal, get_outcome

if TYPE_CHECKING:
    pass


log = logging.getLogger("fedge.coordinator")

ABSENT: Final = "it was not asked, because it was absent or in quarantine"
MAX_LOGGED: Final = 100
"""Most kinds of failures that are logged."""


class _TracebackFilter(logging.Filter):
    """A log filter that lets each traceback of the devices through once, not for each device and round."""

    def __init__(self) -> None:
        super().__init__()
        self._seen = set[str]()

    def filter(self, record: logging.LogRecord) -> bool:
        """Return whether the traceback is new, or the record has none."""
        if not record.exc_info:
            return True
        error = record.exc_info[1]
        kind = f"{type(error).__name__}: {error}"
        new = kind not in self._seen and len(self._seen) < MAX_LOGGED
        self._seen.add(kind)
        return new

    @contextmanager
    def filter_agents(self) -> Iterator[None]:
        """Filter the agents' log while the devices are at work in this process."""
        theirs = logging.getLogger("fedge.agent")
        theirs.addFilter(self)
        try:
            yield
        finally:
            theirs.removeFilter(self)


class Evidence(InMemory):
    """A fleet that records evidence and problems.

    `round`: set by the caller that runs the rounds. `get_offences`: evidence against devices, by device, round and
    name. `problems`: the latest refusal, failure or missed deadline by device id.
    """

    def __init__(self, task: TaskSpec) -> None:
        super().__init__(task)
        self.round = 0
        self.offences: dict[tuple[str, int, str], Offence] = {}
        self.problems: dict[str, Problem] = {}
        self._tracebacks = _TracebackFilter()
        self._logged: set[tuple[str, str]] = set()  # label and reason of failures

    def accuse(self, device_id: str, error: ProtocolError) -> None:
        """Log and record evidence against a device; the evidence counts from the next round on."""
        log.warning("event=refused name=%s device=%s detail=%r", error.name, device_id, str(error))
        self._record_problem(device_id, str(error))
        self._record_offence(device_id, error.name, str(error))

    def _record_offence(self, device_id: str, name: str, detail: str) -> None:
        """Record evidence against a device; the evidence counts from the next round on."""
        offence = Offence(device_id=device_id, round=self.round, name=name, detail=detail)
        self.offences.setdefault((device_id, self.round, name), offence)

    def explain_problem(self, device_id: str) -> str:
        """Explain a device's problem in this round, or that the device was not present."""
        problem = self.problems.get(device_id)
        return problem.reason if problem is not None and problem.round == self.round else ABSENT

    def _record_refusal(self, device_id: str, label: str, refusal: Refusal) -> None:
        """Record why a device did not do its order; a kind of failure is logged once, not for each device and round."""
        why = refusal.reason or refusal.why.words
        self._record_problem(device_id, f"{get_outcome(refusal)}: {why}")
        if isinstance(refusal, Failed) and (label, why) not in self._logged and len(self._logged) < MAX_LOGGED:
            self._logged.add((label, why))
            log.warning("event=order_failed device=%s round=%d label=%s reason=%r", device_id, self.round, label, why)

    def _record_problem(self, device_id: str, reason: str) -> None:
        self.problems[device_id] = Problem(round=self.round, reason=reason)
