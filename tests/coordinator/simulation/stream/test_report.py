"""A stream as a table and as files."""

import csv
import io

from coordinator.simulation.reports.outcome import format_csv
from coordinator.simulation.settings import Scenario
from coordinator.simulation.stream.happenings import Happenings
from coordinator.simulation.stream.report import (
    HEAD,
    describe_happenings,
    draw_campaigns,
    format_rows,
    list_lineage,
    make_stream_report,
)
from coordinator.simulation.stream.run import CampaignOutcome, StreamOutcome


def campaign(number: int, **changes: object) -> CampaignOutcome:
    known = {
        "campaign": number,
        "accuracy": 0.8125,
        "before": None,
        "frozen": 0.75,
        "backward": None,
        "turned": None,
        "moved": None,
        "devices": {"a": 0.75, "b": 0.875},
        "n_samples": 40.5,
        "bytes_up": 1_000_000,
        "bytes_down": 500_000,
        "experts": 0,
    }
    return CampaignOutcome(**(known | changes))


OUTCOME = StreamOutcome(
    method="fedge",
    seed=0,
    happens=Happenings(
        campaigns=2, births=(1, 2), turned="a", turns_in=2, moved=("a", "b"), moves_in=2, wrong=("b",), wrong_from=2,
        seasons=True,
    ),
    campaigns=(
        campaign(1),
        campaign(2, before=0.5, backward=-0.0125, turned=0.7, moved=0.8, experts=2, lineage=("x",)),
    ),
)  # fmt: skip


def test_a_row_has_a_figure_or_a_dash_for_each_column() -> None:
    first, second = format_rows(OUTCOME.campaigns)
    assert first == ("1", "81.2", "–", "75.0", "–", "–", "–", "40", "–", "1.5")
    assert second == ("2", "81.2", "50.0", "75.0", "-1.2", "70.0", "80.0", "40", "2", "1.5")
    assert len(first) == len(HEAD)


def test_what_happens_is_told_in_words() -> None:
    assert describe_happenings(OUTCOME.happens) == [
        "Class 1 appears in campaign 2.",
        "The light changes with the seasons.",
        "a is turned by 90 degrees in campaign 2.",
        "a and b change places in campaign 2.",
        "From campaign 2 on some labels of b are wrong.",
    ]
    assert describe_happenings(Happenings(campaigns=1, births=(1,))) == []
    assert list_lineage(OUTCOME) == ["campaign 2: x"]


def test_the_report_has_page_rows_and_plot() -> None:
    report = make_stream_report(OUTCOME, Scenario())
    assert "fedge over 2 campaigns on digits" in report.page
    assert "campaign 2: x" in report.page
    rows = list(csv.DictReader(io.StringIO(format_csv(report.rows))))
    assert [(row["campaign"], row["device"], row["accuracy"]) for row in rows][::3] == [
        ("1", "a", "0.75"),
        ("2", "b", "0.875"),
    ]
    assert "fedge" in draw_campaigns([OUTCOME])
