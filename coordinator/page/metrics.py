"""A federation's metrics for Prometheus (OpenMetrics), from the page's data."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from prometheus_client.core import Metric

from coordinator.watch.accuracy import find_figure
from fedge.data.problems.scores import ACCURACY, Figure
from fedge.wire.openmetrics import make_metric


def iterate_metrics(state: Mapping[str, Any]) -> Iterator[Metric]:
    """Iterate over the metrics of one federation, whose name is a label of each."""
    name, devices = [state["federation"]], state["devices"]
    running, figure = state["coordinator"]["state"] == "running", find_figure(state)
    broker = state.get("broker") or {"connected": True}
    for metric, about, value in (
        ("fedge_round", "Rounds that are done.", state["round"]),
        ("fedge_rounds", "Rounds of training in all.", state["rounds"]),
        ("fedge_done", "1: the run is at its end.", float(state["done"])),
        ("fedge_paused", "1: no further round begins.", float(state["paused"])),
        (
            f"fedge_validation_{name_score(figure)}",
            f"Of the models in training, on validation samples of the last cohort, {describe_score(figure)}.",
            state["accuracy"],
        ),
        ("fedge_coordinator_up", "1: the coordinator gave a sign of life in the last seconds.", float(running)),
        ("fedge_broker_up", "1: the coordinator runs and reaches the broker.", float(running and broker["connected"])),
        ("fedge_coordinator_age_seconds", "Since its last sign of life.", state["coordinator"]["age_s"]),
        ("fedge_summary_age_seconds", "Since the coordinator last wrote how it stands.", state["age_s"]),
        ("fedge_clusters", "Clusters with an expert of their own.", len(state["clusters"])),
    ):
        yield make_metric("gauge", metric, about, ["federation"], [(name, value)])
    yield make_metric(
        "counter", "fedge_received_bytes", "Payload bytes from devices.", ["federation"], [(name, state["bytes_up"])]
    )
    yield make_metric(
        "counter", "fedge_sent_bytes", "Payload bytes to devices.", ["federation"], [(name, state["bytes_down"])]
    )
    states = Counter("quarantined" if d["quarantine"] else d["presence"] for d in devices)
    rows = [([*name, each], states[each]) for each in ("online", "sleeping", "offline", "quarantined", "unknown")]
    yield make_metric("gauge", "fedge_devices", "Devices by state.", ["federation", "state"], rows)
    serving = Counter(d.get("serving", "none") for d in devices)
    rows = [([*name, each], serving[each]) for each in ("serving", "down", "unknown", "none")]
    yield make_metric(
        "gauge", "fedge_runtimes", "Devices by the state of their fedge serve.", ["federation", "state"], rows
    )
    yield from iterate_attention(name, state["attention"])
    yield from iterate_accuracies(name, state)
    for kind, metric, about, values in (
        ("gauge", "fedge_device_seen_timestamp_seconds", "When it was last heard.", [d["seen_at"] for d in devices]),
        ("gauge", "fedge_device_release", "The highest of a bundle that it has had.", [d["release"] for d in devices]),
        ("counter", "fedge_device_trainings", "Rounds that it trained in.", [d["trained"] for d in devices]),
    ):
        rows = [([*name, d["id"]], value) for d, value in zip(devices, values, strict=True)]
        yield make_metric(kind, metric, about, ["federation", "device"], rows)
    if state["rounds_list"]:
        last = state["rounds_list"][-1]
        rows = [([*name, outcome], last[outcome]) for outcome in ("answered", "late", "failed", "open")]
        yield make_metric(
            "gauge", "fedge_round_orders", "Orders of the last round by outcome.", ["federation", "outcome"], rows
        )


def name_score(figure: Figure) -> str:
    """Return the part of a metric's name that names the score."""
    return figure.name if figure == ACCURACY else f"score_{figure.name}"


def describe_score(figure: Figure) -> str:
    """Describe the range of the score."""
    return "between 0 and 1" if figure.share else figure.words


def iterate_accuracies(name: list[str], state: Mapping[str, Any]) -> Iterator[Metric]:
    """Iterate over the accuracies of the fleet and its devices, each with what it is of."""
    rows = [([*name, figure["of"]], figure["share"]) for figure in state["shown"]]
    figure = find_figure(state)
    kind = name_score(figure)
    about = f"At work, of the bundles that answer, and of the models in training, {describe_score(figure)}."
    yield make_metric("gauge", f"fedge_{kind}", about, ["federation", "of"], rows)
    shown = [(d["id"], d["shown"]) for d in state["devices"] if d["shown"] is not None]
    rows = [([*name, i, figure["of"]], figure["share"]) for i, figure in shown]
    about = "Of the bundle that answers there; of the model in training if that is not told."
    yield make_metric("gauge", f"fedge_device_{kind}", about, ["federation", "device", "of"], rows)


def iterate_attention(name: list[str], items: Sequence[Mapping[str, Any]]) -> Iterator[Metric]:
    """Iterate over the metrics of what needs attention, one row for each item."""
    labels = ["federation", "kind", "severity", "device"]
    rows = [([*name, item["kind"], item["severity"], item["device"]], item) for item in items]
    about = "1: a person should look at this device, or at the server if it names none."
    yield make_metric("gauge", "fedge_attention", about, labels, [(row, 1.0) for row, _ in rows])
    since = [(row, item["since"]) for row, item in rows]
    yield make_metric("gauge", "fedge_attention_since_timestamp_seconds", "Since when, if known.", labels, since)
