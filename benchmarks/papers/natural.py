"""Every paper's method on data that people made: UCI HAR by subject, spoken digits by speaker.

The papers deal out one pool of samples by a random draw; here a device is a person. HAR: 30 people, 6 of whom come when
training is over; speech: 6 speakers, one of whom comes then. Who, is drawn by the seed. 30 rounds of 10 steps; everyone
takes part; a tenth of all samples is a global test set and FedCoE's server data, half each; devices are Raspberry Pis
and Jetsons that are always there.

Columns, mean over the seeds (± standard deviation over the seeds): accuracy over the devices, its standard deviation
over the devices, mean of the worst tenth of them, macro F1, global accuracy, accuracy of the late joiners, and rounds,
megabytes and simulated seconds until the target was seen (95 % of the best method's accuracy). Late joiners: those of
fedavg+ft, scmoe-pfl and fedge train when they install their bundle, all others have no training of theirs. Silhouettes
of overlapping clusters stand below.

Runs that are done are kept in --out; the same command goes on where it was.

Examples:
    python benchmarks/papers/natural.py --data DIR --quick
    python benchmarks/papers/natural.py --data DIR --seeds 0,1,2,3,4 --json natural.json
"""

from __future__ import annotations

from typing import Any

from table import chosen, claim, compared, measured, parser_of, show_metrics, write

from coordinator.simulation.reports.comparison import Comparison

PLAIN = ("local", "fedavg", "fedavg+ft", "ditto")
PAPERS = ("fedepc", "scmoe-pfl", "cfic", "pm-moe", "fedcoe")
METHODS = (*PLAIN, *PAPERS, "fedge")
COMMON = {
    "partition": "natural", "rounds": 30, "global_test": 0.1, "server_data": 0.5, "hardware": "steady",
    "evaluate_every": 3,
}  # fmt: skip
SETTINGS: dict[str, dict[str, Any]] = {
    "HAR, 30 people": COMMON | {"set": "uci-har", "late_joiners": 6},
    "spoken digits, 6 speakers": COMMON | {"set": "spoken-digits", "late_joiners": 1},
}


def judge(name: str, found: Comparison) -> list[dict[str, Any]]:
    """The papers' claims that personalisation by theirs beats the plain methods, and the specifications' answers."""
    of = {own.method: own for own in found.methods}
    simple = max(of[method].accuracy.mean for method in PLAIN)
    papers = {method: of[method].accuracy.mean - simple for method in PAPERS}
    seen = ", ".join(f"{method} {100 * value:+.1f}" for method, value in papers.items())
    cold = {method: of[method].cold_start for method in ("fedcoe", "fedavg")}
    one, other = cold["fedcoe"], cold["fedavg"]
    assert one is not None
    assert other is not None
    gain = one.mean - other.mean
    return [
        claim(f"{name}; papers: each is above local, FedAvg, FedAvg + FT and Ditto", min(papers.values()) > 0, seen),
        claim(
            f"{name}; fedge is at least as good as the best of local, FedAvg, FedAvg + FT and Ditto",
            of["fedge"].accuracy.mean >= simple,
            f"{100 * (of['fedge'].accuracy.mean - simple):+.1f}",
        ),
        claim(
            f"{name}; FedCoE's assembled model is better for late joiners than FedAvg's", gain > 0, f"{100 * gain:+.1f}"
        ),
    ]


def main() -> None:
    arguments = parser_of(__doc__, "natural").parse_args()
    figures, claims = [], []
    for name in chosen(SETTINGS, arguments):
        found = compared(name, METHODS, SETTINGS[name], arguments)
        if not arguments.metrics:  # it has been shown
            show_metrics(name, found)
        claims += judge(name, found)
        figures.append(measured(name, found))
    write(arguments, figures, claims)


if __name__ == "__main__":
    main()
