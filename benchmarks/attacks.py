"""Hostile devices: what they do to the personal models of honest ones, under each rule of averages.

Ten devices on digits, 20 rounds of 10 steps with everybody in each. A share of the devices is hostile from the first
round to the end and knows the updates of all others. Accuracy is that of the bundles of honest devices, each on its own
test samples: mean over devices, then over seeds; beside it that of the clean run of the same seed and honest devices.

Attacks on updates (x_i: honest ones; one that hostile devices send in place of their own):
  sign-flip   -mean x_i
  x10, x100   their own, so many times
  noise       a normal sample, standard deviation 1
  label-flip  their own, learned from labels C - 1 - y
  alie        mean x_i + 1.5 standard deviations (Baruch et al., NeurIPS 2019)
  ipm         -2 mean x_i (Xie et al., UAI 2019)
  min-max     mean x_i - g std x_i with the largest g that is not farther from any x_i than two x_i are from each other
              (Shejwalkar and Houmansadr, NDSS 2021)
Lies:
  samples     sign-flip, and 90 times as many samples as it has
  answers     of losses, trials, weights and profiles, each against the federation: everything is best that is worst
  all         ipm, 90 times the samples, and answers

The formulas of sign-flip, noise, alie and ipm are those of ByzFL 0.0.11; `--check-byzfl` compares them and the rules
with it (pip install byzfl, in an environment of its own: it wants other versions of our packages).

Runs that are done are kept in --out; the same command goes on where it was.

    python benchmarks/attacks.py --out FOLDER                                   the grid: one seed
    python benchmarks/attacks.py --out FOLDER --rules clipped --shares 0.2 --seeds 0,1,2,3,4
    python benchmarks/attacks.py --out FOLDER --json attacks.json
    python benchmarks/attacks.py --check-byzfl
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import itertools
import json
import logging
import math
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, get_args

import msgspec
import numpy as np
from numpy.typing import NDArray
from script import finish, markdown, parser_of, several

from coordinator.aggregation import rules
from coordinator.aggregation.protection import Rule
from coordinator.methods.catalogue import make_method
from coordinator.methods.method import Server
from coordinator.simulation.evaluation import Evaluation
from coordinator.simulation.federation import Federation, make_fleet, partition_samples
from coordinator.simulation.rounds import run_rounds
from coordinator.simulation.settings import Scenario
from edge_agent.device.device import UnpackedModel
from edge_agent.device.worker import FinishedOrder
from edge_agent.learning import batched
from fedge.steps.contract import Result
from fedge.steps.descriptions.profile import Profiled
from fedge.steps.descriptions.trial import Tried
from fedge.steps.mixture.fit_candidates import CandidatesFitted
from fedge.steps.mixture.fit_energy import EnergyFitted
from fedge.steps.mixture.fit_weights import WeightsFitted
from fedge.steps.training.train import Trained
from fedge.system.files import write_atomically
from fedge.tensors import codecs
from fedge.tensors.layout import Codec, Model

Vectors = NDArray[np.float64]
Vector = NDArray[np.float64]

CLAIMED: Final = 90
"""Times the samples that a liar has: what is above 100 times the median is no update under any rule."""
Z_ALIE, TAU_IPM = 1.5, 2.0


def sign_flip(honest: Vectors) -> Vector:
    return -honest.mean(axis=0)


def alie(honest: Vectors) -> Vector:
    return honest.mean(axis=0) + Z_ALIE * honest.std(axis=0, ddof=1)


def ipm(honest: Vectors) -> Vector:
    return -TAU_IPM * honest.mean(axis=0)


def min_max(honest: Vectors) -> Vector:
    """AGR-agnostic, with the perturbation -std; g by bisection to 1e-3."""
    mean, std = honest.mean(axis=0), honest.std(axis=0, ddof=1)
    farthest = max(np.linalg.norm(honest - row, axis=1).max() for row in honest)

    def near(g: float) -> bool:
        return bool(np.linalg.norm(honest - (mean - g * std), axis=1).max() <= farthest)

    low, high = 0.0, 1.0
    while near(high) and high < 1e6:
        low, high = high, 2 * high
    while high - low > 1e-3:
        middle = (low + high) / 2
        low, high = (middle, high) if near(middle) else (low, middle)
    return mean - low * std


OF_OTHERS: dict[str, Callable[[Vectors], Vector]] = {
    "sign-flip": sign_flip, "alie": alie, "ipm": ipm, "min-max": min_max, "samples": sign_flip, "all": ipm,
}  # fmt: skip
TIMES: dict[str, float] = {"x10": 10.0, "x100": 100.0}
ATTACKS: Final = (
    *("sign-flip", "x10", "x100", "noise", "label-flip", "alie", "ipm", "min-max"),
    *("samples", "answers", "all"),
)


class Hostile:
    """How the orders of a step are carried out where some of the workers are hostile."""

    def __init__(self, attack: str, ids: frozenset[str], seed: int) -> None:
        self.ids = ids
        self._attack = attack
        self._rng = np.random.default_rng((seed, 99))

    def __call__(self, jobs: Sequence[batched.Job]) -> list[FinishedOrder]:
        finished = batched.execute_jobs(jobs)
        honest = [
            next(iter(done.unpacked.values())).model.params.astype(np.float64)
            for job, done in zip(jobs, finished, strict=True)
            if job.worker.id not in self.ids and done.unpacked
        ]
        seen = np.stack(honest) if len(honest) > 1 else None
        return [
            self._sent(done, seen) if job.worker.id in self.ids else done
            for job, done in zip(jobs, finished, strict=True)
        ]

    def _sent(self, done: FinishedOrder, honest: Vectors | None) -> FinishedOrder:
        unpacked = {digest: self._crafted(own, honest) for digest, own in done.unpacked.items()}
        return dataclasses.replace(done, unpacked=unpacked, result=self._told(done.result))

    def _crafted(self, own: UnpackedModel, honest: Vectors | None) -> UnpackedModel:
        vector = own.model.params.astype(np.float64)
        if self._attack in TIMES:
            vector = TIMES[self._attack] * vector
        elif self._attack == "noise":
            vector = self._rng.normal(size=len(vector))
        elif self._attack in OF_OTHERS and honest is not None:
            vector = OF_OTHERS[self._attack](honest)
        model = Model(vector.astype(np.float32), own.model.buffers, own.model.counters)
        return UnpackedModel(model, own.layout, codecs.compute_norms(model))

    def _told(self, result: Result) -> Result:
        lies: dict[str, Any] = {}
        if self._attack in {"samples", "all"} and isinstance(result, Trained):
            lies["n_samples"] = CLAIMED * result.n_samples
        if self._attack in {"answers", "all"}:
            lies |= answers(result, self._rng)
        return msgspec.structs.replace(result, **lies) if lies else result


def answers(result: Result, rng: np.random.Generator) -> dict[str, Any]:
    """What a liar says in place of the truth: losses turned round and a hundred times as large, for as many samples."""
    match result:
        case Trained(loss_before=before) if before is not None:
            return {"loss_before": 100.0, "loss_after": 0.0}
        case Tried(delta=delta) if delta is not None:
            return {"delta": -100 * delta}
        case CandidatesFitted():
            turned = {role: tuple(100 * (max(own) - loss) for loss in own) for role, own in result.losses.items()}
            return {"losses": turned, "n_validation": CLAIMED * result.n_validation}
        case WeightsFitted():
            worst = tuple(
                {role: float(role == min(own, key=lambda r: own[r])) for role in own} for own in result.weights
            )
            return {"weights": worst, "n_validation": CLAIMED * result.n_validation}
        case EnergyFitted():
            pooled = tuple(100 * (max(result.pooled_losses) - loss) for loss in result.pooled_losses)
            beta = tuple(tuple(100 * (max(own) - loss) for loss in own) for own in result.beta_losses)
            return {"pooled_losses": pooled, "beta_losses": beta, "n_validation": CLAIMED * result.n_validation}
        case Profiled():
            return {"profile": tuple(rng.uniform(size=len(result.profile)).tolist()), "halves": 1e6}
    return {}


# ------------------------------------------------------------------------------------------------------------ runs


@dataclass(frozen=True, slots=True)
class Case:
    """A run. `attack` "" and `share` 0: nobody attacks."""

    method: str
    rule: Rule
    attack: str
    share: float
    alpha: float
    seed: int
    devices: int

    @property
    def name(self) -> str:
        return "_".join(str(part) for part in dataclasses.astuple(self))


def run(case: Case, home: Path) -> dict[str, Any]:
    """Accuracy of each device; who was hostile, who sent an update that was evidence, and who was left out."""
    scenario = Scenario(
        devices=case.devices,
        alpha=case.alpha,
        rounds=20,
        codec=Codec.FLOAT32,
        hardware="none",
        average=case.rule,
        evaluate_every=20,
    )
    federation = partition_samples(scenario, case.seed)
    ids = sorted(federation.shares)
    hostile = hostile_in(case, ids)
    if case.attack == "label-flip":
        federation = flipped(federation, hostile)
    execute = Hostile(case.attack, hostile, case.seed) if case.attack else batched.execute_jobs
    method = make_method(
        case.method, scenario.make_method_settings(case.seed, {}), Server(federation.task, federation.server_data)
    )
    fleet, first, workers = make_fleet(federation, scenario, case.seed, home, execute)
    state = method.init(federation.layout, first)
    state = asyncio.run(run_rounds(method, state, fleet))
    final = Evaluation(federation, workers, ids).evaluate_finally(method, state, fleet)
    suspected = {offence.device_id for offence in fleet.offences.values()}
    return {
        "accuracy": {i: end.score.accuracy for i, end in final.items()},
        "hostile": sorted(hostile),
        "suspected": sorted(suspected),
        "quarantined": sorted(suspected - {device.id for device in fleet.get_devices()}),
    }


def hostile_in(case: Case, ids: Sequence[str]) -> frozenset[str]:
    """The share of the devices, rounded up, drawn by lot; with a larger share the same and others."""
    n = math.ceil(case.share * len(ids) - 1e-9)
    return frozenset(np.random.default_rng((case.seed, 98)).permutation(ids)[:n].tolist())


def flipped(federation: Federation, hostile: frozenset[str]) -> Federation:
    """Hostile devices have label C - 1 - y wherever theirs is y."""
    last = federation.task.n_classes - 1
    shares = {
        i: dataclasses.replace(share, y_train=last - share.y_train, y_val=last - share.y_val) if i in hostile else share
        for i, share in federation.shares.items()
    }
    return dataclasses.replace(federation, shares=shares)


def cases(args: argparse.Namespace) -> Iterator[Case]:
    """The clean run of each setting, and the attacks."""
    settings = itertools.product(args.seeds, args.alphas, args.shares, args.methods, args.rules)
    for seed, alpha, share, method, rule in settings:
        for attack in ("", *args.attacks):
            yield Case(method, rule, attack, share if attack else 0.0, alpha, seed, args.devices)


def of_honest(case: Case, found: dict[Case, dict[str, Any]]) -> float:
    """Mean accuracy of the honest devices in per cent; without an attack of those that `share` would leave honest."""
    run_of = case if case.attack else dataclasses.replace(case, share=0.0)
    accuracy = found[run_of]["accuracy"]
    hostile = hostile_in(case, sorted(accuracy))
    return 100 * float(np.mean([reached for i, reached in accuracy.items() if i not in hostile]))


def table(found: dict[Case, dict[str, Any]], args: argparse.Namespace) -> str:
    """Accuracy of honest devices in per cent, a row for each method, alpha, share and rule; `clean` first."""
    lines = []
    for method, alpha, share, rule in itertools.product(args.methods, args.alphas, args.shares, args.rules):
        runs = [
            Case(method, rule, attack, share, alpha, seed, args.devices)
            for attack in ("", *args.attacks)
            for seed in args.seeds
        ]
        of_seeds = np.reshape([of_honest(case, found) for case in runs], (-1, len(args.seeds)))
        lines.append([method, alpha, f"{share:.0%}", rule, *(f"{value:.1f}" for value in of_seeds.mean(axis=1))])
    return markdown(["method", "alpha", "hostile", "rule", "clean", *args.attacks], lines)


# ----------------------------------------------------------------------------------------------------------- ByzFL


def check_byzfl() -> None:
    """Rules and attacks beside ByzFL's on random vectors: equal to 1e-9, or an AssertionError says where not."""
    from byzfl import aggregators
    from byzfl import attacks as theirs

    rng = np.random.default_rng(0)
    for n, f, d in ((5, 1, 3), (10, 2, 50), (20, 6, 1000), (11, 0, 7)):
        x = rng.normal(size=(n, d))
        x[:f] *= 20
        near = {"rtol": 1e-9, "atol": 1e-9}
        np.testing.assert_allclose(rules.median(x), aggregators.Median()(x), **near)
        np.testing.assert_allclose(rules.trimmed_mean(x, f), aggregators.TrMean(f)(x), **near)
        np.testing.assert_allclose(x[rules.multi_krum(x, f)].mean(axis=0), aggregators.MultiKrum(f)(x), rtol=1e-6)
        for steps in (1, 3):
            their = aggregators.CenteredClipping(L=steps, tau=2.0)(x)
            np.testing.assert_allclose(rules.centred_clipping(x, 2.0, steps), their, **near)
        np.testing.assert_allclose(sign_flip(x), theirs.SignFlipping()(x), **near)
        np.testing.assert_allclose(ipm(x), theirs.InnerProductManipulation(TAU_IPM)(x), **near)
        np.testing.assert_allclose(alie(x), theirs.ALittleIsEnough(Z_ALIE)(x), **near)
        print(f"n={n} f={f} d={d}: median, trimmed mean, multi-Krum, centred clipping, sign flip, ALIE, IPM agree")


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--out", type=Path, default=Path("attacks"), help="folder of the runs")
    parser.add_argument("--methods", type=several(), default=("fedavg", "fedge"))
    parser.add_argument("--rules", type=several(), default=get_args(Rule))
    parser.add_argument("--attacks", type=several(), default=ATTACKS)
    parser.add_argument("--shares", type=several(float), default=(0.2, 0.1, 0.3))
    parser.add_argument("--alphas", type=several(float), default=(0.5, 0.1))
    parser.add_argument("--seeds", type=several(int), default=(0,))
    parser.add_argument("--devices", type=int, default=10)
    parser.add_argument("--check-byzfl", action="store_true", help="compare rules and attacks with ByzFL's, and end")
    args = parser.parse_args()
    if args.check_byzfl:
        check_byzfl()
        return
    logging.disable(logging.CRITICAL)
    args.out.mkdir(parents=True, exist_ok=True)
    found: dict[Case, dict[str, Any]] = {}
    for case in cases(args):
        file = args.out / f"{case.name}.json"
        if case not in found and not file.exists():
            with tempfile.TemporaryDirectory() as home:
                outcome = run(case, Path(home))
            write_atomically(file, json.dumps(dataclasses.asdict(case) | outcome).encode())
        found[case] = json.loads(file.read_text())
    print(table(found, args))
    finish(args, list(found.values()))


if __name__ == "__main__":
    main()
