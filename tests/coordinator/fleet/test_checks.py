"""Results that the schema allows and the action does not."""

from __future__ import annotations

import msgspec
import pytest

from coordinator.fleet.checks import ANSWERS, check
from fedge.errors import ProtocolError
from fedge.messages import (
    Action,
    BlobRef,
    Calibration,
    CandidatesFitted,
    Codec,
    Declined,
    DescribeLabels,
    EnergyFitted,
    Failed,
    FitCandidates,
    FitEnergy,
    FitGate,
    FitWeights,
    Install,
    InstallBundle,
    Installed,
    KeepHead,
    LabelsDescribed,
    PrivateShared,
    Profile,
    Profiled,
    Result,
    Role,
    Route,
    Routed,
    Sgd,
    SharePrivate,
    Start,
    Train,
    Trained,
    Trial,
    Tried,
    WeightsFitted,
)
from fedge.task import TaskSpec

TASK = TaskSpec(name="t", classes=("a", "b"), input_shape=(2,), model="mlp")
REF = BlobRef(digest="0" * 64, size_bytes=1, codec=Codec.INT8)
LOSSES = (1.0,) * 16
CALIBRATION = {role: Calibration(temperature=1.0, kappa=0.0) for role in (Role.PRIVATE, Role.GLOBAL)}
POOLED = {Role.PRIVATE: 0.5, Role.GLOBAL: 0.5}

TRAIN = Train(starts=(Start(model=REF, cluster=2),), sgd=Sgd())
UNMEASURED = Train(starts=(Start(model=REF, cluster=2),), sgd=Sgd(), measure=False)
FIT_CANDIDATES = FitCandidates(
    global_model=REF, experts=(Start(model=REF, cluster=1),), initial_model=REF, sgd=Sgd(), local_steps=1
)
NO_EXPERTS = FitCandidates(global_model=REF, initial_model=REF, sgd=Sgd(), local_steps=1)
FIT_WEIGHTS = FitWeights(calibration=CALIBRATION, pooled=(POOLED, POOLED), shrinkage=10.0)
FIT_ENERGY = FitEnergy(calibration=CALIBRATION, pooled=(POOLED, POOLED), shrinkage=20.0)
FIT_GATE = FitGate(calibration=CALIBRATION, pooled=POOLED, shrinkage=20.0, beta=0.5, sgd=Sgd(), release=1)
INSTALL_BUNDLE = InstallBundle(files={"manifest.json": REF, "skeleton.onnx": REF, "part": REF}, release=1)


def trained(**changes: object) -> Trained:
    values: dict[str, object] = {
        "update": REF, "n_samples": 3, "cluster": 2, "loss_before": 1.0, "loss_after": 0.5, "gradient_norm": 1.0,
    }  # fmt: skip
    return Trained(**(values | changes))  # type: ignore[arg-type]


def installed(*roles: Role, guarded: bool = False) -> Installed:
    return Installed(bundle_digest="0" * 64, roles=roles, max_abs_diff=0.0, guarded=guarded)


GOOD: list[tuple[Action, Result]] = [
    (TRAIN, trained()),
    (UNMEASURED, trained(loss_before=None, loss_after=None, gradient_norm=None)),
    (UNMEASURED, trained()),
    (Profile(extractor=REF), Profiled(extractor=REF.digest, profile=(0.5,), halves=0.1, n_samples=2)),
    (Profile(extractor=REF, noise=0.1), Profiled(extractor=REF.digest, profile=(0.5,), n_samples=2)),
    (Trial(global_model=REF, expert=REF), Tried(delta=-0.1)),
    (FIT_CANDIDATES, CandidatesFitted(losses={Role.GLOBAL: LOSSES, Role.EXPERT: LOSSES}, n_validation=3, cluster=1)),
    (NO_EXPERTS, CandidatesFitted(losses={Role.GLOBAL: LOSSES}, n_validation=0)),
    (FIT_WEIGHTS, WeightsFitted(weights=({Role.PRIVATE: 0.3, Role.GLOBAL: 0.7}, {Role.GLOBAL: 1.0}), n_validation=3)),
    (FIT_ENERGY, EnergyFitted(pooled_losses=(1.0, 2.0), beta_losses=((1.0, 1.0, 1.0),) * 2, n_validation=3)),
    (FIT_GATE, installed(Role.PRIVATE, Role.GLOBAL)),
    (FIT_GATE, installed(Role.PRIVATE, Role.GLOBAL, Role.LOCAL, guarded=True)),
    (Install(global_model=REF, release=1, method="fedavg"), installed(Role.GLOBAL)),
    (Route(gate=REF), Routed(shares=(0.5, 0.5), n_samples=3)),
    (INSTALL_BUNDLE, installed(Role.GLOBAL)),
    (DescribeLabels(), LabelsDescribed(feature=1, n_samples=3)),
    (DescribeLabels(), LabelsDescribed(feature=-1, n_samples=0)),
    (SharePrivate(keep=KeepHead()), PrivateShared(module=BlobRef(digest="0" * 64, size_bytes=1))),
]

BAD: list[tuple[Action, Result, str]] = [
    (Profile(extractor=REF), Profiled(extractor="1" * 64, profile=(0.5,), n_samples=1), "wrong-result"),
    (
        Profile(extractor=REF, noise=0.1),
        Profiled(extractor=REF.digest, profile=(0.5,), halves=0.1, n_samples=2),
        "wrong-result",
    ),
    (TRAIN, trained(n_samples=0), "no-samples"),
    (TRAIN, trained(update=BlobRef(digest="0" * 64, size_bytes=1, codec=Codec.FLOAT32)), "wrong-result"),
    (TRAIN, trained(cluster=-1), "wrong-result"),
    (TRAIN, trained(loss_before=None), "wrong-result"),
    (TRAIN, trained(loss_after=None), "wrong-result"),
    (TRAIN, trained(gradient_norm=None), "wrong-result"),
    (FIT_CANDIDATES, CandidatesFitted(losses={Role.GLOBAL: LOSSES}, n_validation=3, cluster=7), "wrong-result"),
    (FIT_CANDIDATES, CandidatesFitted(losses={Role.PRIVATE: LOSSES}, n_validation=3, cluster=1), "wrong-result"),
    (NO_EXPERTS, CandidatesFitted(losses={Role.GLOBAL: LOSSES, Role.EXPERT: LOSSES}, n_validation=3), "wrong-result"),
    (FIT_WEIGHTS, WeightsFitted(weights=(POOLED,), n_validation=3), "wrong-result"),
    (FIT_WEIGHTS, WeightsFitted(weights=(POOLED, {Role.LOCAL: 1.0}), n_validation=3), "wrong-result"),
    (FIT_WEIGHTS, WeightsFitted(weights=(POOLED, {Role.PRIVATE: 0.9}), n_validation=3), "wrong-result"),
    (FIT_ENERGY, EnergyFitted(pooled_losses=(1.0,), beta_losses=((1.0,) * 3,) * 2, n_validation=3), "wrong-result"),
    (FIT_ENERGY, EnergyFitted(pooled_losses=(1.0, 1.0), beta_losses=((1.0,) * 3,), n_validation=3), "wrong-result"),
    (FIT_GATE, installed(Role.LOCAL), "wrong-result"),
    (FIT_GATE, installed(Role.EXPERT, Role.LOCAL, guarded=True), "wrong-result"),
    (msgspec.structs.replace(FIT_GATE, guard=False), installed(Role.LOCAL, guarded=True), "wrong-result"),
    (INSTALL_BUNDLE, Installed(bundle_digest="1" * 64, roles=(Role.GLOBAL,), max_abs_diff=0.0), "wrong-result"),
    (SharePrivate(keep=KeepHead()), PrivateShared(module=REF), "wrong-result"),
    (DescribeLabels(), LabelsDescribed(feature=2, n_samples=3), "wrong-result"),
]


@pytest.mark.parametrize(("action", "result"), GOOD)
def test_an_answer_to_the_action_passes(action: Action, result: Result) -> None:
    check(action, result, TASK)


@pytest.mark.parametrize(("action", "result", "name"), BAD)
def test_what_the_action_did_not_ask_for_is_refused(action: Action, result: Result, name: str) -> None:
    with pytest.raises(ProtocolError) as caught:
        check(action, result, TASK)
    assert caught.value.name == name


@pytest.mark.parametrize(("action", "right"), GOOD)
@pytest.mark.parametrize("result", [result for _, result in GOOD])
def test_no_type_of_result_answers_another_action(action: Action, right: Result, result: Result) -> None:
    if type(result) is not ANSWERS[type(action)]:
        with pytest.raises(ProtocolError, match="wrong-result"):
            check(action, result, TASK)


@pytest.mark.parametrize("action", [action for action, _ in GOOD])
def test_a_device_may_always_decline_or_fail(action: Action) -> None:
    check(action, Declined(reason="hot"), TASK)
    check(action, Failed(reason="broken"), TASK)


def test_every_action_has_an_answer() -> None:
    assert set(ANSWERS) == set(Action.__args__)
