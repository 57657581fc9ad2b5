"""Methods by name."""

import pytest

from coordinator.methods.catalogue import load_method_class, make_method
from coordinator.methods.settings import MethodSettings
from fedge.errors import ConfigError


def test_an_unknown_method_names_the_known_ones() -> None:
    with pytest.raises(ConfigError, match="fedavg, fedavgm, "):
        make_method("nothing", MethodSettings())


def test_a_method_says_at_least_what_a_round_is() -> None:
    with pytest.raises(ConfigError, match="lacks round"):
        load_method_class("coordinator.methods:Method")
