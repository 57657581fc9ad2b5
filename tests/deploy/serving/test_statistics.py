"""What is counted of requests and calls."""

import contextlib

import pytest

from deploy.serving.statistics import SECONDS, Statistics

pytestmark = pytest.mark.torch_free


def test_requests_by_outcome_and_those_for_whom_nobody_waits_not_at_all():
    counts = Statistics()
    for outcome in ("answered", "answered", "refused", None):
        with contextlib.suppress(ValueError), counts.measure_request(lambda _, outcome=outcome: outcome):
            if outcome != "answered":
                raise ValueError
    assert {name: duration.count for name, duration in counts.outcomes.items()} == {"answered": 2, "refused": 1}
    assert sum(counts.buckets.values()) == 2
    assert set(counts.buckets) <= set(range(len(SECONDS) + 1))
    assert counts.to_triton()["inference_stats"]["fail"].count == 1


def test_calls_of_the_graph_by_their_samples():
    counts = Statistics()
    for n_samples, n_requests in ((8, 3), (8, 2), (1, 1)):
        counts.record_call(n_samples, n_requests, 1000)
    told = counts.to_triton()
    assert (told["inference_count"], told["execution_count"]) == (17, 3)
    assert told["inference_stats"]["compute_infer"].count == 6
    assert [(batch["batch_size"], batch["compute_infer"].ns) for batch in told["batch_stats"]] == [(1, 1000), (8, 2000)]


def test_what_fails_takes_no_time():
    counts = Statistics()
    with contextlib.suppress(ValueError), counts.read.measure():
        raise ValueError
    assert counts.read.count == 0
