"""What people read of failures on devices."""

from coordinator.fleet.problems import LONGEST, Problem, describe_reasons, select_reasons


def test_devices_with_one_reason_stand_together_and_most_come_first() -> None:
    reasons = {"a": "failed: x", "b": "expired", "c": "expired", "d": "expired", "e": "expired"}
    assert describe_reasons(reasons) == "b, c and 2 more: expired; a: failed: x"
    assert describe_reasons({"a": "expired", "b": "expired", "c": "expired"}) == "a, b, c: expired"
    assert describe_reasons({}) == ""


def test_few_reasons_are_told_each_in_one_short_line() -> None:
    many = {f"cam{k}": f"reason\n  {k}" for k in range(5)}
    assert describe_reasons(many) == "cam0: reason 0; cam1: reason 1; cam2: reason 2; 2 more for other reasons"
    assert describe_reasons({"a": "x" * 1000}) == "a: " + "x" * LONGEST


def test_problems_of_earlier_rounds_are_left_out() -> None:
    problems = {"a": Problem(round=1, reason="expired"), "b": Problem(round=3, reason="failed")}
    assert select_reasons(problems) == {"a": "expired", "b": "failed"}
    assert select_reasons(problems, 2) == {"b": "failed"}
