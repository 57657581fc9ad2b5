"""Guards that combine, and the reasons of those that do not."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from coordinator.aggregation.protection import COMBINATIONS, Guard, Protection, format_table, require_combinable
from coordinator.methods.catalogue import make_method
from coordinator.methods.settings import MethodSettings
from coordinator.service.settings import CoordinatorSettings
from coordinator.simulation.settings import Setup
from fedge.errors import ConfigError
from fedge.tensors.layout import Codec


class Both(Protection, frozen=True, kw_only=True):
    """Whatever guards a test wants."""

    wanted: tuple[Guard, ...] = ()

    @property
    def guards(self) -> frozenset[Guard]:
        return frozenset(self.wanted)


@pytest.mark.parametrize("pair", COMBINATIONS, ids=lambda pair: "+".join(sorted(pair)))
def test_what_does_not_combine_is_refused_with_the_reason(pair: frozenset[Guard]) -> None:
    with pytest.raises(ConfigError, match="do not combine") as refused:
        require_combinable(Both(wanted=tuple(pair)), {}, "fedavg")
    assert COMBINATIONS[pair] in str(refused.value)


def test_a_guard_that_does_not_fit_a_method_is_refused_before_the_run() -> None:
    with pytest.raises(ConfigError, match="fedavg cannot have median: it has no average"):
        require_combinable(Protection(average="median"), {"median": "it has no average"}, "fedavg")
    assert make_method(
        "fedavg", MethodSettings(protection=Protection(average="median"))
    ).settings.protection.guards == {"median"}


def test_masked_or_noisy_updates_are_whole() -> None:
    with pytest.raises(ConfigError, match="masking and top-k do not combine"):
        make_method("fedavg", MethodSettings(codec=Codec.TOP, protection=Protection(average="mean", masking=True)))
    assert make_method("fedavg", MethodSettings(codec=Codec.TOP)).settings.codec is Codec.TOP


def test_each_pair_is_in_the_table() -> None:
    text = format_table(("median", "dp", "masking"))
    assert text.splitlines()[2] == "| median |  | yes | no (a) |"
    assert text.splitlines()[4] == "| masking | no (a) | no (b) |  |"
    assert "- (a) it needs each device's update" in text


def test_the_table_is_in_the_document() -> None:
    document = Path(__file__).parents[3] / "docs/hostile.md"
    assert format_table() in document.read_text(), "make it anew: coordinator.aggregation.protection.format_table()"


@pytest.mark.parametrize("other", [Setup, CoordinatorSettings])
def test_the_commands_have_the_defaults_of_guards_and_methods(other: type[msgspec.Struct]) -> None:
    """A struct inherits from one other, so these name the settings anew; a simulation with dp is one campaign."""
    guards, shared, own = (
        {f.name: f.default for f in msgspec.structs.fields(kind)} for kind in (Protection, MethodSettings, other)
    )
    apart = {"dp_campaigns"} - own.keys()
    assert not apart or other is Setup
    assert {name: own[name] for name in guards.keys() - apart} == {n: v for n, v in guards.items() if n not in apart}
    assert {name: own[name] for name in own.keys() & shared.keys()}.items() <= shared.items()


def test_the_commands_have_the_same_defaults() -> None:
    """Of what simulated and real federations share."""
    here, there = ({f.name: f.default for f in msgspec.structs.fields(kind)} for kind in (Setup, CoordinatorSettings))
    apart = {name for name in here.keys() & there.keys() if here[name] != there[name]}
    assert apart == {"task", "devices"}, {name: (here[name], there[name]) for name in apart}
