from coordinator.simulation.reports.choices import Choice
from coordinator.simulation.reports.choosing import list_choosing, render_choices, render_choosing
from coordinator.simulation.reports.outcome import compute_common_score
from tests.support.comparison import a_run
from tests.support.demo import a_demonstration

ASKED = Choice(
    id="camera-00",
    asked=3,
    among=8,
    seconds=0.125,
    gain=0.5,
    bonus=0.25,
    context=(1.5, 6.0, 40.0, 0.9, 0.25),
    why="asked",
)


def test_the_table_has_context_expectations_and_the_reason() -> None:
    never = Choice(id="b", asked=0, among=8, seconds=2.0, gain=None, bonus=None, context=(), why="too slow for 1 s")
    shown = render_choices([ASKED, never], {"camera-00": "camera-00: a <board>"})
    cells = ("camera-00: a &lt;board&gt;", "1.5", "6", "0.250", "0.12", "0.500", "0.250", "3 of 8", "asked")
    assert "".join(f"<td>{cell}</td>" for cell in cells) in shown
    cells = ("b", "–", "–", "–", "2", "–", "–", "0 of 8", "too slow for 1 s")
    assert "".join(f"<td>{cell}</td>" for cell in cells) in shown
    assert render_choices([], {}) == ""


def test_ways_to_choose_are_compared_at_the_score_that_all_reach() -> None:
    quick, slow = a_run("bandit", accuracy=0.8), a_run("lot", accuracy=0.6)
    assert compute_common_score([quick, slow]) == slow.curve[-2].accuracy, "the last point is of the bundles"
    demo = a_demonstration(choosing=(quick, slow))
    shown = render_choosing(demo)
    assert "<td>lot</td><td>60.0 %</td><td>6.0 s</td><td>20 r, 2.0 MB, 4.0 s</td>" in shown
    assert list_choosing(demo) == ["until 43.3 % by the devices' own times, simulated: bandit 4.0 s, lot 4.0 s"]
    assert render_choosing(a_demonstration()) == ""
    assert list_choosing(a_demonstration()) == []
