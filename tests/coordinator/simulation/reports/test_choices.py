import pytest

from coordinator.simulation.reports.choices import Choices

BANDIT = {
    "cluster": 0,
    "ids": ("a", "d"),
    "overdue": ("d",),
    "seconds": {"a": 0.1, "b": 0.2, "c": 0.5, "d": 0.6},
    "estimates": {"a": (0.3, 0.2), "b": (0.1, 0.2), "c": (0.0, 0.1), "d": (0.0, 0.4)},
    "contexts": {"a": (1.5, 6.0, 40.0, 0.9, 0.25), "d": (1.0, 0.3, 30.0, 1.1, 0.4)},
    "deadline_s": 0.3,
}


def test_each_device_has_its_own_reason_and_the_context_in_which_it_was_last_asked() -> None:
    choices = Choices()
    choices.observe("chosen", BANDIT | {"ids": ("b",), "overdue": (), "contexts": {"b": (2.0, 7.0, 50.0, 0.5, 0.1)}})
    choices.observe("chosen", BANDIT)
    a, b, c, d = choices.list_choices("abcd")
    assert [choice.why for choice in (a, b, c, d)] == [
        *("asked", "others came first", "too slow for 0.3 s", "asked, had waited long")
    ]
    assert [(choice.asked, choice.among) for choice in (a, b, c, d)] == [(1, 2), (1, 2), (0, 2), (1, 2)]
    assert (a.seconds, a.gain, a.bonus, a.context) == (0.1, 0.3, 0.2, (1.5, 6.0, 40.0, 0.9, 0.25))
    assert b.context == (2.0, 7.0, 50.0, 0.5, 0.1), "of the choice before the last"
    assert c.context == (), "it was never asked"


@pytest.mark.parametrize(
    ("event", "fields"),
    [
        ("chosen", {"ids": ("a",), "overdue": (), "seconds": {"a": 0.0, "b": 0.0}, "deadline_s": None}),  # by lot
        ("asked", {"label": "train", "devices": 2}),
    ],
)
def test_what_looks_at_no_context_is_no_choice(event: str, fields: dict[str, object]) -> None:
    choices = Choices()
    choices.observe(event, fields)
    assert choices.list_choices("ab") == ()


def test_who_always_takes_everybody_chooses_nobody() -> None:
    choices = Choices()
    choices.observe("chosen", BANDIT | {"ids": tuple("abcd")})
    assert choices.list_choices("abcd") == ()


def test_only_the_devices_that_are_asked_for_are_listed_and_another_rule_expects_no_gain() -> None:
    choices = Choices()
    choices.observe("chosen", BANDIT | {"estimates": {}, "deadline_s": None})
    assert [(choice.id, choice.gain, choice.bonus) for choice in choices.list_choices("bz")] == [("b", None, None)]
