"""A fleet that lives: ten campaigns in which samples arrive and the world changes, for fedge and its rivals.

Classes appear later, light has seasons, a camera is turned by 90 degrees, two devices change places, and some labels
in the feedback are wrong (coordinator/simulation/stream/happenings.py says when). Each device has a bounded store with
the rule of a real one; all methods get the same samples in the same order, and the same rounds and steps a campaign.

Rivals: `local`, which learns alone and anew in each campaign from all that its store has; FedAvg `anew` in each
campaign; FedAvg and Ditto that go on from the last campaign, as fedge does. METHOD! begins anew in each campaign.

Accuracy is that of the devices' own bundles in ONNX Runtime, in per cent, mean over devices, then over seeds: on tests
as the world is in the campaign (`now`), and on those of the first campaign (`frozen`). `turned` is the device whose
camera is turned: in the campaign before, in that campaign, and in the next. Differences to fedge are paired by seed;
+- is the standard error of their mean over the seeds.

Runs that are done are kept in --out; the same command goes on where it was.

    python benchmarks/living.py --out FOLDER
    python benchmarks/living.py --out FOLDER --seeds 0 --settings "digits rotations" --methods fedge,ditto
    python benchmarks/living.py --out FOLDER --data DIR --settings "HAR people"
    python benchmarks/living.py --out FOLDER --settings "digits alpha 1" --methods fedge --campaigns 2 --happens turn
"""

from __future__ import annotations

import logging
import tempfile
from itertools import product
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np
from script import finish, markdown, parser_of, progress_of, several

from coordinator.methods.options import parse_method
from coordinator.simulation.interface import use_one_thread
from coordinator.simulation.settings import Scenario
from coordinator.simulation.stream.happenings import HAPPENINGS
from coordinator.simulation.stream.run import StreamOutcome, StreamSettings, simulate_stream
from fedge.system.files import write_atomically

OURS: Final = "fedge"
METHODS: Final = ("local", "fedavg!", "fedavg", "ditto", OURS)
SETTINGS: Final[dict[str, dict[str, Any]]] = {
    "digits rotations": {"devices": 8, "partition": "groups", "n_groups": 4},
    "digits 2 rotations": {"devices": 8, "partition": "groups", "n_groups": 2},
    "digits alpha 1": {"devices": 8, "alpha": 1.0},
    "HAR people": {"task": "uci-har", "folder": "uci-har", "samples": 3000, "partition": "natural"},
}
UNTURNED: Final = frozenset({"HAR people"})
ROUNDS: Final = 15


def run(
    method: str, setting: str, seed: int, data: Path | None, campaigns: int, happenings: list[str]
) -> StreamOutcome:
    """A method over all campaigns; with ! at the end of its name each begins anew."""
    given = {name: value for name, value in SETTINGS[setting].items() if name != "folder"}
    if folder := SETTINGS[setting].get("folder"):
        given |= {"data": (data or Path()) / folder}
    scenario = msgspec.convert({"rounds": ROUNDS, "hardware": "none"} | given, Scenario)
    happens = tuple(h for h in HAPPENINGS if h in happenings and (h != "turn" or setting not in UNTURNED))
    how = StreamSettings(campaigns=campaigns, happens=happens, restart=method.endswith("!"))
    name, options = parse_method(method.rstrip("!"))
    tell = progress_of(f"{setting}, {method}, seed {seed}")
    with tempfile.TemporaryDirectory() as home, use_one_thread():
        return simulate_stream(scenario, name, options, seed, Path(home), tell, method, how)


def name_of(method: str) -> str:
    """The method as tables have it."""
    return f"{method.rstrip('!')}, anew" if method.endswith("!") else method


def percent(values: list[float]) -> str:
    """The mean, in per cent."""
    return f"{100 * np.mean(values):.1f}"


def difference(ours: list[float], others: list[float]) -> str:
    """The mean paired difference in points, with its standard error if there are several seeds."""
    points = 100 * (np.array(ours) - np.array(others))
    error = f" ± {points.std(ddof=1) / np.sqrt(len(points)):.1f}" if len(points) > 1 else ""
    return f"{points.mean():+.1f}{error}"


def over_time(found: dict[str, list[StreamOutcome]], campaigns: int) -> str:
    """The table of accuracies as the world is in each campaign."""
    rows = []
    for method, runs in found.items():
        now = [percent([run.campaigns[c].accuracy for run in runs]) for c in range(campaigns)]
        rows.append([name_of(method), *now, percent([run.accuracy for run in runs])])
    return markdown(["method", *range(1, campaigns + 1), "mean"], rows)


def in_short(found: dict[str, list[StreamOutcome]]) -> str:
    """The table of what is remembered, of the turned camera, and of the differences to fedge."""
    ours = found.get(OURS, [])
    rows = []
    for method, runs in found.items():
        last = [run.campaigns[-1] for run in runs]
        compared = method != OURS and len(ours) == len(runs)
        rows.append(
            [
                name_of(method),
                percent([campaign.frozen for campaign in last]),
                f"{100 * np.mean([campaign.backward for campaign in last]):+.1f}",
                turned(runs),
                difference([run.accuracy for run in ours], [run.accuracy for run in runs]) if compared else "–",
                worst_campaign(ours, runs) if compared else "–",
            ]
        )
    return markdown(
        ["method", "frozen at the end", "backward", "turned: before → then → next", "fedge − it", "least lead"], rows
    )


def turned(runs: list[StreamOutcome]) -> str:
    """The turned camera's accuracy in the campaign before, in that of the turn, and in the next if there is one."""
    figures = []
    for k in (-1, 0, 1):
        found = [c.turned for run in runs for c in run.campaigns if c.campaign == run.happens.turns_in + k]
        if known := [accuracy for accuracy in found if accuracy is not None]:
            figures.append(percent(known))
    return " → ".join(figures) or "–"


def worst_campaign(ours: list[StreamOutcome], others: list[StreamOutcome]) -> str:
    """The campaign in which fedge leads least, with the paired difference."""
    campaigns = range(len(ours[0].campaigns))
    own, theirs = ([[run.campaigns[c].accuracy for run in runs] for c in campaigns] for runs in (ours, others))
    worst = min(campaigns, key=lambda c: np.mean(own[c]) - np.mean(theirs[c]))
    return f"{difference(own[worst], theirs[worst])} in {worst + 1}"


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--out", type=Path, required=True, metavar="FOLDER", help="keeps runs that are done")
    parser.add_argument("--data", type=Path, metavar="DIR", help="folder with uci-har/")
    parser.add_argument("--settings", type=several(), default=[*SETTINGS][:1], help=", ".join(SETTINGS))
    parser.add_argument("--methods", type=several(), default=list(METHODS))
    parser.add_argument("--seeds", type=several(int), default=[0, 1, 2])
    parser.add_argument("--campaigns", type=int, default=10)
    parser.add_argument("--happens", type=several(), default=list(HAPPENINGS), help=", ".join(HAPPENINGS))
    arguments = parser.parse_args()
    logging.disable(logging.WARNING)
    outcomes: dict[str, dict[str, list[StreamOutcome]]] = {}
    for setting, seed, method in product(arguments.settings, arguments.seeds, arguments.methods):
        happens = "" if arguments.happens == list(HAPPENINGS) else "-" + "-".join(arguments.happens)
        name = f"{setting}-{method}-{seed}-{arguments.campaigns}{happens}.json"
        file = arguments.out / name.replace("/", "_")
        if not file.exists():
            outcome = run(method, setting, seed, arguments.data, arguments.campaigns, arguments.happens)
            file.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(file, msgspec.json.encode(outcome))
        done = msgspec.json.decode(file.read_bytes(), type=StreamOutcome)
        outcomes.setdefault(setting, {}).setdefault(method, []).append(done)
    for setting, found in outcomes.items():
        print(
            f"{setting}, {len(arguments.seeds)} seeds\n\n{over_time(found, arguments.campaigns)}\n\n{in_short(found)}\n"
        )
    finish(arguments, msgspec.to_builtins(outcomes))


if __name__ == "__main__":
    main()
