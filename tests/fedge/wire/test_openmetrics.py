"""Figures as text, in the format that who asks accepts."""

import pytest

pytest.importorskip("prometheus_client")

from prometheus_client.parser import text_string_to_metric_families

from fedge.wire.openmetrics import format_metrics, make_metric


def test_a_value_that_is_not_known_is_left_out_and_labels_are_escaped() -> None:
    found = [
        make_metric("gauge", "g", "G.", ["who"], [(['a"\n'], 1), (["b"], None)]),
        make_metric("counter", "c", "C.", [], [([], 2)]),
    ]
    text, content_type = format_metrics(found, "text/plain")
    assert content_type.startswith("text/plain")
    g, c = list(text_string_to_metric_families(text.decode()))
    assert [(sample.labels, sample.value) for sample in g.samples] == [({"who": 'a"\n'}, 1)]
    assert [(sample.name, sample.value) for sample in c.samples] == [("c_total", 2)]
    assert format_metrics(found, "application/openmetrics-text; version=1.0.0")[0].endswith(b"# EOF\n")
