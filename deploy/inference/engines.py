"""Engines: ways to run a bundle.

fused       runs the skeleton: gate, all candidates and the fusion in one call of ONNX Runtime. The default.
separate    runs a session for each candidate, and gate and fusion in numpy. The results are the same, with less memory
            if candidates are large, since each graph is optimised separately.
lazy        works as separate, but runs a sample's candidates one by one, best first, and skips those that can hardly
            matter. The results are approximate.
int8        runs the graph of int8.onnx, with candidates in 8 bits. The results are approximate, and the bundle must
            have been quantised.
"""

from __future__ import annotations

import math
import platform
import threading
from collections.abc import Mapping, Sequence
from typing import Annotated, Final, Literal

import numpy as np
from msgspec import UNSET, Meta, Struct, UnsetType

from deploy.inference.networks import Networks
from deploy.inference.sessions import Provider, Session
from fedge.bundle import formula
from fedge.bundle.formula import Formula, compute_gate_scores, fuse
from fedge.bundle.graph_reader import find_largest_int8
from fedge.bundle.manifest import INT8, OUTPUTS, Bundle, Manifest, Part, PoolInfo
from fedge.data.problems.maths import Floats
from fedge.data.task import INPUT
from fedge.errors import ConfigError
from fedge.system.text import Heading
from fedge.tensors.layout import Tensors, view_bytes
from fedge.wire.messages import Role

EngineName = Literal["fused", "separate", "lazy", "int8"]
EngineChoice = Literal["auto", EngineName]
Mode = Literal["normal", "shift"]
ENGINES: Final[tuple[EngineName, ...]] = ("fused", "separate", "lazy", "int8")
APPROXIMATE: Final[frozenset[EngineName]] = frozenset({"lazy", "int8"})
LARGE_PART_BYTES: Final = 40_000_000
"""Size of a candidate from which `auto` chooses the engine separate, to save memory. Sessions of five ResNet-18 add
428 MB, the fused graph adds 543 MB."""
MAX_WEIGHT: Final = 64
"""Largest absolute 8-bit weight with which sums are the same on every processor (`export.int8`)."""
NEGLIGIBLE: Final = 0.01
"""Largest share of the mixture that lazy evaluation leaves out, as far as its bounds hold."""

ROUNDING: Final = 1e-4
"""Relative tolerance for exceeding an energy's bound, since another engine recorded the bound."""


RuntimeOption = Annotated[
    EngineChoice, Heading.PREDICTION, "This engine runs the bundle (docs/runtime.md); lazy and int8 are approximate."
]
ModeOption = Annotated[Mode, Heading.PREDICTION, "The mode shift is for samples unlike the device's own data."]
ThreadsOption = Annotated[int, Meta(ge=1, le=256), Heading.PREDICTION, "ONNX Runtime has this many threads."]
ProviderOption = Annotated[
    str,
    Heading.PREDICTION,
    "ONNX Runtime takes this execution provider: cpu, cuda, tensorrt, xnnpack, or another by its full name. It is an "
    "error if it does not run; auto is the best that runs here.",
]
ProviderOptions = Annotated[
    str,
    Heading.PREDICTION,
    "The provider gets these options, as ONNX Runtime names them: trt_fp16_enable=1,device_id=0.",
]
BudgetMsOption = Annotated[
    Annotated[float, Meta(gt=0, extra={"unit": "ms"})] | None,
    Heading.PREDICTION,
    "A sample may take this long; candidates and engine are chosen by what they take here (docs/runtime.md, A budget).",
]
BudgetMbOption = Annotated[
    Annotated[float, Meta(gt=0, extra={"unit": "MB"})] | None,
    Heading.PREDICTION,
    "A bundle may add this much to the memory of the program; candidates stay on the disk or are left out.",
]
CoverageOption = Annotated[
    Annotated[float, Meta(ge=0.5, lt=1)] | None,
    Heading.PREDICTION,
    "Each answer has a set of classes, or an interval, that holds the truth this often (docs/methods/conformal.md).",
]


class EngineOptions(Struct, frozen=True, kw_only=True):
    """Options for running a device's present and later bundles; they are those of `deploy.load`.

    `code` names classes of the user's that may score answers, also where bundles are examined. `coverage` is the share
    of samples whose prediction set must hold the target; without it there are no sets. `budget_ms` and `budget_mb`
    limit time and memory (`deploy.inference.budget`); without both, all candidates run.
    """

    engine: EngineChoice = "auto"
    mode: Mode = "normal"
    threads: int = 1
    provider: str = "auto"
    provider_options: dict[str, str] = {}
    code: tuple[str, ...] = ()
    coverage: float | None = None
    budget_ms: float | None = None
    budget_mb: float | None = None


def make_engine_options(
    runtime: EngineChoice,
    mode: Mode,
    threads: int,
    provider: str,
    provider_options: str,
    *,
    coverage: float | None,
    budget_ms: float | None,
    budget_mb: float | None,
) -> EngineOptions:
    """Return the engine options that a command's flags give.

    Raises:
        ConfigError: the provider options are malformed.
    """
    pairs = [text.partition("=") for text in provider_options.split(",") if text]
    if not all(key and equals for key, equals, _ in pairs):
        raise ConfigError(f"--provider-options are KEY=VALUE,KEY=VALUE, not {provider_options}")
    options = {key.strip(): value.strip() for key, _, value in pairs}
    return EngineOptions(
        engine=runtime,
        mode=mode,
        threads=threads,
        provider=provider,
        provider_options=options,
        coverage=coverage,
        budget_ms=budget_ms,
        budget_mb=budget_mb,
    )


def choose_engine(bundle: Bundle, engine: EngineChoice) -> EngineName:
    """Resolve `auto` to separate if candidates are large, else to fused; check any other choice.

    Raises:
        ConfigError: there is no such engine, or the bundle lacks what it needs.
    """
    manifest, apart = bundle.manifest, can_run_apart(bundle)
    if engine == "auto":
        largest = max(candidate.part.size_bytes for candidate in manifest.candidates)
        return "separate" if apart and largest >= LARGE_PART_BYTES else "fused"
    if engine not in ENGINES:
        raise ConfigError(f"there is no engine {engine!r}: choose auto, {', '.join(ENGINES)}")
    if engine in {"separate", "lazy"} and not apart:
        raise ConfigError(
            f"engine {engine} does not run {bundle.folder}, which is no classification, a pool or from an older fedge: "
            "use fused"
        )
    if engine == "int8" and not isinstance(manifest.int8, Part):
        raise ConfigError(f"engine int8 needs int8.onnx, which {bundle.folder} lacks: `fedge export --int8` makes it")
    if engine == "int8":
        _require_exact_sums(bundle)
    return engine


def can_run_apart(bundle: Bundle) -> bool:
    """Return whether candidates can run one by one; pools and other problems than classification run whole."""
    fusion = bundle.manifest.fusion
    known = fusion.space is fusion.energy_temperature is UNSET
    return bundle.manifest.task.problem.APART and bool(bundle.branch) and known


def _require_exact_sums(bundle: Bundle) -> None:
    """Refuse a graph whose sums of 8 bits saturate on some processors of this machine's kind.

    Arm adds 8-bit products in 32 bits. x86-64 without VNNI adds two such products in 16 bits.

    Raises:
        ConfigError: this is no Arm processor, and weights are larger than `MAX_WEIGHT`.
    """
    if platform.machine() in {"aarch64", "arm64"}:
        return
    try:
        largest = find_largest_int8(memoryview((bundle.folder / INT8).read_bytes()))
    except ValueError as error:
        raise ConfigError(f"engine int8 cannot check {bundle.folder / INT8}: {error}") from error
    if largest > MAX_WEIGHT:
        raise ConfigError(
            f"{bundle.folder / INT8} has weights up to {largest}, with which some x86-64 processors give wrong answers "
            f"(at most {MAX_WEIGHT} are right on all): make it again with `fedge export --int8`, or use engine fused"
        )


def make_engine(
    bundle: Bundle,
    engine: EngineName,
    threads: int,
    providers: Sequence[Provider],
    mode: Mode,
    networks: Networks | None = None,
) -> Engine:
    """Load a bundle into an engine that it supports.

    `providers` are execution providers of ONNX Runtime, in order of preference. `mode` "shift" uses a flat prior, for
    samples unlike the device's own (`formula.flatten_prior`). The engines separate and lazy run the given `networks`,
    by default all in memory.

    Raises:
        ConfigError: the mode does not apply to the bundle.
    """
    if mode == "shift" and isinstance(bundle.manifest.pool, PoolInfo):
        raise ConfigError("a pool of modules has no prior to be flattened: use mode normal")
    if mode == "shift" and is_chosen_by_gate(bundle.manifest):
        raise ConfigError("the gate alone chooses the experts of a sample and cannot be flattened: use mode normal")

    def read_numbers() -> Tensors:
        return view_bytes((bundle.folder / bundle.manifest.gate.file_name).read_bytes())

    changed = formula.flatten_prior(read_numbers()) if mode == "shift" else {}
    outputs = (*bundle.manifest.task.problem.OUTPUTS, *OUTPUTS)
    if engine == "fused":
        parts = [part.file_name for part in dict.fromkeys(bundle.manifest.parts)]
        return FusedEngine(Session(bundle.graph, bundle.folder, threads, providers, changed, parts=parts), outputs)
    if engine == "int8":
        return FusedEngine(Session(bundle.folder / INT8, bundle.folder, threads, providers, changed), outputs)
    if networks is None:
        networks = Networks(bundle, threads, providers)
        networks.hold(range(len(bundle.manifest.candidates)))
    numbers = formula.select_candidates(read_numbers() | changed, networks.used)
    experts = [i for i, k in enumerate(networks.used) if bundle.manifest.candidates[k].role.is_shared]
    how = formula.prepare_formula(numbers, experts, bundle.manifest.fusion.top)
    return (LazyEngine if engine == "lazy" else SeparateEngine)(bundle, how, networks)


def is_chosen_by_gate(manifest: Manifest) -> bool:
    """Return whether only the gate chooses the experts of a sample, as in FedCoE's global model (fedcoe.md, E13)."""
    candidates, fusion = manifest.candidates, manifest.fusion
    return fusion.beta == 0 and all(c.role.is_shared for c in candidates) and fusion.top < len(candidates)


class FusedEngine:
    """The engine that runs one graph for everything.

    `providers` are the execution providers in use. `outputs` names the graph's outputs.
    """

    def __init__(self, session: Session, outputs: Sequence[str]) -> None:
        self._session, self._outputs = session, outputs
        self.providers = session.providers

    def run(self, x: Floats) -> list[Floats]:
        """Return the answers (n, ...), such as probabilities, then weights and energies (n, M), of model inputs."""
        outputs: list[Floats] = self._session.run(self._outputs, {INPUT: x})
        return outputs

    run_all = run


class SeparateEngine:
    """The engine with a session for each candidate that is not left out; `how` is the formula of these."""

    def __init__(self, bundle: Bundle, how: Formula, networks: Networks) -> None:
        self._networks, self._how, self._used = networks, how, list(networks.used)
        self._m, self._n_classes = len(bundle.manifest.candidates), bundle.manifest.task.n_classes

    @property
    def providers(self) -> tuple[str, ...]:
        """The execution providers in use."""
        return self._networks.providers

    def run_all(self, x: Floats) -> list[Floats]:
        """Return the same outputs as `FusedEngine`, with no candidate skipped and no bound changed."""
        with np.errstate(all="ignore"):
            gate = compute_gate_scores(self._how, x)
        return self._fuse([self._compute_logits(i, x) for i in range(len(self._used))], gate)

    run = run_all

    def run_reweighed(self, x: Floats, log_ratio: Floats) -> list[Floats]:
        """Return the outputs of `run`, and the probabilities (n, C) if `log_ratio` (M,) is added to the scores."""
        with np.errstate(all="ignore"):
            gate = compute_gate_scores(self._how, x)
        logits = [self._compute_logits(i, x) for i in range(len(self._used))]
        return [*self._fuse(logits, gate), fuse(self._how, logits, gate + log_ratio[self._used])[0]]

    def run_formula(self, x: Floats) -> list[Floats]:
        """Return the outputs if all logits are 0: only gate and fusion run, to be measured."""
        gate = compute_gate_scores(self._how, x)
        return self._fuse([np.zeros((len(x), self._n_classes), np.float32) for _ in self._used], gate)

    def _compute_logits(self, i: int, x: Floats) -> Floats:
        """Compute logits (n, C) of the i-th candidate that is used."""
        return self._networks.compute_logits(self._used[i], x)

    def _fuse(self, logits: Sequence[Floats], gate: Floats) -> list[Floats]:
        """Return the outputs, in which a candidate that is left out has weight 0 and no energy."""
        answers, weights, energies = fuse(self._how, logits, gate)
        if len(self._used) < self._m:
            every = np.zeros((len(gate), self._m), np.float32), np.full((len(gate), self._m), np.nan, np.float32)
            for whole, part in zip(every, (weights, energies), strict=True):
                whole[:, self._used] = part
            weights, energies = every
        return [answers, weights, energies]


class LazyEngine(SeparateEngine):
    """The engine that runs only candidates that can matter; skipped ones have no weight and no energy.

    A candidate's score is at most its gate score plus the contribution of the largest energy seen on the validation
    samples. The private model and the guard's candidate run first. The others follow by falling bound, until the rest
    could add at most the share `NEGLIGIBLE` of the mixture. An energy above its bound shows that the sample is unlike
    the validation samples; the bound is then raised for good, and all candidates run for this sample.
    """

    def __init__(self, bundle: Bundle, how: Formula, networks: Networks) -> None:
        super().__init__(bundle, how, networks)
        candidates = [bundle.manifest.candidates[k] for k in self._used]
        recorded = [np.inf if isinstance(c.energy_max, UnsetType) else c.energy_max for c in candidates]
        self._first = {k for k, c in enumerate(candidates) if c.role is Role.PRIVATE or k == formula.find_guard(how)}
        self._expert = [c.role.is_shared for c in candidates]
        self._lock = threading.Lock()
        self._bounds = [0.0] * len(candidates)
        if how.beta:
            self._bounds = formula.clip_energies(how, np.array(recorded, np.float32)).tolist()

    def run(self, x: Floats) -> list[Floats]:
        """Return outputs in the form of `FusedEngine.run`, but skip candidates that can hardly matter."""
        with np.errstate(all="ignore"):
            gate = compute_gate_scores(self._how, x)
        logits = np.full((len(self._used), len(x), self._n_classes), np.nan, np.float32)
        for i in range(len(x)):
            for k, row in self._run_sample(x[i : i + 1], gate[i].tolist()).items():
                logits[k, i] = row
        return self._fuse(list(logits), gate)

    def _run_sample(self, x: Floats, gate: list[float]) -> dict[int, Floats]:
        """Return logits (1, C) of the candidates that were run for one sample."""
        bound = [score + energy for score, energy in zip(gate, self._bounds, strict=True)]
        order = sorted(range(len(bound)), key=lambda k: (k not in self._first, -bound[k]))
        logits: dict[int, Floats] = {}
        score: dict[int, float] = {}
        exact = False
        for n_run, k in enumerate(order):
            if n_run >= len(self._first) and score and not exact and not self._matters(order[n_run:], bound, score):
                break
            logits[k] = self._compute_logits(k, x)
            energy = formula.compute_counted_energy(self._how, k, logits[k][0])
            if not math.isfinite(energy + gate[k]):
                continue  # the fusion drops it
            score[k] = gate[k] + energy
            if energy > self._bounds[k] + ROUNDING * max(1.0, abs(self._bounds[k])):
                exact = True
                with self._lock:
                    self._bounds[k] = max(energy, self._bounds[k])
        return logits

    def _matters(self, rest: Sequence[int], bound: Sequence[float], score: Mapping[int, float]) -> bool:
        """Return whether the candidates left could have more than a negligible share of the mixture.

        At most `top` experts take part, and none whose bound is below the `top` best experts that have run. `rest`
        holds the candidates left, by falling bound; `score` holds the scores of those that have run.
        """
        top = self._how.top
        best = sorted([s for k, s in score.items() if self._expert[k]], reverse=True)[:top]
        lowest = best[-1] if len(best) == top else -math.inf
        experts = [bound[k] for k in rest if self._expert[k] and bound[k] > lowest][:top]
        possible = experts + [bound[k] for k in rest if not self._expert[k]]
        if not possible:
            return False
        done = best + [s for k, s in score.items() if not self._expert[k]]
        largest = max(done + possible)
        if math.isinf(largest):
            return True
        added = sum([math.exp(b - largest) for b in possible])
        return added > NEGLIGIBLE * (added + sum([math.exp(s - largest) for s in done]))


Engine = FusedEngine | SeparateEngine
