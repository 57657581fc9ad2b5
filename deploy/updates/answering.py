"""The bundle in service: replaceable at run time, counted, put on trial and compared with the previous bundle."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import numpy as np
from msgspec import structs
from numpy.typing import NDArray

from deploy.inference.engines import EngineOptions
from deploy.inference.prediction import Prediction
from deploy.inference.prior import ENOUGH, SharesEstimate
from deploy.inference.runtime import WITHOUT_SCORES, Runtime, load_update, require_sets
from deploy.updates.coverage import AdaptiveCoverage, Level
from deploy.updates.drift import Alarm, Drift
from deploy.updates.examination import Limits, compute_allowed_ms
from deploy.updates.quality import MAX_COMPARED, PairedTest, explain_better, grade_answers, measure_home
from deploy.updates.slots import Slots
from fedge.bundle.manifest import compute_bundle_digest
from fedge.data.validation import FILE, load_validation
from fedge.errors import ConfigError, FedgeError, StoreError, UpdateRejected
from fedge.system.files import get_version
from fedge.wire.messages import DriftKind, Outliers, Quality

log = logging.getLogger("fedge.deploy")

MAX_FAILED: Final = 3
"""Predictions in a row that may fail on trial; one more failure brings the last good bundle back."""
LATENCY_WINDOW: Final = 20
"""Number of latest single-sample calls over which the median latency on trial is taken."""


class ActiveBundle:
    """Predicts with the slots' running bundle. Safe to share between threads.

    A new bundle is loaded before the old one is released, and requests finish on the bundle with which they began. So a
    switch fails no request.
    """

    def __init__(
        self, slots: Slots, limits: Limits, how: EngineOptions = EngineOptions(), *, adapts_prior: bool = False
    ) -> None:
        """Load the bundle that `slots.boot()` returns; `how.engine` runs every bundle that supports it.

        If `adapts_prior`, probabilities follow the classes' shares while these are all that drifts, and the weights of
        the candidates while inputs drift (`deploy.inference.prior`). For the latter, engine auto is separate.

        Raises:
            ConfigError: nothing was ever installed, or `how` wants prediction sets where there are none.
            UpdateRejected: neither the running nor the last good bundle can be loaded.
        """
        self._slots = slots
        self.limits: Final = limits
        self.how: Final = structs.replace(how, engine="separate") if adapts_prior and how.engine == "auto" else how
        self._adapts_prior = adapts_prior
        self._lock = threading.RLock()
        self.n_predictions = self.n_failed = self.n_labelled = 0  # since the process began
        self._failed_in_a_row = 0
        self._trial_latencies: list[float] = []
        self._on_trial = False
        """Whether the bundle in service has yet to prove itself. Only the thread that clears this flag, under the lock,
        may then write to the slots. It writes without the lock, because predictions need the lock and the disk may be
        slow."""
        self._trial_began = 0.0
        self._trial_predictions = 0
        self._allowed_ms: float | None = None
        self._before: str | None = None
        """Digest of the previous bundle while the running one is compared with it, else None."""
        self._rival: Runtime | None = None  # the previous bundle, loaded with the first labelled sample
        self._paired = PairedTest()
        self._comparing = threading.Lock()
        self._switching = threading.Lock()
        """Held by the thread that replaces the bundle in service, here and in the slots; predictions go on."""
        self._unloadable = ""
        """Why the slots' running bundle cannot be loaded, until the slots have recorded that; else ""."""
        self.no_way_back = ""
        """Why a bundle that the slots have given up is still in service, or ""; `settle` tries again."""
        self._drift = Drift(None)
        self._classes: SharesEstimate | None = None  # shares of the classes among recent samples
        self._candidates: SharesEstimate | None = None  # shares of the candidates in answers to these
        self._validation: object = None
        """Version of the file of validation samples from which shares at home are known, or were sought in vain."""
        folder = slots.boot()
        if folder is None:
            raise ConfigError(
                "no bundle is installed yet: wait until the agent has written one, or run "
                "`fedge install --home HOME BUNDLE`"
            )
        self._activate(self._load(folder))
        require_sets(self._runtime, self.how)
        self._on_trial = slots.state.trial is not None
        if self._on_trial and slots.good is not None:
            self._before = _find_digest(slots.good)

    @property
    def runtime(self) -> Runtime:
        """The bundle in service."""
        return self._runtime

    @property
    def outliers(self) -> Outliers | None:
        """Counts of the samples seen and flagged by the bundle in service; None if the bundle has no reference."""
        with self._lock:
            return None if self._runtime.reference is None else self._outliers

    @property
    def alarm(self) -> Alarm | None:
        """In which way recent samples differ from those that the bundle is for; None if they do not."""
        with self._lock:
            return self._drift.alarm

    @property
    def drift_kind(self) -> DriftKind | None:
        """The kind of the alarm, or None."""
        alarm = self.alarm
        return None if alarm is None else alarm.kind

    @property
    def coverage_level(self) -> Level | None:
        """The level of the prediction sets of the bundle in service, with its counts; None without sets."""
        with self._lock:
            return self._sets.level

    def raise_alarm(self, alarm: Alarm | None) -> None:
        """Take over the alarm of a process before; it goes out when recent answers fit again."""
        with self._lock:
            self._drift.hold(alarm)

    def learn_home(self, home: Path) -> None:
        """Learn how the classes are shared at home from HOME/validation.npz, once for each bundle. Slow.

        A file that is missing or damaged changes nothing; it is read as soon as there is another.
        """
        runtime, version = self._runtime, get_version(home / FILE)
        with self._lock:
            if self._drift.home is not None or self._validation == version:
                return
        try:
            known = measure_home(runtime, load_validation(home, runtime.task))
        except Exception as error:  # noqa: BLE001 - the bundle answers without it
            log.warning("event=no_validation reason=%r", str(error))
            known = None
        with self._lock:
            if runtime is self._runtime:
                self._validation, self._drift.home = version, known
                if known is not None and self._adapts_prior:
                    self._classes = SharesEstimate(known.shares) if known.n >= ENOUGH else None
                    self._candidates = SharesEstimate(known.weights) if runtime.can_reweigh else None

    def answer(self, x: NDArray[Any]) -> tuple[Runtime, Prediction]:
        """Predict raw samples; also return the bundle used, since it may change meanwhile.

        Raises:
            ConfigError: the samples have another shape than the task's.
        """
        with self._lock:
            runtime, candidates = self._runtime, self._candidates
            ratio = candidates.ratio if candidates and self._drift.kind is DriftKind.INPUTS else None
        try:
            own, given = (runtime.predict(x), None) if ratio is None else runtime.predict_reweighed(x, ratio)
        except ConfigError:  # the caller's fault
            raise
        except Exception as error:
            self._record_failure(runtime, error)
            raise
        return runtime, self._record(runtime, own, given)

    def add_feedback(self, x: NDArray[Any], y: NDArray[Any]) -> None:
        """Compare the running and the previous bundle on raw samples (n, ...) with converted targets (n, ...).

        The targets of classification are class numbers; others are as `Problem.convert_targets` returns them.

        Both predict the samples as long as the device has the previous bundle and the evidence is insufficient.
        `worse_reason` gives the verdict; the owner of the slots acts on it.

        Raises:
            ConfigError: the samples have another shape than the task's, or a target does not fit the task.
        """
        runtime = self._runtime
        x = runtime.add_batch_axis(x)
        runtime.task.problem.check_targets(y, len(x), runtime.task.input_shape)
        with self._comparing:
            rival = self._find_rival()
            if rival is None:
                return
            now = grade_answers(runtime.predict(x), y)
            if now is None:
                return
            try:
                before = grade_answers(rival.predict(x), y)
            except Exception as error:  # noqa: BLE001 - the request was for the running bundle, which answered
                log.warning("event=rival_failed bundle=%s error=%r", rival.digest, str(error))
                before = np.minimum(now, 0)
            with self._lock:
                if before is not None and runtime is self._runtime and rival is self._rival:
                    self._paired.observe(before, now)
                    if self._paired.n >= MAX_COMPARED and not self._explain_worse():
                        self._stop_comparing()

    def record_labels(self, bundle: str, right: NDArray[np.bool_], sure: NDArray[np.floating]) -> None:
        """Record which answers (n,) of the bundle with this digest were right; they may contradict the bundle.

        `sure` holds the probabilities of the classes that it named, (n,).
        """
        with self._lock:
            self.n_labelled += len(right)
            if bundle == self._runtime.digest:
                self._drift.observe_labels(right, sure)

    def record_grades(self, bundle: str, answers: Sequence[NDArray[np.floating]], y: NDArray[Any]) -> None:
        """Record the true targets (n, ...) of answers that the bundle with this digest gave; they may contradict it.

        Answers that are neither right nor wrong are graded against those at home, so they count once these are known.
        """
        problem = self._runtime.task.problem
        grades = problem.grade_samples(answers, y)
        with self._lock:
            home = self._drift.home
        usual = 1.0 if problem.RIGHT_OR_WRONG else None if home is None else home.usual_grade
        if grades is not None and usual is not None:
            self.record_labels(bundle, grades >= usual, problem.get_promise(answers))

    def record_coverage(
        self, bundle: str, answers: Sequence[NDArray[np.floating]], y: NDArray[Any], *, sensitive: bool = False
    ) -> None:
        """Move the level of the prediction sets by the targets (n, ...) of answers of the bundle with this digest.

        Raises:
            StoreError: the level cannot be written; it is as before.
        """
        with self._lock:
            sets = self._sets if bundle == self._runtime.digest else None
        if sets is not None:
            sets.record(answers, y, sensitive=sensitive)

    @property
    def worse_reason(self) -> str:
        """Why labelled samples favour the previous bundle, or "" if they do not."""
        with self._lock:
            return self._explain_worse()

    def swap(self, before: Quality | None = None) -> None:
        """Load the slots' running bundle and put it into service.

        `before` is the quality of the previous bundle; it sets the limit on latency.

        Raises:
            UpdateRejected: the bundle cannot be loaded; the previous one stays in service, also for the slots.
            StoreError: the slots cannot be written; a later `settle` gives up a bundle that cannot be loaded.
        """
        with self._switching:
            folder, rival = self._slots.running, self._runtime.digest
            assert folder is not None
            try:
                runtime = load_update(folder, self.how, again=True)
            except (FedgeError, OSError) as error:
                reason = self._unloadable = f"it cannot be loaded: {error}"
                self._drop_unloadable()
                raise UpdateRejected(reason) from error
            self.set_latency_limit(before)
            self._activate(runtime, rival)
            try:
                self._slots.record_start()
            finally:
                with self._lock:
                    self._on_trial = True

    def set_latency_limit(self, before: Quality | None) -> None:
        """Set the latency above which a bundle on trial is given up, from the quality of the previous one."""
        self._allowed_ms = compute_allowed_ms(before, self.limits)

    def settle(self) -> None:
        """Revert if labelled samples favour the previous bundle; confirm a bundle on trial that has proved itself.

        Raises:
            StoreError: the slots cannot be written; the next call tries again.
        """
        self._drop_unloadable()
        if self.no_way_back:
            with self._switching:
                self._reload()
        if reason := self.worse_reason:
            there = _find_digest(self._slots.staged) == self._before
            self._stop_comparing()
            if there:
                self.revert(reason)
                return
        with self._lock:
            long_enough = (
                self._trial_predictions >= self.limits.probation_predictions
                or time.monotonic() - self._trial_began >= self.limits.probation_s
            )
            proved = self._on_trial and long_enough and self._failed_in_a_row == 0
            self._on_trial = self._on_trial and not proved
        if proved:
            try:
                self._slots.confirm()
            except StoreError:
                self._on_trial = True
                raise

    def revert(self, reason: str) -> None:
        """Revert to the previous bundle, on trial or not. Nothing may be staged meanwhile."""
        runtime = self._runtime
        with self._lock:
            self._on_trial = False
        self._revert(runtime, reason)

    # ------------------------------------------------------------------------------------------------- within

    def _load(self, folder: Path) -> Runtime:
        """Load the running bundle or, failing that, the previous one."""
        try:
            return load_update(folder, self.how)
        except (FedgeError, OSError) as error:
            if self._slots.state.trial is None and isinstance(error, ConfigError) and folder.is_dir():
                raise  # no bundle could run with these options
            try:
                before = self._slots.revert(f"it cannot be loaded: {error}", lasting=False)
            except StoreError as lost:
                raise error from lost
            return load_update(before, self.how)

    def _drop_unloadable(self) -> None:
        """Have the slots give up the bundle that could not be loaded, if any."""
        if self._unloadable:
            self._slots.roll_back(self._unloadable)
            self._unloadable = ""

    def _find_rival(self) -> Runtime | None:
        """Return the previous bundle, or None if nothing is compared or the idle slot no longer holds that bundle."""
        if self._before is None:
            return None
        if self._rival is None:
            try:
                rival = load_update(self._slots.staged, self.how)
            except (FedgeError, OSError) as error:
                log.warning("event=not_compared bundle=%s reason=%r", self._before, str(error))
                self._before = None
                return None
            if rival.digest != self._before:
                self._before = None
                return None
            self._rival = rival
        return self._rival

    def _stop_comparing(self) -> None:
        with self._lock:
            self._before, self._rival = None, None

    def _explain_worse(self) -> str:
        """Return why labelled samples favour the previous bundle, or "". The lock is held."""
        if self._before is None or not self._paired.is_worse(self.limits.accuracy_drop):
            return ""
        right_or_wrong = self._runtime.task.problem.RIGHT_OR_WRONG
        return explain_better("previous", "the samples labelled since the switch", right_or_wrong=right_or_wrong)

    def _activate(self, runtime: Runtime, before: str | None = None) -> None:
        """Put a bundle into service, not yet on trial; `before` is the digest of the bundle to compare it with."""
        sets = AdaptiveCoverage(self._slots.home, runtime)
        if sets.now is not None and not sets.now.n:
            log.warning("event=no_coverage bundle=%s reason=%r", runtime.digest, WITHOUT_SCORES)
        log.info(
            "event=answers bundle=%s release=%d engine=%s providers=%s",
            runtime.digest,
            runtime.manifest.release,
            runtime.engine,
            ",".join(runtime.providers),
        )
        with self._lock:
            self._runtime, self._sets = runtime, sets
            self._drift = Drift(runtime.reference, runtime.manifest.release, self._drift.alarm)
            self._classes, self._candidates, self._validation = None, None, None
            self._outliers = Outliers(seen=0, flagged=0)
            self._on_trial = False
            self.no_way_back = ""
            self._failed_in_a_row = 0
            self._trial_latencies, self._trial_predictions = [], 0
            self._trial_began = time.monotonic()
            self._before, self._rival, self._paired = before, None, PairedTest()

    def _record(self, runtime: Runtime, answer: Prediction, reweighed: Prediction | None) -> Prediction:
        """Count an answer of the bundle, and return it as it goes to the caller, perhaps `reweighed`."""
        complaint, given = "", reweighed or answer
        with self._lock:
            n, problem = len(answer), runtime.task.problem
            self.n_predictions += n
            if runtime is not self._runtime:
                return given
            self._failed_in_a_row = 0
            seen, flagged = self._outliers.seen + n, self._outliers.flagged + int(answer.outlier.sum())
            self._outliers = Outliers(seen=seen, flagged=flagged)
            shares, surprise = problem.get_shares(answer.answers), problem.get_surprise(answer.answers)
            self._drift.observe(answer.weights, answer.energies, shares, surprise)
            if self._candidates is not None:
                self._candidates.observe(answer.weights)
            if self._classes is not None:
                probabilities = self._classes.observe(answer.probabilities)
                if self._drift.kind is DriftKind.SHARES:
                    given = runtime.adapt(answer, probabilities)
            given = replace(given, coverage=self._sets.now)
            if self._on_trial:
                complaint = self._record_trial(n, answer.latency_ms)
                self._on_trial = not complaint
        if complaint:
            self._revert(runtime, complaint)
        return given

    def _record_trial(self, n: int, latency_ms: float) -> str:
        """Count work on trial; return why to give the bundle up, or "". The lock is held."""
        self._trial_predictions += n
        if n == 1 and self._allowed_ms is not None:
            self._trial_latencies = [*self._trial_latencies[-LATENCY_WINDOW + 1 :], latency_ms]
            median = float(np.median(self._trial_latencies))
            if len(self._trial_latencies) == LATENCY_WINDOW and median > self._allowed_ms:
                return "latency: the bundle takes longer for a sample in service than this device allows"
        return ""

    def _record_failure(self, runtime: Runtime, error: Exception) -> None:
        log.error("event=prediction_failed bundle=%s error=%r", runtime.digest, str(error))
        hopeless = False
        with self._lock:
            self.n_failed += 1
            if runtime is self._runtime and self._on_trial:
                self._failed_in_a_row += 1
                hopeless = self._failed_in_a_row > MAX_FAILED
                self._on_trial = not hopeless
        if hopeless:
            self._revert(runtime, f"{MAX_FAILED + 1} predictions in a row failed: {error}")

    def _revert(self, failed: Runtime, reason: str) -> None:
        """Put the other slot's bundle into service instead of `failed`.

        The caller has cleared `_on_trial` under the lock.
        """
        with self._switching:
            if failed is not self._runtime:  # another thread has reverted it meanwhile
                return
            try:
                self._slots.revert(reason)
            except (FedgeError, OSError) as error:
                log.error("event=no_way_back reason=%r", str(error))  # noqa: TRY400 - the text is all
                with self._lock:
                    self._on_trial = self._slots.state.trial is not None
                return
            self._reload()

    def _reload(self) -> None:
        """Put the slots' running bundle back into service. The caller holds `_switching`."""
        folder = self._slots.running
        assert folder is not None
        try:
            runtime = load_update(folder, self.how)
        except (FedgeError, OSError) as error:
            reason = f"no-way-back: {error}"
            if reason != self.no_way_back:
                log.error("event=no_way_back reason=%r", reason)  # noqa: TRY400 - the text is all
            self.no_way_back = reason
            return
        self._activate(runtime)


def _find_digest(folder: Path) -> str | None:
    try:
        return compute_bundle_digest(folder)
    except OSError:
        return None
