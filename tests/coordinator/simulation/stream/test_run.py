"""A method over a stream of campaigns."""

from pathlib import Path

import msgspec
import numpy as np
import pytest

from coordinator.simulation.settings import Scenario
from coordinator.simulation.stream.happenings import HAPPENINGS
from coordinator.simulation.stream.run import StreamOutcome, StreamSettings, describe_campaign, simulate_stream
from fedge.errors import ConfigError

SCENARIO = Scenario(devices=4, samples=800, rounds=4, partition="groups", n_groups=2, hardware="none")
STREAM = StreamSettings(campaigns=3, happens=HAPPENINGS, store=20)


def run(home: Path, method: str = "fedavg", how: StreamSettings = STREAM) -> StreamOutcome:
    outcome = simulate_stream(SCENARIO, method, {}, 0, home, lambda _: None, method, how)
    return msgspec.structs.replace(
        outcome, campaigns=tuple(msgspec.structs.replace(c, wall_s=0.0) for c in outcome.campaigns)
    )


def test_campaigns_go_on_and_are_measured_now_and_then(tmp_path: Path) -> None:
    found = run(tmp_path / "one")
    assert found == run(tmp_path / "again")
    first, second, third = found.campaigns
    assert (first.before, first.backward, first.frozen) == (None, None, first.accuracy)
    assert third.before is not None
    assert third.backward is not None
    assert first.n_samples < second.n_samples < third.n_samples
    assert third.turned == third.devices[found.happens.turned or ""]
    assert third.moved == pytest.approx(sum(third.devices[i] for i in found.happens.moved or ()) / 2)
    assert found.accuracy == pytest.approx(sum(c.accuracy for c in found.campaigns) / 3)
    releases = sorted(int(path.name) for path in (tmp_path / "one" / "device-0" / "bundles").iterdir())
    assert releases[-1] == 3
    assert "campaign 3/3  accuracy 0." in describe_campaign(third, 3)


def test_a_method_that_begins_anew_forgets_all_but_the_samples(tmp_path: Path) -> None:
    quiet = msgspec.structs.replace(STREAM, happens=())
    on, anew = run(tmp_path / "on", how=quiet), run(tmp_path / "anew", how=msgspec.structs.replace(quiet, restart=True))
    assert on.campaigns[0] == anew.campaigns[0]
    assert on.campaigns[2].accuracy > anew.campaigns[2].accuracy
    assert on.campaigns[2].frozen > on.campaigns[0].accuracy, "it has learned more"
    assert [c.n_samples for c in on.campaigns] == [c.n_samples for c in anew.campaigns]


def test_the_default_method_tells_its_experts_lineage(tmp_path: Path) -> None:
    scenario = msgspec.structs.replace(SCENARIO, samples=400, rounds=2)
    how = StreamSettings(campaigns=2, happens=(), store=20)
    found = simulate_stream(scenario, "fedge", {"split": "always"}, 0, tmp_path, lambda _: None, "fedge", how)
    assert all(len(c.lineage) >= c.experts > 0 for c in found.campaigns)
    assert all("new" in line for line in found.campaigns[0].lineage)


def test_a_stream_is_of_classes(tmp_path: Path) -> None:
    x = np.random.default_rng(0).normal(size=(200, 3)).astype(np.float32)
    np.savez(tmp_path / "all.npz", x=x, y=x[:, 0])
    given = msgspec.structs.replace(
        SCENARIO, task="arrays", data=tmp_path / "all.npz", problem="regression", partition="iid", samples=None
    )
    with pytest.raises(ConfigError, match=r"is for classification, not for .*: simulate one campaign"):
        simulate_stream(given, "fedavg", {}, 0, tmp_path / "home", lambda _: None, "fedavg", STREAM)
