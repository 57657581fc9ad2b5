"""Memory that is freed stays with the process."""

from fedge.malloc import tune_malloc


def test_it_can_be_called_twice() -> None:
    assert tune_malloc() == tune_malloc()
