"""Metrics for Prometheus as text, in OpenMetrics or, on request, the older format. Needs prometheus_client."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from types import SimpleNamespace

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import choose_encoder


def make_metric(
    kind: str, name: str, about: str, labels: Sequence[str], rows: Iterable[tuple[Sequence[str], float | None]]
) -> Metric:
    """Make a metric, "gauge" or "counter", with a value per set of labels; values of None are left out."""
    made = (GaugeMetricFamily if kind == "gauge" else CounterMetricFamily)(name, about, labels=labels)
    for values, value in rows:
        if value is not None:
            made.add_metric(values, value)
    return made


def format_metrics(metrics: Iterable[Metric], accept: str) -> tuple[bytes, str]:
    """Return the text in a format that the client accepts, and its content type."""
    encode, content_type = choose_encoder(accept)
    return encode(SimpleNamespace(collect=lambda: metrics)), content_type
