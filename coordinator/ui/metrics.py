"""A federation's figures for Prometheus (OpenMetrics), from what the page shows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import choose_encoder

Sample = tuple[str, str, dict[str, float]]


class _State:
    """What is exposed; prometheus_client asks for it by `collect`."""

    def __init__(self, state: Mapping[str, Any]) -> None:
        self._state = state

    def collect(self) -> Iterator[Metric]:
        """The metrics of one federation, which is a label of each."""
        state = self._state
        name = state["federation"]
        for metric, about, value in (
            ("fedge_round", "Rounds that are done.", state["round"]),
            ("fedge_rounds", "Rounds of training in all.", state["rounds"]),
            ("fedge_done", "1: the run is at its end.", float(state["done"])),
            ("fedge_paused", "1: no further round begins.", float(state["paused"])),
            ("fedge_validation_accuracy", "Of the last cohort, between 0 and 1.", state["accuracy"]),
            ("fedge_summary_age_seconds", "Since the coordinator last wrote how it stands.", state["age_s"]),
            ("fedge_clusters", "Clusters with an expert of their own.", len(state["clusters"])),
        ):
            family = GaugeMetricFamily(metric, about, labels=["federation"])
            if value is not None:
                family.add_metric([name], value)
            yield family
        for metric, about, value in (
            ("fedge_received_bytes", "Payload bytes from devices.", state["bytes_up"]),
            ("fedge_sent_bytes", "Payload bytes to devices.", state["bytes_down"]),
        ):
            counter = CounterMetricFamily(metric, about, labels=["federation"])
            counter.add_metric([name], value)
            yield counter
        yield self._devices()
        yield from self._each()
        if state["rounds_list"]:
            orders = GaugeMetricFamily(
                "fedge_round_orders", "Orders of the last round by outcome.", labels=["federation", "outcome"]
            )
            for outcome in ("answered", "late", "failed", "open"):
                orders.add_metric([name, outcome], state["rounds_list"][-1][outcome])
            yield orders

    def _devices(self) -> Metric:
        family = GaugeMetricFamily("fedge_devices", "Devices by state.", labels=["federation", "state"])
        states = Counter("quarantined" if d["quarantine"] else d["presence"] for d in self._state["devices"])
        for each in ("online", "sleeping", "offline", "quarantined"):
            family.add_metric([self._state["federation"], each], states[each])
        return family

    def _each(self) -> Iterator[Metric]:
        labels = ["federation", "device"]
        accuracy = GaugeMetricFamily(
            "fedge_device_accuracy", "The last one that it told, between 0 and 1.", labels=labels
        )
        seen = GaugeMetricFamily("fedge_device_seen_timestamp_seconds", "When it was last heard.", labels=labels)
        trained = CounterMetricFamily("fedge_device_trainings", "Rounds that it trained in.", labels=labels)
        release = GaugeMetricFamily("fedge_device_release", "The highest of a bundle that it has had.", labels=labels)
        for device in self._state["devices"]:
            of = [self._state["federation"], device["id"]]
            if device["accuracy"]:
                accuracy.add_metric(of, device["accuracy"][-1][1])
            if device["seen_at"] is not None:
                seen.add_metric(of, device["seen_at"])
            trained.add_metric(of, device["trained"])
            release.add_metric(of, device["release"])
        yield from (accuracy, seen, trained, release)


def exposition(state: Mapping[str, Any], accept: str) -> tuple[bytes, str]:
    """The text, in the format that who asks accepts, and its content type."""
    encode, content_type = choose_encoder(accept)
    registry = CollectorRegistry()
    registry.register(_State(state))
    return encode(registry), content_type
