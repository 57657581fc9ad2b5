"""The table and the files of a method over a stream of campaigns."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
from rich.box import SIMPLE_HEAD
from rich.table import Table

from coordinator.simulation.reports import plots
from coordinator.simulation.reports.markup import render_page, render_section, render_table
from coordinator.simulation.reports.report import Report
from coordinator.simulation.reports.words import NOTHING, describe_axis, describe_partition
from coordinator.simulation.settings import Scenario
from coordinator.simulation.stream.happenings import Happenings
from coordinator.simulation.stream.run import CampaignOutcome, StreamOutcome

HEAD = ("campaign", "accuracy", "before", "frozen", "backward", "turned", "moved", "samples", "experts", "MB")
COLUMNS = (
    "accuracy: mean over the devices of their bundles on own tests as the world is in that campaign, percent; before: "
    "by the bundles of the campaign before",
    "frozen: on the tests of the first campaign; backward: on those of all earlier campaigns, minus what it was then",
    "turned, moved: of the device whose camera is turned, and of the two that change places; samples: in a device's "
    "store; MB: up and down",
)


def format_rows(campaigns: Iterable[CampaignOutcome]) -> list[tuple[str, ...]]:
    """Format a row of figures for each campaign, as `HEAD` has it."""

    def format_share(share: float | None, sign: str = "") -> str:
        return NOTHING if share is None else f"{100 * share:{sign}.1f}"

    return [
        (
            str(c.campaign),
            *map(format_share, (c.accuracy, c.before, c.frozen)),
            format_share(c.backward, "+"),
            *map(format_share, (c.turned, c.moved)),
            f"{c.n_samples:.0f}",
            str(c.experts) if c.experts else NOTHING,
            f"{(c.bytes_up + c.bytes_down) / 1e6:.1f}",
        )
        for c in campaigns
    ]


def make_table(outcome: StreamOutcome) -> Table:
    """Make the table over campaigns for a terminal of 80 columns."""
    found = Table(box=SIMPLE_HEAD, padding=0, show_edge=False)
    for heading in HEAD:
        found.add_column(heading, justify="right", no_wrap=True)
    for row in format_rows(outcome.campaigns):
        found.add_row(*row)
    return found


def describe_happenings(happens: Happenings) -> list[str]:
    """Describe what happens, a sentence each."""
    late = {label: birth for label, birth in enumerate(happens.births) if birth > 1}
    return [
        *(f"Class {label} appears in campaign {birth}." for label, birth in late.items()),
        *(["The light changes with the seasons."] if happens.seasons else []),
        *([f"{happens.turned} is turned by 90 degrees in campaign {happens.turns_in}."] if happens.turned else []),
        *(
            [f"{' and '.join(happens.moved)} change places in campaign {happens.moves_in}."]
            if happens.moved is not None
            else []
        ),
        *(
            [f"From campaign {happens.wrong_from} on some labels of {', '.join(happens.wrong)} are wrong."]
            if happens.wrong
            else []
        ),
    ]


def list_lineage(outcome: StreamOutcome) -> list[str]:
    """List what became of the experts, a line for each campaign with any."""
    return [f"campaign {c.campaign}: {'; '.join(c.lineage)}" for c in outcome.campaigns if c.lineage]


def draw_campaigns(outcomes: Iterable[StreamOutcome]) -> str:
    """Draw accuracy by campaign, as SVG: a line for each method, the mean over its seeds."""
    by_method: dict[str, list[StreamOutcome]] = {}
    for outcome in outcomes:
        by_method.setdefault(outcome.method, []).append(outcome)
    with plots.open_figure(3.4) as (axes, svg):
        lowest: list[float] = []
        for k, (method, runs) in enumerate(by_method.items()):
            means = np.mean([[c.accuracy for c in run.campaigns] for run in runs], axis=0)
            numbers = [c.campaign for c in runs[0].campaigns]
            axes.plot(numbers, means, color=plots.CLUSTERS[k % plots.N_COLOURS], marker=".", label=method)
            lowest.append(float(means.min()))
        axes.set_ylim(plots.compute_floor(lowest), 1)
        axes.set_xlabel("campaign")
        axes.legend(loc="lower right")
    return svg[0]


def to_rows(outcome: StreamOutcome) -> list[dict[str, Any]]:
    """Return a row per campaign and device, for the CSV file."""
    return [
        {"method": outcome.method, "campaign": c.campaign, "device": i, "accuracy": accuracy}
        for c in outcome.campaigns
        for i, accuracy in c.devices.items()
    ]


def make_stream_report(outcome: StreamOutcome, scenario: Scenario) -> Report:
    """Report the results of `fedge simulate --stream`."""
    plot, lineage, rows = draw_campaigns([outcome]), list_lineage(outcome), format_rows(outcome.campaigns)
    floor = plots.compute_floor([campaign.accuracy for campaign in outcome.campaigns])
    shown = render_page(
        f"fedge simulate: {outcome.method} over {len(outcome.campaigns)} campaigns on {scenario.task}",
        f"{len(outcome.campaigns[0].devices)} simulated devices, {describe_partition(scenario)}; {scenario.rounds} "
        f"rounds in a campaign. {' '.join(describe_happenings(outcome.happens))}",
        render_section("Accuracy by campaign", describe_axis(floor), plot),
        render_section("Campaign by campaign", f"{'. '.join(COLUMNS)}.", render_table(HEAD, rows)),
        render_section("Experts", "", render_table(("",), [(line,) for line in lineage])) if lineage else "",
    )
    return Report(shown, outcome, to_rows(outcome), plot)
