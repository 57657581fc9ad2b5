"""Options of a method: which there are, and why others are refused."""

import math
import re

import msgspec
import pytest

from coordinator.methods.catalogue import installed_methods, make, method_class
from coordinator.methods.options import check, method_and_options
from coordinator.methods.settings import MethodSettings
from fedge.errors import ConfigError


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_options_are_finite_for_no_message_holds_another_number(value: float) -> None:
    with pytest.raises(ConfigError):
        make("fedprox", MethodSettings(options={"proximal_mu": value}))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("cfic:correction=false:beta=0.5", "alpha and beta change nothing"),
        ("cfic:clustering=aidc:epsilon=1", "epsilon hides label features"),
        ("fedepc:clustering=labels:sigma_dp=0.1", "sigma_dp hides profiles"),
        ("fedepc:sigma_dp=0.1", "set extractor=server"),
        ("fedepc:n_clusters=3", "n_clusters changes nothing with clustering=aidc"),
        ("fedge:mode=shift:local_pilot=true", "local_pilot changes nothing"),
        ("pm-moe:noise=1", "give clip, too"),
        ("scmoe-pfl:clustering=labels:n_clusters=3", "n_clusters changes nothing"),
    ],
)
def test_what_was_asked_for_and_would_not_happen_is_refused(text: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        check(*method_and_options(text))


@pytest.mark.parametrize("name", installed_methods())
def test_an_option_that_there_is_not_says_why_or_what_replaces_it(name: str) -> None:
    kind = method_class(name)
    known = {field.name for field in msgspec.structs.fields(kind.Options)}
    for option, why in kind.REFUSED.items():
        own, _, word = option.partition("=")
        assert (own in known) == (bool(word) and own != "selection"), option
        with pytest.raises(ConfigError, match=re.escape(why)):
            check(name, {own: word or 1})


def test_the_selection_is_every_methods_and_the_first_is_the_default() -> None:
    assert {name for name in installed_methods() if not method_class(name).SELECTIONS} == {"fedbuff", "local"}
    assert make("fedavg", MethodSettings()).selection == "uniform"
    assert make("cfic", MethodSettings()).selection == "stratified"
    assert make("fedge", MethodSettings(options={"selection": "fastest"})).selection == "fastest"
    for given in ("fastes", 1):
        with pytest.raises(ConfigError, match="selection cannot be"):
            make("fedge", MethodSettings(options={"selection": given}))


def test_options_are_few() -> None:
    """Issue 10: what someone would set for a real fleet, and what a paper's headline comparison needs."""
    own = {name: len(msgspec.structs.fields(method_class(name).Options)) for name in installed_methods()}
    assert sum(own.values()) <= 45, own
