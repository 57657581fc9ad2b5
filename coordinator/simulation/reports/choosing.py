"""Who was asked to train, why, and what choosing saves: parts of a page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from coordinator.simulation.reports.choices import Choice
from coordinator.simulation.reports.markup import render_section, render_table
from coordinator.simulation.reports.outcome import compute_common_score, compute_cost
from coordinator.simulation.reports.words import NOTHING, format_cost

if TYPE_CHECKING:
    from coordinator.simulation.reports.comparison import Demonstration


def render_choices(choices: Sequence[Choice], names: Mapping[str, str]) -> str:
    """Render who was asked, and why; empty if nobody chose. `names`: devices by id, as the table calls them."""
    rows = [
        (
            names.get(choice.id, choice.id),
            *(f"{value:.2g}" if value else NOTHING for value in (choice.context or (0.0, 0.0))[:2]),
            f"{choice.context[4]:.3f}" if choice.context else NOTHING,
            f"{choice.seconds:.2g}",
            *(NOTHING if value is None else f"{value:.3f}" for value in (choice.gain, choice.bonus)),
            f"{choice.asked} of {choice.among}",
            choice.why,
        )
        for choice in choices
    ]
    head = "Device", "GHz", "Free GB", "Loss drop", "Expected s", "Gain", "Exploration", "Asked", "Last choice"
    bandit = (
        "A bandit asks those within the deadline whose expected gain and exploration bonus are largest, and those that "
        "have waited long. Loss drop: mean over the last five trainings, the bandit's reward; with clock and memory it "
        "is the context, here of the choice that last asked the device."
    )
    text = bandit if any(choice.gain is not None for choice in choices) else ""
    return render_section("Who was asked, and why", text, render_table(head, rows)) if rows else ""


def render_choosing(demo: Demonstration) -> str:
    """Render what choosing saves or costs; empty if nobody chose."""
    if not demo.choosing:
        return ""
    figure, target = demo.figure, compute_common_score(demo.choosing)
    rows = [
        (run.method, figure.format(run.score), f"{run.seconds:.1f} s", format_cost(compute_cost(run.curve, target)))
        for run in demo.choosing
    ]
    text = (
        f"{demo.learned_by} simulated on the same samples. By the simulated clock an order takes each device the "
        f"median time of its orders to train in this demo. Until: the first round whose shared models have a mean "
        f"{figure.words} on test samples that all three reach. With one seed, that round is partly chance."
    )
    head = "Who trains", figure.words.capitalize(), "All rounds", f"Until {figure.format(target)}"
    return render_section("What choosing saves", text, render_table(head, rows))


def list_choosing(demo: Demonstration) -> list[str]:
    """List for a terminal what choosing saves; no line if nobody chose."""
    if not demo.choosing:
        return []
    target = compute_common_score(demo.choosing)
    found = [(run.method, compute_cost(run.curve, target)) for run in demo.choosing]
    costs = ", ".join(f"{method} {cost.seconds:.1f} s" for method, cost in found if cost is not None)
    return [f"until {demo.figure.format(target)} by the devices' own times, simulated: {costs}"]
