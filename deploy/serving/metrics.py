"""Counters of a model server, for Prometheus. Needs prometheus_client (`fedge[metrics]`)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate

from prometheus_client.core import HistogramMetricFamily, Metric

from deploy.serving.endpoints import ServedModel
from deploy.serving.statistics import OUTCOMES, SECONDS
from edge_agent.samples.answers import AnswerCount
from fedge.wire.messages import DriftKind
from fedge.wire.openmetrics import make_metric


def collect_metrics(
    models: Sequence[ServedModel], labelled: Mapping[str, Sequence[AnswerCount]], connections: int, turned_away: int
) -> Iterator[Metric]:
    """Yield the metrics of all models, by label `model`, and of the port; `labelled` has each model's answer counts."""
    each = [(model, model.statistics, [model.name]) for model in models]
    yield make_metric("gauge", "fedge_serve_connections", "Clients that are connected.", [], [([], connections)])
    yield make_metric(
        "counter", "fedge_serve_turned_away", "Clients who came when all places were taken.", [], [([], turned_away)]
    )
    yield make_metric(
        "counter",
        "fedge_serve_requests",
        "Requests by outcome; refused: the client's fault, busy: the queue was full, failed: the model did.",
        ["model", "outcome"],
        [([m.name, outcome], counts.outcomes[outcome].count) for m, counts, _ in each for outcome in OUTCOMES],
    )
    seconds = HistogramMetricFamily("fedge_serve_request_seconds", "Durations of answered requests.", labels=["model"])
    for model, counts, _ in each:
        below = accumulate(counts.buckets[i] for i in range(len(SECONDS) + 1))
        bounds = [*map(str, SECONDS), "+Inf"]
        seconds.add_metric([model.name], list(zip(bounds, below, strict=True)), counts.outcomes["answered"].ns / 1e9)
    yield seconds
    for name, about, values in (
        ("samples", "Samples that were predicted.", [counts.n_samples for _, counts, _ in each]),
        ("outliers", "Samples unlike those of the bundle.", [counts.n_outliers for _, counts, _ in each]),
        ("calls", "Calls of the graph.", [sum(c.count for c in counts.batches.values()) for _, counts, _ in each]),
        ("graph_seconds", "Time in calls.", [sum(c.ns for c in s.batches.values()) / 1e9 for _, s, _ in each]),
        ("queue_seconds", "Time that requests waited.", [counts.queue.ns / 1e9 for _, counts, _ in each]),
    ):
        rows = [(labels, value) for (_, _, labels), value in zip(each, values, strict=True)]
        yield make_metric("counter", f"fedge_serve_{name}", about, ["model"], rows)
    rows = [(labels, float(model.drift_kind is not None)) for model, _, labels in each]
    yield make_metric(
        "gauge", "fedge_serve_drifted", "1 if recent samples differ from those of the bundle.", ["model"], rows
    )
    yield make_metric(
        "gauge",
        "fedge_serve_drift_kind",
        "1 for the kind of drift: other class shares, other inputs, or labels that contradict.",
        ["model", "kind"],
        [([m.name, str(kind)], float(m.drift_kind is kind)) for m, _, _ in each for kind in DriftKind],
    )
    rows = [(labels, model.manifest.release) for model, _, labels in each]
    yield make_metric("gauge", "fedge_serve_release", "Release of the bundle in service.", ["model"], rows)
    yield make_metric(
        "gauge",
        "fedge_serve_bundle",
        "1 for the bundle in service, with its engine and provider.",
        ["model", "bundle", "engine", "provider"],
        [([m.name, m.runtime.digest, m.runtime.engine, m.runtime.providers[0]], 1) for m, _, _ in each],
    )
    run = {
        (m.name, c.name): float(k in m.runtime.used) for m, _, _ in each for k, c in enumerate(m.manifest.candidates)
    }
    yield make_metric(
        "gauge",
        "fedge_serve_candidate",
        "1 for a candidate of the bundle in service that runs, 0 for one that the budget leaves out.",
        ["model", "candidate"],
        [(list(names), value) for names, value in run.items()],
    )
    by_class: Counter[tuple[str, ...]] = Counter()
    for model in models:
        found = labelled[model.name]
        classes = model.feedback.store.refresh_task().problem.name_groups() if model.feedback and found else ()
        for one in found:
            words = model.name, str(one.release), classes[one.label]
            by_class[(*words, "right")] += one.right
            by_class[(*words, "wrong")] += one.wrong
    yield make_metric(
        "gauge",
        "fedge_serve_labelled_answers",
        "Answers to unmarked samples whose true class was told later, of those that the device remembers.",
        ["model", "release", "class", "outcome"],
        [(list(words), n) for words, n in sorted(by_class.items())],
    )
