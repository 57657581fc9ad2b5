"""Request statistics of a served model since the process began, as in Triton's statistics extension."""

from __future__ import annotations

import time
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Final

SECONDS: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0)
"""Upper bounds in seconds of the buckets into which answered requests are sorted; a last bucket has no bound."""
OUTCOMES: Final = ("answered", "refused", "busy", "failed")
"""Outcomes of a request: "refused" is the caller's fault, "busy" means a full queue, "failed" is our fault."""


@dataclass(slots=True)
class Duration:
    """A count of events and their total duration."""

    count: int = 0
    ns: int = 0

    def add(self, ns: int, count: int = 1) -> None:
        """Add `count` events, each of which took `ns` nanoseconds."""
        self.count += count
        self.ns += count * ns

    @contextmanager
    def measure(self) -> Iterator[None]:
        """Count the `with` block as one event, unless it raises."""
        begin = time.perf_counter_ns()
        yield
        self.add(time.perf_counter_ns() - begin)


@dataclass(slots=True)
class Statistics:
    """Request statistics of one model in one event loop; `batches` has the graph's calls by their number of samples."""

    outcomes: defaultdict[str, Duration] = field(default_factory=lambda: defaultdict(Duration))
    read: Duration = field(default_factory=Duration)
    queue: Duration = field(default_factory=Duration)
    graph: Duration = field(default_factory=Duration)
    written: Duration = field(default_factory=Duration)
    batches: defaultdict[int, Duration] = field(default_factory=lambda: defaultdict(Duration))
    buckets: Counter[int] = field(default_factory=Counter)
    n_samples: int = 0
    n_outliers: int = 0
    last_ms: int = 0

    @contextmanager
    def measure_request(self, outcome_of: Callable[[BaseException], str | None]) -> Iterator[None]:
        """Count the `with` block as one request; `outcome_of(error)` is None if nobody waits for it any more."""
        begin = time.perf_counter_ns()
        outcome: str | None = "answered"
        try:
            yield
        except BaseException as error:
            outcome = outcome_of(error)
            raise
        finally:
            ns = time.perf_counter_ns() - begin
            self.last_ms = time.time_ns() // 1_000_000
            if outcome is not None:
                self.outcomes[outcome].add(ns)
            if outcome == "answered":
                self.buckets[bisect_left(SECONDS, ns / 1e9)] += 1

    def record_call(self, n_samples: int, n_requests: int, ns: int) -> None:
        """Count a call of the graph with `n_samples` samples of `n_requests` requests."""
        self.batches[n_samples].add(ns)
        self.graph.add(ns, n_requests)
        self.n_samples += n_samples

    def to_triton(self) -> dict[str, Any]:
        """Return the statistics as Triton's extension does (triton-inference-server, extension_statistics.md)."""
        answered = self.outcomes["answered"]
        other = [self.outcomes[outcome] for outcome in OUTCOMES if outcome != "answered"]
        failed = Duration(sum(one.count for one in other), sum(one.ns for one in other))
        durations = {
            "success": answered,
            "fail": failed,
            "queue": self.queue,
            "compute_input": self.read,
            "compute_infer": self.graph,
            "compute_output": self.written,
            "cache_hit": Duration(),
            "cache_miss": Duration(),
        }
        return {
            "last_inference": self.last_ms,
            "inference_count": self.n_samples,
            "execution_count": sum(calls.count for calls in self.batches.values()),
            "inference_stats": durations,
            "response_stats": {},
            "batch_stats": [
                {"batch_size": n, "compute_input": Duration(), "compute_infer": calls, "compute_output": Duration()}
                for n, calls in sorted(self.batches.items())
            ],
            "memory_usage": [],
        }
