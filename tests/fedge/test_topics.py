import re

import pytest

from fedge import topics
from fedge.topics import Topics

T = Topics("shop")


def test_names_are_those_of_the_table() -> None:
    assert topics.__doc__ is not None
    table = re.findall(r"^ *(fedge/\S+)", topics.__doc__, flags=re.MULTILINE)
    built = [
        *(T.agent("{id}", leaf) for leaf in ("status", "context", "orders", "reports", "acks", "wants")),
        *(T.agent("{id}", leaf) for leaf in ("health", "release-wants", "predict", "predictions")),
        T.rollout,
        T.coordinator_wants("{id}"),
        T.model_chunk("{digest}", "{offset}"),
        T.update_chunk("{id}", "{digest}", "{offset}"),
    ]
    assert sorted(name.replace("/shop/", "/{federation}/") for name in built) == sorted(table)


def test_subscriptions_take_wildcards() -> None:
    assert T.agent("+", "reports") == "fedge/1/shop/agents/+/reports"
    assert T.update_chunk("cam1") == "fedge/1/shop/agents/cam1/blobs/+/+"
    assert T.model_chunk("ab") == "fedge/1/shop/blobs/ab/+"


@pytest.mark.parametrize(
    ("topic", "parts"),
    [
        ("fedge/1/shop/agents/cam1/status", ("agents", "cam1", "status")),
        ("fedge/1/shop/blobs/ab/512", ("blobs", "ab", "512")),
        ("fedge/1/shopping/agents/cam1/status", ()),
        ("fedge/2/shop/agents/cam1/status", ()),
        ("x/fedge/1/shop/agents", ()),
    ],
)
def test_parts_of_our_own_topics_alone(topic: str, parts: tuple[str, ...]) -> None:
    assert T.parts(topic) == parts
