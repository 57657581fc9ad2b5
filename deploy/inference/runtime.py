"""Run a bundle, which turns samples into predictions. The engines are in `deploy.inference.engines`."""

from __future__ import annotations

import contextlib
import logging
import time
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import numpy as np
from msgspec import UnsetType, structs
from numpy.typing import NDArray

from deploy.inference.budget import Gauge, Plan, make_affordable_engine
from deploy.inference.engines import (
    EngineChoice,
    EngineName,
    EngineOptions,
    Mode,
    SeparateEngine,
    choose_engine,
    make_engine,
)
from deploy.inference.prediction import Coverage, Floats, Prediction
from deploy.inference.sessions import CPU, list_provider_chains
from fedge.bundle.conformal import compute_threshold
from fedge.bundle.manifest import Bundle, Manifest, Reference, read_bundle, require_bundle
from fedge.data.preprocessing import preprocess, turn_images
from fedge.data.task import TaskSpec
from fedge.errors import ConfigError, UpdateRejected
from fedge.system.files import lock_for_reading, require_utf8
from fedge.system.text import refuse_unknown_arguments

log = logging.getLogger("fedge.deploy")

WITHOUT_SCORES: Final = "has no scores of labelled validation samples, so it can promise no coverage"
"""What is wrong with a bundle that was made without such samples, or by an older fedge."""


class Runtime:
    """A verified, loaded bundle. Safe to share between threads."""

    def __init__(self, bundle: Bundle, how: EngineOptions, gauge: Gauge | None = None) -> None:
        """Load a verified bundle; `gauge` measures what it takes, if there is a budget; by default this process.

        Raises:
            ConfigError: the bundle lacks what the engine or the mode needs, or the named provider does not run.
            UpdateRejected: ONNX Runtime cannot run the graph, or its outputs differ from the manifest.
        """
        self.manifest: Manifest = bundle.manifest
        self.digest = bundle.digest
        self._usual = bundle.manifest.usual_range
        self._problem = bundle.manifest.task.problem
        self.engine: EngineName = choose_engine(bundle, how.engine)
        self.plan: Plan | None = None
        """What was picked for a budget; None without one."""
        self.mode = how.mode
        wanted = how.coverage if self._problem.SETS else None
        self.coverage: Coverage | None = None if wanted is None else self.make_coverage(wanted, 1 - wanted)
        outputs = self._start(bundle, how, gauge)
        each = (len(self.manifest.candidates),)
        shapes = (*self.task.problem.get_answer_shapes(self.task.input_shape), each, each)
        if [output.shape for output in outputs] != [(1, *shape) for shape in shapes]:
            raise UpdateRejected(f"{bundle.folder}: the graph's outputs are not those of the manifest")
        if self.plan is not None:
            level, event = (logging.INFO, "budget") if self.plan.fits else (logging.WARNING, "over_budget")
            log.log(level, "event=%s bundle=%s reason=%r", event, self.digest, self.plan.describe(self.manifest))

    def make_coverage(self, wanted: float, alpha: float) -> Coverage:
        """Return how this bundle makes prediction sets at the level `alpha`."""
        scores = () if isinstance(self.manifest.scores, UnsetType) else self.manifest.scores
        return Coverage(wanted, len(scores), compute_threshold(scores, alpha), alpha)

    def _start(self, bundle: Bundle, how: EngineOptions, gauge: Gauge | None) -> list[Floats]:
        """Make the engine on the first providers that work, and run it on a sample of zeros."""
        for providers in list_provider_chains(how.provider, how.provider_options):
            wanted = providers[0] if isinstance(providers[0], str) else providers[0][0]
            try:
                if how.budget_ms is how.budget_mb is None:
                    self._engine = make_engine(bundle, self.engine, how.threads, providers, self.mode)
                else:
                    self._engine, self.plan = make_affordable_engine(bundle, how, providers, gauge)
                    self.engine = self.plan.engine
                outputs = self._engine.run_all(np.zeros((1, *self.task.input_shape), np.float32))
                if wanted in self.providers:
                    return outputs
                reason = f"ONNX Runtime computes on {', '.join(self.providers)} instead"
            except ConfigError:
                raise
            except Exception as error:  # ONNX Runtime's exception tree starts here
                if wanted == CPU:
                    raise UpdateRejected(f"ONNX Runtime cannot run {bundle.folder}: {error}") from error
                reason = str(error)[:500]
            if how.provider != "auto":
                raise ConfigError(f"{how.provider} does not run {bundle.folder}: {reason}; choose another --provider")
            log.warning("event=provider_failed provider=%s reason=%r", wanted, reason)
        raise UpdateRejected(  # the CPU is always tried
            f"{bundle.folder}: nothing is computed for a sample, since all outputs of its graph are constants, such as "
            "NaN; make the bundle anew, or install an earlier release"
        )

    @property
    def providers(self) -> tuple[str, ...]:
        """The ONNX Runtime execution providers in use, in order of preference."""
        return self._engine.providers

    @property
    def used(self) -> tuple[int, ...]:
        """The candidates that a budget does not leave out, ascending; all without a budget."""
        return tuple(range(len(self.manifest.candidates))) if self.plan is None else self.plan.used

    @property
    def left_out(self) -> tuple[str, ...]:
        """The names of the candidates that a budget leaves out."""
        return tuple(c.name for k, c in enumerate(self.manifest.candidates) if k not in self.used)

    @property
    def reference(self) -> Reference | None:
        """The bundle's reference, to detect drift; None if it has none, or is that of more candidates than run."""
        found = self.manifest.reference
        return found if isinstance(found, Reference) and not self.left_out else None

    @property
    def can_reweigh(self) -> bool:
        """Whether this engine can predict with other weights of the candidates: `separate`, with two or more."""
        return self.engine == "separate" and len(self.manifest.candidates) > 1

    @property
    def task(self) -> TaskSpec:
        """The task of the bundle: classes, input shape and preprocessing."""
        return self.manifest.task

    def predict(self, x: NDArray[Any]) -> Prediction:
        """Predict one raw sample or a batch, in any form that `fedge.data.preprocessing.preprocess` takes.

        Raises:
            ConfigError: there are no samples, their shape is not the task's, or a number is not finite in single
                precision.
        """
        begin = time.perf_counter()
        return self.predict_inputs(self._preprocess(x), begin)

    def predict_reweighed(self, x: NDArray[Any], ratio: NDArray[np.floating]) -> tuple[Prediction, Prediction]:
        """Predict as `predict` does, and also with the candidates' weights multiplied by `ratio` (M,), above 0.

        `can_reweigh` says whether this engine can. Weights and energies of both predictions are the bundle's own.

        Raises:
            ConfigError: as for `predict`.
        """
        assert isinstance(self._engine, SeparateEngine)
        begin = time.perf_counter()
        log_ratio = np.log(ratio).astype(np.float32)
        inputs = turn_images(self._preprocess(x), self.manifest.quarters)
        *outputs, probabilities = self._engine.run_reweighed(inputs, log_ratio)
        own = self._make_prediction(outputs, begin)
        return own, self.adapt(own, probabilities)

    def predict_inputs(self, x: Floats, begin: float | None = None) -> Prediction:
        """Predict preprocessed model inputs, (n, *input_shape) float32; latency counts from `begin`, by default now."""
        begin = time.perf_counter() if begin is None else begin
        return self._make_prediction(self._engine.run(turn_images(x, self.manifest.quarters)), begin)

    def _preprocess(self, x: NDArray[Any]) -> Floats:
        inputs = preprocess(self.task, self.add_batch_axis(x))
        if not len(inputs):
            raise ConfigError("there are no samples: give one or more")
        return inputs

    def _make_prediction(self, outputs: Sequence[Floats], begin: float) -> Prediction:
        *answers, weights, energies = outputs
        return Prediction(
            problem=self._problem,
            answers=tuple(answers),
            weights=weights,
            energies=energies,
            latency_ms=(time.perf_counter() - begin) * 1000,
            usual=self._usual,
            coverage=self.coverage,
        )

    def adapt(self, answer: Prediction, probabilities: Floats) -> Prediction:
        """Return predictions with other probabilities (n, C)."""
        return replace(answer, answers=(probabilities,), adapted=True)

    def add_batch_axis(self, x: NDArray[Any]) -> NDArray[Any]:
        """Return raw samples with a batch axis, (1, ...) for one sample; a batch is unchanged.

        One sample has the model's input shape, or is an image with channels last or, if grey, without channels.
        """
        raw, shape = np.asarray(x), self.task.input_shape
        single = {shape, () if self.task.preprocessing.text else shape}
        if len(shape) == 3:
            single |= {(*shape[1:], shape[0])} | ({shape[1:]} if shape[0] == 1 else set())
        return raw[np.newaxis] if raw.shape in single else raw


@refuse_unknown_arguments
def load(
    path: Path | str,
    threads: int | None = None,
    *,
    engine: EngineChoice = "auto",
    mode: Mode = "normal",
    provider: str = "auto",
    provider_options: Mapping[str, str] | None = None,
    coverage: float | None = None,
    budget_ms: float | None = None,
    budget_mb: float | None = None,
) -> Runtime:
    """Verify the bundle in a folder and make it ready to predict.

    Args:
        path: the folder.
        threads: threads of ONNX Runtime. None means one, which is best for single samples and leaves other cores free.
        engine: "fused", "separate", "lazy" or "int8" (`deploy.inference.engines`), or "auto", which is separate if a
            candidate has 40 MB or more, else fused.
        mode: "shift" flattens the prior, for samples unlike the device's training data.
        provider: ONNX Runtime's execution provider: "cpu", "cuda", "tensorrt", "xnnpack" or another by its full name.
            The CPU runs nodes that the provider cannot, but not all of them. "auto" is the first of CUDA, TensorRT,
            XNNPACK and CPU that is installed and works.
        provider_options: ONNX Runtime's options for the named provider. By default TensorRT caches its engines in
            ~/.cache/fedge/tensorrt.
        coverage: the share of samples, at least 0.5 and below 1, whose prediction set must hold the target
            (`Prediction.sets`); for classification and regression alone.
        budget_ms: the time that a sample may take in ms, without its preprocessing. The best engine and candidates that
            fit are measured and picked; `Runtime.plan` says which (`deploy.inference.budget`).
        budget_mb: the memory in MB that the bundle may add to the process. Candidates that do not fit in it are on the
            disk until they are wanted, or left out.

    Raises:
        ConfigError: there is no such folder, engine or provider; the folder's name is not UTF-8; `threads` is below 1;
            `coverage` or a budget is out of range; the bundle lacks what the engine, the mode or the sets need; or the
            named provider does not run the bundle.
        UpdateRejected: the bundle does not match its manifest; ONNX Runtime has then read none of it.
    """
    if threads is not None and threads < 1:
        raise ConfigError(f"threads must be at least 1, not {threads}")
    if coverage is not None and not 0.5 <= coverage < 1:
        raise ConfigError(f"coverage must be at least 0.5 and below 1, not {coverage}")
    for name, limit in {"budget_ms": budget_ms, "budget_mb": budget_mb}.items():
        if limit is not None and not limit > 0:
            raise ConfigError(f"{name} must be above 0, not {limit}")
    how = EngineOptions(
        engine=engine,
        mode=mode,
        threads=threads or 1,
        provider=provider,
        provider_options=dict(provider_options or {}),
        coverage=coverage,
        budget_ms=budget_ms,
        budget_mb=budget_mb,
    )
    return load_runtime(Path(path), how)


def load_runtime(folder: Path, how: EngineOptions) -> Runtime:
    """Load a bundle as `load` does, with all options in one value.

    Raises:
        ConfigError, UpdateRejected: as for `load`.
    """
    require_bundle(folder)
    require_utf8(folder)
    with contextlib.ExitStack() as held:
        try:
            held.enter_context(
                lock_for_reading(folder)
            )  # an agent that prunes its bundles then leaves this one for a later time
        except OSError as error:
            raise ConfigError(f"cannot open the bundle {folder}: {error}; name one that this user can read") from error
        runtime = Runtime(read_bundle(folder), how)
        require_sets(runtime, how)
        if runtime.coverage is not None and not runtime.coverage.n:
            raise ConfigError(
                f"{folder} {WITHOUT_SCORES}: take a bundle that this version of fedge made on a device that has some "
                "(docs/methods/conformal.md)"
            )
        weakref.finalize(runtime, held.pop_all().close)
    return runtime


def require_sets(runtime: Runtime, how: EngineOptions) -> None:
    """Check that prediction sets exist for the runtime's problem and mode, if a coverage is wanted.

    Raises:
        ConfigError: they do not.
    """
    if how.coverage is None:
        return
    if not runtime.task.problem.SETS:
        raise ConfigError(
            f"there are no prediction sets for {runtime.task.problem.NAME}, only for classification and regression: "
            "leave out the coverage"
        )
    if how.mode != "normal":
        raise ConfigError("mode shift has no prediction sets, since a bundle's scores are of mode normal: leave it out")


def load_update(folder: Path, how: EngineOptions, *, again: bool = False) -> Runtime:
    """Load a bundle with the device's engine or, if the bundle lacks that engine's graph, with fused.

    `again` is as for `fedge.bundle.manifest.read_bundle`.

    Raises:
        ConfigError, UpdateRejected: as for `load`.
    """
    bundle = read_bundle(folder, again=again)
    try:
        choose_engine(bundle, how.engine)
    except ConfigError as error:  # an update matters more than an approximation of it
        log.warning("event=engine_missing bundle=%s engine=%s reason=%r", bundle.digest, how.engine, str(error))
        how = structs.replace(how, engine="fused")
    return Runtime(bundle, how)
