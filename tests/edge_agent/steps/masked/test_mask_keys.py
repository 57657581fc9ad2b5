"""A device advertises keys, once for each sum."""

from __future__ import annotations

from pathlib import Path

from fedge.steps.masked.mask_keys import KeysMade, MaskKeys
from tests.support.orders import TASK, Blobs, order, worker


def test_asked_again_it_tells_the_same_keys_also_after_a_kill(tmp_path: Path) -> None:
    action = MaskKeys(session="train")
    first = worker(tmp_path).execute(order(action), Blobs()).result
    assert isinstance(first, KeysMade)
    action.check(first, TASK)
    assert worker(tmp_path).execute(order(action, seed=9), Blobs()).result == first
    assert worker(tmp_path).execute(order(action, 2), Blobs()).result != first


def test_keys_are_the_systems_and_not_the_orders(tmp_path: Path) -> None:
    """Equal orders give two devices different keys: whoever wrote the order knows none of them."""
    one, other = (worker(tmp_path / i).execute(order(MaskKeys(session="s")), Blobs()).result for i in "ab")
    assert one != other
