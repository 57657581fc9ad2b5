"""Settings and figures of runs in words."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from coordinator.fleet import problems
from coordinator.simulation.reports.outcome import Cost, RunOutcome, megabytes, without_bundle
from coordinator.simulation.settings import Scenario

if TYPE_CHECKING:
    from coordinator.simulation.reports.comparison import Comparison, Demonstration, Spread


NOTHING: Final = "–"


def axis(floor: float) -> str:
    """The caption for the start of an axis of accuracies."""
    return f"The axis begins at {floor:.0%}." if floor else "The axis begins at zero."


def setting_of(scenario: Scenario) -> str:
    """The partition in a few words."""
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


def lead(comparison: Comparison) -> str:
    """A summary of the setting, in a few sentences."""
    scenario = comparison.scenario
    n_devices = len(comparison.runs[0].devices)
    return (
        f"{n_devices} simulated devices, {setting_of(scenario)}; {scenario.rounds} rounds of {work_of(scenario)}, "
        f"participation {scenario.participation:.0%}, {scenario.sensitive:.0%} of the training samples marked "
        f"sensitive; {seeds_of(comparison)}. Accuracies are of the installed bundles, run by "
        "ONNX Runtime on each device's own test samples, which no choice has seen. "
        "Global: the models that devices are served, each on samples from all devices' distributions. "
        f"Cost: rounds, traffic and simulated time until {comparison.target:.1%} mean accuracy was seen."
        f" {unequipped(comparison.runs)} {milder(comparison.runs)}".rstrip()
    )


def seeds_of(comparison: Comparison) -> str:
    """The seeds in words."""
    return f"seed{'s' * (len(comparison.seeds) > 1)} {', '.join(map(str, comparison.seeds))}"


def work_of(scenario: Scenario) -> str:
    """A device's work in a round."""
    epochs = scenario.local_epochs
    return f"{scenario.local_steps} steps" if epochs is None else f"{epochs} epoch{'s' * (epochs > 1)}"


def unequipped(runs: Sequence[RunOutcome]) -> str:
    """In which runs devices ended without a bundle, and what their figures are of; empty: in none."""
    found = [
        f"{run.method}, seed {run.seed}: {len(run.devices) - run.bundles} of {len(run.devices)}"
        f" ({problems.told(without_bundle(run.devices))})"
        for run in runs
        if run.bundles < len(run.devices)
    ]
    if not found:
        return ""
    return f"Devices without a bundle are measured by the model that they are served: {'; '.join(found)}."


def milder(runs: Sequence[RunOutcome]) -> str:
    """How often the partition was drawn and how many samples were moved, by seed; empty: neither, or unknown."""
    found = {}
    for run in runs:
        if (run.draws or 1) > 1 or run.moved:
            found[run.seed] = f"{run.draws} draws, {run.moved} samples moved"
    if not found:
        return ""
    by_seed = "; ".join(f"seed {seed}: {text}" for seed, text in sorted(found.items()))
    return f"Devices differ less than requested, so that each has enough samples: {by_seed}."


def percent(figure: Spread) -> str:
    """Mean and, over several seeds, standard deviation."""
    return f"{100 * figure.mean:.1f}{_deviation(figure)}"


def difference(figure: Spread | None) -> str:
    """In percentage points, with sign."""
    return NOTHING if figure is None else f"{points(figure.mean)}{_deviation(figure)}"


def _deviation(figure: Spread) -> str:
    return f" ±{100 * figure.std:.1f}" if len(figure.seeds) > 1 else ""


def cost(found: Cost | None) -> str:
    """Rounds, bytes and simulated time."""
    if found is None:
        return "not reached"
    time = f", {found.seconds:.1f} s" if found.seconds else ""  # there may be no clock
    return f"{found.round} r, {megabytes(found.bytes)}{time}"


def tested_globally(comparison: Comparison) -> bool:
    """Whether there is a global test set."""
    return comparison.methods[0].global_accuracy is not None


def has_clock(comparison: Comparison) -> bool:
    """Whether devices take simulated time."""
    return comparison.scenario.hardware != "none"


def run_lead(outcome: RunOutcome, scenario: Scenario) -> str:
    """A summary of the setting, in a few sentences."""
    return (
        f"{len(outcome.devices)} simulated devices, {setting_of(scenario)}; {scenario.rounds} rounds of "
        f"{work_of(scenario)}, participation {scenario.participation:.0%}; seed {outcome.seed}. Accuracies are of the "
        "installed bundles, run by ONNX Runtime on each device's own test samples, which no choice has seen. "
        f"{unequipped([outcome])} {milder([outcome])}".rstrip()
    )


def demo_lead(demo: Demonstration) -> str:
    """A summary of the demo, in a few sentences."""
    *_, ours = demo.runs
    split = f"It made {len(ours.clusters)} clusters with a model each."
    return (
        f"{len(ours.devices)} devices learned “{demo.scenario.task}” ({setting_of(demo.scenario)}) in {ours.rounds} "
        f"rounds of {demo.learned_by} over MQTT ({demo.broker}), seed {ours.seed}. "
        f"{split if ours.split else 'It made no clusters: devices share one model, or none.'} "
        "Accuracies are on each device's own test samples, which no choice has seen. local: every device alone; "
        "fedavg+ft: FedAvg, then fine-tuned; expert: the best shared model; personal: what the device has installed, "
        "run by ONNX Runtime in a process without PyTorch. The last two are measured at the end alone."
    )


def points(gain: float) -> str:
    """A difference of accuracies in percentage points, with its sign."""
    return f"{100 * gain:+.1f}"
