import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedge.wire import topics
from fedge.wire.topics import MAX_CLIENT_ID, MAX_CLIENT_PREFIX, Topics, add_prefix, remove_prefix

T = Topics("shop")


def test_names_are_those_of_the_table() -> None:
    assert topics.__doc__ is not None
    table = re.findall(r"^ *(fedge/\S+)", topics.__doc__, flags=re.MULTILINE)
    built = [
        *(T.make_agent_topic("{id}", leaf) for leaf in ("status", "context", "orders", "reports", "acks", "wants")),
        *(
            T.make_agent_topic("{id}", leaf)
            for leaf in ("health", "introduced", "release-wants", "renewal", "certificate", "predict")
        ),
        *(T.make_agent_topic("{id}", leaf) for leaf in ("feedback", "predictions")),
        T.rollout,
        T.introduction,
        T.revocations,
        T.beacon,
        T.claims,
        T.make_wants_topic("{id}"),
        T.make_model_topic("{digest}", "{offset}"),
        T.make_update_topic("{id}", "{digest}", "{offset}"),
    ]
    assert sorted(name.replace("/shop/", "/{federation}/") for name in built) == sorted(table)


def test_subscriptions_take_wildcards() -> None:
    assert T.make_agent_topic("+", "reports") == "fedge/1/shop/agents/+/reports"
    assert T.make_update_topic("cam1") == "fedge/1/shop/agents/cam1/blobs/+/+"
    assert T.make_model_topic("ab") == "fedge/1/shop/blobs/ab/+"


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
    assert T.split(topic) == parts


NAMES = (
    st.text("ab-._", min_size=1, max_size=63)
    | st.sampled_from(["coordinator", "rollout"])
    | st.just("a" * 63)
    | st.just("b" * 63)
)
CLIENTS = st.tuples(st.sampled_from(["agent", "serve", "status"]), NAMES, NAMES) | st.tuples(
    st.sampled_from(["coordinator", "rollout"]), NAMES, st.just("")
)


@given(CLIENTS, CLIENTS)
def test_no_two_clients_have_one_id(one, other) -> None:
    ids = [Topics(federation).make_client_id(role, name) for role, federation, name in (one, other)]

    assert (ids[0] == ids[1]) == (one == other)
    assert all(re.fullmatch(r"[A-Za-z0-9_.:-]+", client) and len(client) <= MAX_CLIENT_ID for client in ids)


def test_names_that_hold_the_separator_of_before_are_told_apart() -> None:
    assert Topics("a").make_client_id("agent", "b-c") != Topics("a-b").make_client_id("agent", "c")
    assert T.make_client_id("agent", "coordinator") != T.make_client_id("coordinator")


@pytest.mark.parametrize(
    ("prefix", "topic", "name"),
    [
        ("", "fedge/1/f/x", "fedge/1/f/x"),
        ("a/b", "fedge/1/f/x", "a/b/fedge/1/f/x"),
        ("a/b", "$share/g/fedge/1/f/+", "$share/g/a/b/fedge/1/f/+"),
    ],
)
def test_a_prefix_goes_before_topics_and_after_a_group(prefix: str, topic: str, name: str) -> None:
    assert add_prefix(prefix, topic) == name


@pytest.mark.parametrize(
    ("prefix", "name", "topic"),
    [
        ("", "elsewhere", "elsewhere"),
        ("a", "a/x", "x"),
        ("a", "ab/x", "$outside/ab/x"),
        ("a", "a", "$outside/a"),
        ("a", "fedge/1/f/x", "$outside/fedge/1/f/x"),
    ],
)
def test_what_is_not_below_the_prefix_is_not_ours(prefix: str, name: str, topic: str) -> None:
    assert remove_prefix(prefix, name) == topic


def test_a_client_id_has_room_for_a_prefix_at_aws() -> None:
    assert MAX_CLIENT_ID + MAX_CLIENT_PREFIX <= 128
