from pathlib import Path

import pytest

from coordinator.methods.options import parse_method, parse_pairs, require_method_options, resolve_options
from fedge.errors import ConfigError


def test_values_are_what_they_look_like() -> None:
    assert parse_pairs(["a=1", "b=0.5", "c=true", "d=False", "e=k-means", "f=1e-3", "g = x=y "]) == {
        "a": 1, "b": 0.5, "c": True, "d": False, "e": "k-means", "f": 1e-3, "g": "x=y",
    }  # fmt: skip
    assert type(parse_pairs(["a=1"])["a"]) is int


@pytest.mark.parametrize("pair", ["", "a", "=1", " =1"])
def test_what_is_no_pair_is_refused(pair: str) -> None:
    with pytest.raises(ConfigError, match="NAME=VALUE"):
        parse_pairs([pair])


def test_the_command_line_wins_over_the_file(tmp_path: Path) -> None:
    file = tmp_path / "fedge.toml"
    file.write_text('[method]\nbase = "dbe"\ntop = 3\n')
    assert resolve_options(file, ["top=4", "guard=false"]) == {"base": "dbe", "top": 4, "guard": False}
    assert resolve_options(None, []) == {}
    file.write_text("[method]\nbase = [1]\n")
    with pytest.raises(ConfigError, match=r"base in \[method\]"):
        resolve_options(file, [])


def test_a_method_with_its_options() -> None:
    assert parse_method(" fedavg+ft ") == ("fedavg+ft", {})
    assert parse_method("fedepc:clustering=k-means:n_clusters=4") == (
        "fedepc",
        {"clustering": "k-means", "n_clusters": 4},
    )
    assert parse_method("mine.median:Own+ft:a=1") == ("mine.median:Own+ft", {"a": 1})


@pytest.mark.parametrize("name", ["port:Own", "here:Own-3", "port:Own+ft"])
def test_a_method_may_be_in_a_module_without_a_package(name: str) -> None:
    assert parse_method(name) == (name, {})
    assert parse_method(f"{name}:a=1:b=x") == (name, {"a": 1, "b": "x"})


def test_an_option_of_a_known_method_is_no_class() -> None:
    with pytest.raises(ConfigError, match="an option of a method is NAME=VALUE, not 'k-means'"):
        parse_method("fedepc:k-means")


def test_methods_and_options_are_checked_by_name_and_value() -> None:
    require_method_options("fedavg+ft", {})
    require_method_options("ditto", {"proximal_lambda": 0.3})
    for name, options, words in (
        ("fedavx", {}, "no method 'fedavx'"),
        ("ditto", {"proximal_lamda": 0.3}, "did you mean 'proximal_lambda'"),
        ("ditto", {"proximal_lambda": -1}, "option of the method: proximal_lambda: Expected `float` >= 0.0"),
    ):
        with pytest.raises(ConfigError, match=words):
            require_method_options(name, options)
