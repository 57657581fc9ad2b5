"""What `--average norm-clipped` and `clipped` cost where nobody is hostile: ten settings of digits, beside the mean.

20 devices, Dirichlet 0.5, 20 rounds of 10 steps with everybody unless the setting says otherwise. Accuracy is that of
the devices' own bundles, each on its own test samples, in per cent: mean over devices, then over seeds. A difference is
of the same partition, first model and random numbers; ± is the standard error of its mean over the seeds.

Runs that are done are kept in --out; the same command goes on where it was.

    python benchmarks/honest.py --out FOLDER
    python benchmarks/honest.py --out FOLDER --methods fedavg --settings "power law" --seeds 0
"""

from __future__ import annotations

import json
import logging
import tempfile
from itertools import product
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np
from script import finish, markdown, parser_of, several

from coordinator.methods.options import parse_method
from coordinator.simulation.run import simulate
from coordinator.simulation.settings import Scenario
from fedge.system.files import write_atomically
from fedge.tensors.layout import Codec

POWER_LAW: Final = {"sizes": "power-law", "size_spread": 1.5, "min_samples": 8}
LOG_NORMAL: Final = {"sizes": "log-normal", "min_samples": 8}
TENTH: Final = {"devices": 200, "participation": 0.1, "min_samples": 4, "rounds": 40}
SETTINGS: Final[dict[str, dict[str, Any]]] = {
    "power law, half a round": POWER_LAW | {"participation": 0.5},
    "power law": POWER_LAW,
    "power law of 1, iid, half a round": POWER_LAW | {"size_spread": 1.0, "partition": "iid", "participation": 0.5},
    "log-normal, half a round": LOG_NORMAL | {"participation": 0.5},
    "log-normal, alpha 0.1": LOG_NORMAL | {"alpha": 0.1},
    "200 devices, a tenth a round": TENTH,
    "200 devices, log-normal, a tenth": TENTH | {"sizes": "log-normal"},
    "alpha 1": {"alpha": 1.0},
    "alpha 0.1": {"alpha": 0.1},
    "four rotations, half a round": {"partition": "groups", "participation": 0.5},
}
RULES: Final = ("mean", "norm-clipped", "clipped")


def run(method: str, setting: str, rule: str, seed: int) -> float:
    """Mean accuracy of the devices' bundles."""
    common = {"alpha": 0.5, "rounds": 20, "hardware": "none", "evaluate_every": 1000, "codec": Codec.FLOAT32}
    scenario = msgspec.convert(common | SETTINGS[setting] | {"average": rule}, Scenario)
    name, options = parse_method(method)
    with tempfile.TemporaryDirectory() as home:
        return simulate(scenario, name, options, seed, Path(home), lambda _: None, method).accuracy


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--out", type=Path, default=Path("honest"), help="folder of the runs")
    parser.add_argument("--methods", type=several(), default=("fedavg", "fedge"))
    parser.add_argument("--settings", type=lambda text: [part.strip() for part in text.split(";")], default=[*SETTINGS])
    parser.add_argument("--rules", type=several(), default=RULES, help="the first is what the others are compared with")
    parser.add_argument("--seeds", type=several(int), default=(0, 1, 2))
    args = parser.parse_args()
    logging.disable(logging.CRITICAL)
    args.out.mkdir(parents=True, exist_ok=True)
    figures, rows = [], []
    for method, setting in product(args.methods, args.settings):
        found: dict[str, list[float]] = {rule: [] for rule in args.rules}
        for rule, seed in product(args.rules, args.seeds):
            file = args.out / f"{'_'.join([method, setting, rule, str(seed)]).replace(' ', '-')}.json"
            if not file.exists():
                write_atomically(file, json.dumps(run(method, setting, rule, seed)).encode())
            found[rule].append(json.loads(file.read_text()))
        figures.append({"method": method, "setting": setting, "accuracy": found})
        mean, *guarded = (100 * np.array(found[rule]) for rule in args.rules)
        rows.append([method, setting, f"{mean.mean():.1f}"])
        for own in guarded:
            error = np.std(own - mean, ddof=1) / np.sqrt(len(mean)) if len(mean) > 1 else np.nan
            rows[-1] += [f"{own.mean():.1f}", f"{(own - mean).mean():+.1f} ± {error:.1f}"]
        print(*rows[-1], sep=" | ", flush=True)
    print(
        markdown(
            ["method", "setting", args.rules[0], *(of for rule in args.rules[1:] for of in (rule, "difference"))], rows
        )
    )
    finish(args, figures)


if __name__ == "__main__":
    main()
