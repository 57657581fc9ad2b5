"""Evaluates the devices' models on test samples that neither they nor the coordinator have seen.

During a run, the model that a device would use now is evaluated in torch. At the end every device's installed bundle
predicts through `deploy`, so that the main figure is that of what devices really run. Only this module of the
coordinator imports `deploy` (see the import contract).
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import msgspec
import numpy as np
from numpy.typing import NDArray

import deploy
from coordinator.aggregation.protection import Protection
from coordinator.methods.installation import get_next_release
from coordinator.methods.method import Method
from coordinator.methods.server.assembling import load_global_mixture
from coordinator.methods.state import State
from coordinator.simulation.federation import Federation, Samples
from coordinator.simulation.own_metric import Metric, compute_own
from coordinator.simulation.reports.outcome import MOST_COUNTED, SPENT, DeviceOutcome, Score, compute_score
from edge_agent.device.worker import Worker
from edge_agent.privacy.dp_ledger import Ledger
from export import Mixture, parity, write_bundle
from fedge.data import preprocessing
from fedge.data.problems.calibration import PLAIN
from fedge.data.problems.scores import Counts
from fedge.data.task import TaskSpec
from fedge.errors import ConfigError
from fedge.models.training import CPU, Network
from fedge.tasks.shares import convert_targets
from fedge.tensors.layout import Layout, Model
from fedge.wire.messages import Role

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch

    from coordinator.fleet.simulated.fleet import SimulatedFleet
    from deploy.inference.prediction import Prediction

SERVER: Final = "server"
"""Folder beside those of the devices, with the global model's bundle."""
CHUNK: Final = 256
"""Most samples in a pass of a mixture's networks, to limit the memory."""


def compute_epsilon_spent(homes: Iterable[Path], protection: Protection) -> dict[str, float]:
    """Return the largest epsilon that training has spent on a device, under the detail's name; empty without dp.

    `homes`: the devices' homes.
    """
    if not protection.dp:
        return {}
    spent = (Ledger(home).compute_spent(protection.dp_delta) for home in homes)
    return {f"{SPENT} (delta {protection.dp_delta:g})": max(spent, default=0.0)}


def predict_classes(bundle: Path, x: NDArray[Any]) -> NDArray[np.integer]:
    """Return the classes (n,) that a bundle in ONNX Runtime predicts for raw samples (n, ...)."""
    return deploy.load(bundle).predict(x).class_index


def predict_samples(bundle: Path, x: NDArray[Any]) -> Prediction:
    """Return what a bundle in ONNX Runtime answers for raw samples (n, ...)."""
    return deploy.load(bundle).predict(x)


def predict_mixture(task: TaskSpec, layout: Layout, mixture: Mixture, x: NDArray[np.float32]) -> list[NDArray[Any]]:
    """Return what a mixture answers for model inputs (n, *input_shape), computed as its bundle is checked."""
    parts = [parity.compute_expected(task, layout, mixture, x[k : k + CHUNK])[:-2] for k in range(0, len(x), CHUNK)]
    return [np.concatenate(each) for each in zip(*parts, strict=True)]


def write_global_bundle(
    federation: Federation, method: Method[Any], state: State, fleet: SimulatedFleet, home: Path
) -> None:
    """Write a bundle of experts with a gate for the server itself, to home/server/bundles, if the method has them."""
    mixture, apart = _find_global_mixture(federation, method, state, fleet), federation.server_data
    if mixture is None or apart is None:
        return
    release = get_next_release(fleet)
    write_bundle(
        home / SERVER / "bundles" / str(release),
        task=federation.task,
        layout=federation.layout,
        mixture=mixture,
        validation=apart[0],
        release=release,
        method=method.name,
        metrics={},
    )


def _find_global_mixture(
    federation: Federation, method: Method[Any], state: State, fleet: SimulatedFleet
) -> Mixture | None:
    """Return the method's experts and gate (FedCoE's Eq. 4); None if its global model is a single one."""
    if (given := method.get_global_model(state)).gate is None:
        return None
    return load_global_mixture(federation.task, given, lambda ref: fleet.get(ref, federation.layout), fleet.get_tensors)


class Evaluation:
    """An evaluation, with the devices' test samples and the network. `seconds`: time spent on it so far.

    `max_abs_diff`: the largest difference of a probability between torch and ONNX Runtime, after `evaluate_finally`.
    `counts`: the bundles' confusion matrix, and `failure`: why the user's own `metric` gave no figures, both after
    `evaluate_finally`. `ids`: the measured devices. `on_validation`: whether to use validation samples in place of test
    samples; devices without any are then left out.
    """

    def __init__(
        self,
        federation: Federation,
        workers: Mapping[str, Worker],
        ids: Sequence[str],
        processor: torch.device = CPU,
        *,
        on_validation: bool = False,
        metric: Metric | None = None,
    ) -> None:
        self.seconds = self.max_abs_diff = 0.0
        self.counts: Counts | None = None
        self.failure = ""
        self._metric = metric
        self._federation = federation
        self._workers = {i: workers[i] for i in ids if not on_validation or len(workers[i].data.y_val)}
        self._network = Network(federation.task, processor)
        self._shares = {i: federation.shares[i] for i in self._workers}
        self._tests: dict[str, Samples] = {
            i: worker.data.validation
            if on_validation
            else (preprocessing.preprocess(federation.task, self._shares[i].x_test), self._read_test(i))
            for i, worker in self._workers.items()
        }

    def evaluate_now(self, method: Method[Any], state: State, fleet: SimulatedFleet) -> dict[str, Score]:
        """Score the model that each device would use now, the served model combined with what the device keeps."""
        with self._add_time():
            return {
                i: self._score(worker.make_personal_model(model), self._tests[i])
                for i, (worker, model) in self._load_served(method, state, fleet).items()
            }

    def evaluate_globally(self, method: Method[Any], state: State, fleet: SimulatedFleet) -> float | None:
        """Compute the score on the global test set of experts with a gate (FedCoE's Eq. 4), if there are any.

        Otherwise compute the mean score of the models that the devices are served.
        """
        samples = self._federation.global_test
        if samples is None:
            return None
        with self._add_time():
            (x, y), task, layout = samples, self._federation.task, self._federation.layout
            if (mixture := _find_global_mixture(self._federation, method, state, fleet)) is not None:
                return compute_score(task.problem, predict_mixture(task, layout, mixture, x), y).value
            served = [method.get_model(state, i) for i in self._workers]
            each = {ref.digest: ref for ref in served}
            reached = {d: self._score(fleet.get(ref, layout), samples).value for d, ref in each.items()}
            return float(np.mean([reached[ref.digest] for ref in served]))

    def evaluate_finally(self, method: Method[Any], state: State, fleet: SimulatedFleet) -> dict[str, DeviceOutcome]:
        """Score each device's installed bundle in ONNX Runtime or, without a bundle, the model that it would use."""
        scores: dict[str, Score] = {}
        private: dict[str, float] = {}
        with self._add_time():
            for i in self._shares.keys() & state.installed.keys():
                runtime = deploy.load(self._workers[i].home / "bundles" / str(state.installed[i].release))
                said = runtime.predict(self._shares[i].x_test)
                scores[i] = self._score_bundle(i, said)
                own = [candidate.role is Role.PRIVATE for candidate in runtime.manifest.candidates]
                if any(own):
                    private[i] = float(said.weights[:, own].mean())
                self.max_abs_diff = max(self.max_abs_diff, runtime.manifest.max_abs_diff)
        if len(scores) < len(self._shares):
            scores = self.evaluate_now(method, state, fleet) | scores
        return {
            i: DeviceOutcome(
                id=i,
                group=self._shares[i].group,
                n_train=len(self._shares[i].y_train),
                score=scores[i],
                trained=state.participations.get(i, 0),
                bundle=i in state.installed,
                release=str(state.installed[i].release) if i in state.installed else None,
                late_joiner=i in self._federation.late_joiners,
                private_weight=private.get(i),
                problem="" if i in state.installed else fleet.explain_problem(i),
            )
            for i in sorted(scores)
        }

    def _load_served(self, method: Method[Any], state: State, fleet: SimulatedFleet) -> dict[str, tuple[Worker, Model]]:
        """Load the served models, each decoded once for all its devices."""
        models: dict[str, Model] = {}
        served = {}
        for i, worker in self._workers.items():
            ref = method.get_model(state, i)
            if ref.digest not in models:
                models[ref.digest] = fleet.get(ref, self._federation.layout)
            served[i] = (worker, models[ref.digest])
        return served

    def _score(self, model: Model, samples: Samples) -> Score:
        (x, y), problem = samples, self._federation.task.problem
        answers = problem.calibrate(self._network.predict(model, x, y), PLAIN, np.zeros(()))
        return compute_score(problem, problem.mix([answers], np.ones((len(x), 1))), y, thorough=False)

    def _score_bundle(self, i: str, said: Prediction) -> Score:
        """Score a device's bundle, count its answers, and add the figures of the user's own metric."""
        problem, y = self._federation.task.problem, self._read_test(i)
        found = compute_score(problem, said.answers, y)
        more = problem.count_answers(said.answers, y)
        if more is not None and len(more.rows) <= MOST_COUNTED:
            self.counts = more if self.counts is None else self.counts.add(more)
        if self._metric is None or self.failure:
            return found
        try:
            own = compute_own(self._metric, said, self._shares[i].y_test)
        except ConfigError as error:  # the run is worth more than this figure
            self.failure = str(error)
            return found
        return msgspec.structs.replace(found, metrics=found.metrics | own)

    def _read_test(self, i: str) -> NDArray[Any]:
        """Return the targets of a device's test samples in the type that training takes."""
        return convert_targets(self._federation.task, self._shares[i].y_test)

    @contextmanager
    def _add_time(self) -> Iterator[None]:
        began = time.perf_counter()
        yield
        self.seconds += time.perf_counter() - began
