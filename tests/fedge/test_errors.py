import pytest

from fedge import errors


@pytest.mark.parametrize(
    ("kind", "code"),
    [("ConfigError", 2), ("TransportError", 3), ("StoreError", 4), ("UpdateRejected", 5), ("FedgeError", 1)],
)
def test_exit_codes_are_those_of_the_documentation(kind: str, code: int) -> None:
    assert getattr(errors, kind).exit_code == code


def test_one_tree_drawn_in_the_module() -> None:
    kinds = {name for name, kind in vars(errors).items() if isinstance(kind, type)}
    assert all(issubclass(getattr(errors, name), errors.FedgeError) for name in kinds)
    assert errors.__doc__ is not None
    assert all(name in errors.__doc__ for name in kinds)


def test_a_protocol_error_carries_its_name() -> None:
    error = errors.ProtocolError("malformed", "not a message")
    assert error.name == "malformed"
    assert str(error) == "malformed: not a message"
