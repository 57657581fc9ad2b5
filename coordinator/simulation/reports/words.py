"""Settings and figures of runs in words."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from coordinator.fleet import problems
from coordinator.simulation.reports.outcome import Cost, RunOutcome, find_without_bundle, format_megabytes
from coordinator.simulation.settings import Scenario
from fedge.data.problems.scores import ACCURACY, Figure, get_figure

if TYPE_CHECKING:
    from coordinator.simulation.reports.comparison import Comparison, Demonstration, MethodOutcome, Spread


NOTHING: Final = "–"
BOARDS: Final = "Each device stands for a board and gets as much of a processor as the board's speed says. "


def describe_axis(floor: float | None) -> str:
    """Describe the start of an axis of scores; empty if it begins where they do."""
    if floor is None:
        return ""
    return f"The axis begins at {floor:.0%}." if floor else "The axis begins at zero."


def describe_partition(scenario: Scenario) -> str:
    """Describe the partition in a few words."""
    how = scenario.partition
    skew = f"α {scenario.alpha:g}"
    even = f"{scenario.iid_share:.0%} spread evenly"
    words = {
        "dirichlet": f"Dirichlet, {skew}" + (f", {even}" if scenario.iid_share else ""),
        "groups": f"{scenario.n_groups} groups by {scenario.groups}, {skew}",
        "shards": f"{scenario.shards} shards, {even}",
        "natural": "people",
        "iid": "no skew",
        "generated": f"made by number, turned in {scenario.n_groups} groups, {skew}",
    }
    return words[how]


def describe_comparison(comparison: Comparison) -> str:
    """Describe the setting of a comparison in a few sentences."""
    scenario = comparison.scenario
    n_devices = len(comparison.runs[0].devices)
    return (
        f"{n_devices} simulated devices, {describe_partition(scenario)}; {scenario.rounds} rounds of "
        f"{describe_work(scenario)}, participation {scenario.participation:.0%}, {scenario.sensitive:.0%} of the "
        f"training samples marked sensitive; {format_seeds(comparison)}. "
        f"{name_all(comparison.figure)} of the installed bundles, run by ONNX Runtime "
        "on each device's own test samples, which no choice has seen. "
        "Global: the models that devices are served, each on samples from all devices' distributions. "
        "Cost: rounds, traffic and simulated time until "
        f"{format_target(comparison.figure, comparison.target)} was seen. "
        f"{describe_unequipped(comparison.runs)} {describe_redraws(comparison.runs)}".rstrip()
    )


def name_all(figure: Figure) -> str:
    """Return the beginning of a sentence about all scores."""
    return "Accuracies are" if figure == ACCURACY else f"Scores ({figure.words}) are"


def format_target(figure: Figure, target: float) -> str:
    """Format a target of the mean score in a sentence."""
    return f"{target:.1%} mean accuracy" if figure == ACCURACY else f"a mean {figure.words} of {figure.format(target)}"


def format_seeds(comparison: Comparison) -> str:
    """Format the seeds in words."""
    return f"seed{'s' * (len(comparison.seeds) > 1)} {', '.join(map(str, comparison.seeds))}"


def describe_work(scenario: Scenario) -> str:
    """Describe a device's work in a round."""
    epochs = scenario.local_epochs
    return f"{scenario.local_steps} steps" if epochs is None else f"{epochs} epoch{'s' * (epochs > 1)}"


def describe_unequipped(runs: Sequence[RunOutcome]) -> str:
    """Describe which runs left devices without a bundle, and which models those figures are of; empty without any."""
    found = [
        f"{run.method}, seed {run.seed}: {len(run.devices) - run.bundles} of {len(run.devices)}"
        f" ({problems.describe_reasons(find_without_bundle(run.devices))})"
        for run in runs
        if run.bundles < len(run.devices)
    ]
    if not found:
        return ""
    return f"Devices without a bundle are measured by the model that they are served: {'; '.join(found)}."


def describe_redraws(runs: Sequence[RunOutcome]) -> str:
    """Describe by seed how often the partition was drawn and how many samples moved; empty if neither."""
    found = {}
    for run in runs:
        if (run.draws or 1) > 1 or run.moved:
            found[run.seed] = f"{run.draws} draws, {run.moved} samples moved"
    if not found:
        return ""
    by_seed = "; ".join(f"seed {seed}: {text}" for seed, text in sorted(found.items()))
    return f"Devices differ less than requested, so that each has enough samples: {by_seed}."


def format_spread(spread: Spread | None, figure: Figure) -> str:
    """Format a mean and, over several seeds, its standard deviation."""
    return NOTHING if spread is None else f"{figure.format_cell(spread.mean)}{_format_deviation(spread, figure)}"


def format_difference(spread: Spread | None, figure: Figure) -> str:
    """Format a difference, of shares in percentage points, with sign."""
    return NOTHING if spread is None else f"{figure.format_cell(spread.mean, '+')}{_format_deviation(spread, figure)}"


def _format_deviation(spread: Spread, figure: Figure) -> str:
    return f" ±{figure.format_cell(spread.std)}" if len(spread.seeds) > 1 else ""


def find_second(comparison: Comparison) -> Figure | None:
    """Find the figure beside the score: macro F1 of classes, else the first further one; None if there is none."""
    if comparison.figure == ACCURACY:
        return get_figure("macro_f1")
    names = [set(method.metrics) for method in comparison.methods]
    known = [name for name in comparison.methods[0].metrics if all(name in own for own in names)]
    return get_figure(known[0]) if known else None


def get_second(method: MethodOutcome, figure: Figure) -> Spread | None:
    """Return a method's second figure."""
    return method.metrics.get(figure.name, method.macro_f1)


def format_cost(found: Cost | None) -> str:
    """Format rounds, bytes and simulated time."""
    if found is None:
        return "not reached"
    time = f", {found.seconds:.1f} s" if found.seconds else ""  # there may be no clock
    return f"{found.round} r, {format_megabytes(found.bytes)}{time}"


def is_tested_globally(comparison: Comparison) -> bool:
    """Return whether there is a global test set."""
    return comparison.methods[0].global_score is not None


def has_clock(comparison: Comparison) -> bool:
    """Return whether devices take simulated time."""
    return comparison.scenario.hardware != "none"


def describe_run(outcome: RunOutcome, scenario: Scenario) -> str:
    """Describe the setting of a run in a few sentences."""
    return (
        f"{len(outcome.devices)} simulated devices, {describe_partition(scenario)}; {scenario.rounds} rounds of "
        f"{describe_work(scenario)}, participation {scenario.participation:.0%}; seed {outcome.seed}. "
        f"{name_all(outcome.figure)} of the installed bundles, run by ONNX Runtime "
        "on each device's own test samples, "
        "which no choice has seen. "
        f"{describe_unequipped([outcome])} {describe_redraws([outcome])}".rstrip()
    )


def describe_demo(demo: Demonstration) -> str:
    """Describe the demo in a few sentences."""
    *_, ours = demo.runs
    parted = "It made no clusters: devices share one model, or none."
    if ours.split:
        parted = f"It made {len(ours.clusters)} clusters with a model each."
    elif ours.experts > 1:
        parted = f"It made no clusters: all devices share {ours.experts} experts and a gate."
    return (
        f"{len(ours.devices)} devices learned “{demo.scenario.task}” ({describe_partition(demo.scenario)}) in "
        f"{ours.rounds} rounds of {demo.learned_by} over MQTT ({demo.broker}), seed {ours.seed}. "
        f"{BOARDS if demo.boards else ''}"
        f"{parted} "
        f"{name_all(demo.figure)} on each device's own test samples, which no choice has seen. local: every device "
        "alone; fedavg+ft: FedAvg, then fine-tuned; expert: the best shared model; personal: what the device has "
        "installed, run by ONNX Runtime in a process without PyTorch. The last two are measured at the end alone."
    )
