"""Figures for Prometheus, as text: OpenMetrics, or the older format for who asks for that. Needs prometheus_client."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import choose_encoder


def family(
    kind: str, name: str, about: str, labels: Sequence[str], rows: Iterable[tuple[Sequence[str], float | None]]
) -> Metric:
    """A metric, "gauge" or "counter", with a value for each of some labels; None: it is left out."""
    made = (GaugeMetricFamily if kind == "gauge" else CounterMetricFamily)(name, about, labels=labels)
    for values, value in rows:
        if value is not None:
            made.add_metric(values, value)
    return made


class _Collector:
    def __init__(self, metrics: Iterable[Metric]) -> None:
        self._metrics = metrics

    def collect(self) -> Iterator[Metric]:
        """For the registry; `describe` spares it a call before."""
        yield from self._metrics

    def describe(self) -> Iterator[Metric]:
        """Nothing beforehand."""
        yield from ()


def exposition(metrics: Iterable[Metric], accept: str) -> tuple[bytes, str]:
    """The text in the format that who asks accepts, and its content type."""
    encode, content_type = choose_encoder(accept)
    registry = CollectorRegistry()
    registry.register(_Collector(metrics))
    return encode(registry), content_type
