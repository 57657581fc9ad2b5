"""`fedge simulate --stream` as a user meets it."""

import json
from pathlib import Path

import pytest

from coordinator.simulation.settings import StreamedSettings
from coordinator.simulation.stream.command import choose_happenings
from coordinator.simulation.stream.happenings import HAPPENINGS
from fedge.commands.cli import main

SMALL = ["--stream", "2", "--devices", "3", "--samples", "500", "--rounds", "2", "--method", "fedavg"]


def test_a_stream_is_shown_campaign_by_campaign_and_its_report_remade(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    assert main(["simulate", *SMALL, "--out", str(out), "--json", str(tmp_path / "figures.json")]) == 0
    said = capfd.readouterr()
    assert said.err.count("campaign 2/2  accuracy 0.") == 1
    assert "backward" in said.out
    assert "is turned by 90 degrees in campaign 2." in said.out
    figures = json.loads((tmp_path / "figures.json").read_bytes())
    assert [campaign["campaign"] for campaign in figures["campaigns"]] == [1, 2]
    assert f"{100 * figures['campaigns'][1]['accuracy']:.1f}" in said.out
    page = (out / "report.html").read_text()
    (out / "report.html").unlink()
    assert main(["report", str(out)]) == 0
    assert (out / "report.html").read_text() == page


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--happens", "rain"], "nothing called 'rain' can happen"),
        (["--target", "0.9"], "--target changes nothing with --stream"),
        (["--late-joiners", "1"], "--late-joiners changes nothing with --stream"),
        (["--engine", "ray"], "--engine changes nothing with --stream"),
        (["--partition", "generated"], "--partition generated makes samples on demand"),
    ],
)
def test_what_a_stream_does_not_heed_is_refused(
    flags: list[str], words: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(["simulate", *SMALL, *flags]) == 2
    assert words in capfd.readouterr().err


def test_by_default_all_happens_that_the_samples_allow() -> None:
    assert choose_happenings(StreamedSettings(stream=2)) == HAPPENINGS
    assert choose_happenings(StreamedSettings(stream=2, happens="none")) == ()
    assert choose_happenings(StreamedSettings(stream=2, task="uci-har")) == tuple(h for h in HAPPENINGS if h != "turn")
