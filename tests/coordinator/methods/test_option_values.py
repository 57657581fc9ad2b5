"""Options of a method: which there are, and why others are refused."""

import math
import re
from typing import get_args

import msgspec
import numpy as np
import pytest

from coordinator.aggregation.protection import Guard, Protection
from coordinator.methods.catalogue import get_installed_methods, load_method_class, make_method
from coordinator.methods.method import Server
from coordinator.methods.options import parse_method, require_method_options
from coordinator.methods.settings import MethodSettings
from fedge.errors import ConfigError
from fedge.steps.sgd import Sgd
from fedge.system.loading import FINE_TUNED
from fedge.tasks import load_task


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_options_are_finite_for_no_message_holds_another_number(value: float) -> None:
    with pytest.raises(ConfigError):
        make_method("fedprox", MethodSettings(options={"proximal_mu": value}))


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
        require_method_options(*parse_method(text))


RECIPE = {"optimizer": "adam", "nesterov": True, "clip_norm": 1.0, "label_smoothing": 0.1, "class_weights": "balanced"}
ELSEWHERE = {*get_args(Guard), FINE_TUNED, *RECIPE, "schedule"}
"""What a method may refuse besides options."""


@pytest.mark.parametrize("name", get_installed_methods())
def test_an_option_that_there_is_not_says_why_or_what_replaces_it(name: str) -> None:
    kind = load_method_class(name)
    known = {field.name for field in msgspec.structs.fields(kind.Options)}
    for option, why in kind.REFUSED.items():
        own, _, word = option.partition("=")
        if option not in ELSEWHERE:
            assert (own in known) == (bool(word) and own != "selection"), option
            with pytest.raises(ConfigError, match=re.escape(why)):
                require_method_options(name, {own: word or 1})


@pytest.mark.parametrize("name", get_installed_methods())
def test_a_guard_and_fine_tuning_are_refused_with_the_same_table(name: str) -> None:
    server = Server(load_task("digits"), (np.zeros((20, 64), np.float32), np.arange(20) % 10))
    protections = {"dp": Protection(dp_epsilon=8.0), "masking": Protection(masking=True, average="mean")}
    for what in (ELSEWHERE - RECIPE.keys()) & load_method_class(name).REFUSED.keys():
        guard = protections.get(what) or (Protection(average=what) if what != FINE_TUNED else Protection())
        with pytest.raises(ConfigError, match=re.escape(load_method_class(name).REFUSED[what])):
            make_method(name + FINE_TUNED * (what == FINE_TUNED), MethodSettings(protection=guard), server)


@pytest.mark.parametrize("name", get_installed_methods())
def test_a_part_of_the_recipe_is_refused_with_the_same_table(name: str) -> None:
    for what in RECIPE.keys() & load_method_class(name).REFUSED.keys():
        with pytest.raises(ConfigError, match=re.escape(load_method_class(name).REFUSED[what])):
            make_method(name, MethodSettings(sgd=Sgd(**{what: RECIPE[what]})))


def test_the_selection_is_every_methods_and_the_first_is_the_default() -> None:
    without = {name for name in get_installed_methods() if not load_method_class(name).SELECTIONS}
    assert without == {"fedbuff", "haccs", "local"}
    assert make_method("fedavg", MethodSettings()).selection == "uniform"
    assert make_method("cfic", MethodSettings()).selection == "stratified"
    assert make_method("fedge", MethodSettings(options={"selection": "fastest"})).selection == "fastest"
    for given in ("fastes", 1):
        with pytest.raises(ConfigError, match="selection cannot be"):
            make_method("fedge", MethodSettings(options={"selection": given}))


def test_options_are_few() -> None:
    """Issue 10: what someone would set for a real fleet, and what a paper's headline comparison needs."""
    own = {name: len(msgspec.structs.fields(load_method_class(name).Options)) for name in get_installed_methods()}
    assert sum(own.values()) <= 2.65 * len(own), own  # 45 for 17 methods
