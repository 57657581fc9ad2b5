import pytest

from fedge import errors


@pytest.mark.parametrize(
    ("kind", "code"),
    [("ConfigError", 2), ("TransportError", 3), ("StoreError", 4), ("UpdateRejected", 5), ("FedgeError", 1)],
)
def test_exit_codes_are_those_of_the_documentation(kind: str, code: int) -> None:
    assert getattr(errors, kind).exit_code == code


def test_one_tree_drawn_in_the_module() -> None:
    own = {name: kind for name, kind in vars(errors).items() if getattr(kind, "__module__", "") == errors.__name__}
    kinds = {name for name, kind in own.items() if isinstance(kind, type)}
    assert all(issubclass(getattr(errors, name), errors.FedgeError) for name in kinds)
    assert errors.__doc__ is not None
    assert all(name in errors.__doc__ for name in kinds)


def test_a_protocol_error_carries_its_name() -> None:
    error = errors.ProtocolError("malformed", "not a message")
    assert error.name == "malformed"
    assert str(error) == "malformed: not a message"


def test_errors_of_others_become_ours_with_their_text() -> None:
    stores, reads = errors.raise_as(errors.StoreError, "cannot write it"), (OSError, KeyError)
    with pytest.raises(errors.StoreError, match=r"^cannot write it: full$") as raised, stores:
        raise OSError("full")
    assert isinstance(raised.value.__cause__, OSError)
    with pytest.raises(errors.ConfigError, match=r"^file: 'x'$"), errors.raise_as(errors.ConfigError, "file", reads):
        raise KeyError("x")
    with pytest.raises(ValueError, match=r"^another$"), errors.raise_as(errors.ConfigError, "file", reads):
        raise ValueError("another")
