"""Parts of a page."""

import re

from coordinator.simulation.reports.report import (
    make_comparison_report,
    make_demo_report,
    make_run_report,
)
from coordinator.simulation.settings import Scenario
from tests.support.comparison import a_comparison, a_run
from tests.support.demo import a_demonstration


def test_every_table_of_a_page_can_be_scrolled_by_itself() -> None:
    outcome = a_run()
    run = make_run_report(outcome, Scenario()).page
    for text in (make_comparison_report(a_comparison(3)).page, make_demo_report(a_demonstration()).page, run):
        assert text.count("<table>") == len(re.findall('<div class="scroll( wide)?" tabindex="0"><table>', text)) > 0
        assert text.count("scroll wide") == sum(part.count('scope="col"') > 4 for part in text.split("<table>"))
    assert "sideways" not in a_comparison(3)._repr_html_(), "a notebook is no phone"
