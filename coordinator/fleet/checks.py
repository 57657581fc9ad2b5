"""Whether a result answers its action: what the schema cannot say. Tensors are checked when they are decoded."""

from __future__ import annotations

import math
from collections.abc import Mapping

from fedge.bundle import MANIFEST
from fedge.errors import ProtocolError
from fedge.messages import (
    Action,
    CandidatesFitted,
    Codec,
    Declined,
    DescribeLabels,
    EnergyFitted,
    Failed,
    FeaturesMeasured,
    FitCandidates,
    FitEnergy,
    FitGate,
    FitMixture,
    FitPool,
    FitWeights,
    Install,
    InstallBundle,
    Installed,
    LabelsDescribed,
    MeanFeatures,
    PrivateShared,
    Profile,
    Profiled,
    Result,
    Role,
    Route,
    Routed,
    SharePrivate,
    Train,
    Trained,
    Trial,
    Tried,
    WeightsFitted,
)
from fedge.task import TaskSpec

ANSWERS: Mapping[type[Action], type[Result]] = {
    Train: Trained,
    Profile: Profiled,
    Trial: Tried,
    FitCandidates: CandidatesFitted,
    FitWeights: WeightsFitted,
    FitEnergy: EnergyFitted,
    FitGate: Installed,
    Install: Installed,
    FitMixture: Installed,
    MeanFeatures: FeaturesMeasured,
    SharePrivate: PrivateShared,
    FitPool: Installed,
    DescribeLabels: LabelsDescribed,
    Route: Routed,
    InstallBundle: Installed,
}


def check(action: Action, result: Result, task: TaskSpec) -> None:  # noqa: PLR0912 - one branch per action
    """Refuse a result that does not answer the action in this task.

    Raises:
        ProtocolError: `wrong-result`, or `no-samples`.
    """
    if isinstance(result, Declined | Failed):
        return
    if not isinstance(result, ANSWERS[type(action)]):
        raise ProtocolError("wrong-result", f"{type(result).__name__} does not answer {type(action).__name__}")
    match action, result:
        case Train(), Trained():
            if result.n_samples == 0:
                raise ProtocolError("no-samples", "an update that was learned from nothing")
            _require(result.update.codec is action.codec, f"codec {result.update.codec} instead of {action.codec}")
            _require(result.cluster in {start.cluster for start in action.starts}, "a start that was not offered")
            measured = (result.loss_before, result.loss_after, result.gradient_norm)
            _require(not action.measure or None not in measured, "no losses, which were asked for")
        case Profile(), Profiled():
            _require(result.extractor == action.extractor.digest, "a profile of another extractor")
            _require(not action.noise or result.halves is None, "halves, which no noise covers")
        case SharePrivate(), PrivateShared():
            _require(result.module.codec is Codec.FLOAT32, f"codec {result.module.codec} instead of float32")
        case FitCandidates(), CandidatesFitted():
            offered = {start.cluster for start in action.experts} | {-1}
            _require(result.cluster in offered, "an expert that was not offered")
            _require(Role.GLOBAL in result.losses, "no losses of the global model")
            _require(bool(action.experts) or Role.EXPERT not in result.losses, "losses of an expert without one")
        case FitWeights(), WeightsFitted():
            _require(len(result.weights) == len(action.pooled), "another number of weights than pooled means")
            for weights, pooled in zip(result.weights, action.pooled, strict=True):
                _require(set(weights) <= set(pooled), "weights of candidates that are not in the pool")
                _require(math.isclose(sum(weights.values()), 1, abs_tol=1e-6), "weights that do not sum to 1")
        case FitEnergy(), EnergyFitted():
            n = len(action.pooled)
            _require(len(result.pooled_losses) == n == len(result.beta_losses), "another number of losses than asked")
        case FitGate(), Installed():
            # fedge.md section 11: a model that the mixture left out
            guards = len(set(result.roles) - set(action.pooled))
            _require(guards <= (action.guard and result.guarded), "a bundle of candidates that are not in the pool")
        case DescribeLabels(), LabelsDescribed():
            _require(result.feature < task.n_classes, f"label {result.feature} of {task.n_classes} classes")
        case InstallBundle(), Installed():
            manifest = action.files.get(MANIFEST)
            _require(manifest is None or manifest.digest == result.bundle_digest, "another bundle than the one sent")
        case _:
            pass


def _require(holds: bool, otherwise: str) -> None:
    if not holds:
        raise ProtocolError("wrong-result", otherwise)
