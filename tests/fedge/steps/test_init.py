"""The contract of every step: what travels, what answers it, what the schema or the action refuses."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from fedge.data.problems.calibration import Calibration
from fedge.data.task import MAX_POOL
from fedge.errors import ConfigError, ProtocolError
from fedge.steps.contract import (
    HARMLESS,
    Action,
    Result,
    decode_action,
    decode_result,
    load_installed_steps,
    make_report,
)
from fedge.steps.descriptions.describe_labels import DescribeLabels, LabelsDescribed
from fedge.steps.descriptions.label_shares import LabelShares, LabelSharesMeasured
from fedge.steps.descriptions.mean_features import MAX_FEATURES, FeaturesMeasured, MeanFeatures
from fedge.steps.descriptions.profile import Profile, Profiled
from fedge.steps.descriptions.route import Route, Routed
from fedge.steps.descriptions.trial import Trial, Tried
from fedge.steps.masked.confirm_sum import ConfirmSum, SumConfirmed
from fedge.steps.masked.mask_keys import KeysMade, MaskKeys
from fedge.steps.masked.mask_shares import MAX_COHORT, MaskShares, SharesMade
from fedge.steps.masked.train_masked import TrainedMasked, TrainMasked
from fedge.steps.masked.unmask import Unmask, Unmasked
from fedge.steps.mixture.fit_candidates import CandidatesFitted, FitCandidates
from fedge.steps.mixture.fit_energy import EnergyFitted, FitEnergy
from fedge.steps.mixture.fit_gate import FitGate
from fedge.steps.mixture.fit_mixture import FitMixture
from fedge.steps.mixture.fit_pool import FitPool
from fedge.steps.mixture.fit_weights import FitWeights, WeightsFitted
from fedge.steps.mixture.install import FineTune, Install, Installed
from fedge.steps.mixture.install_bundle import InstallBundle
from fedge.steps.noise import Privacy
from fedge.steps.personal.train_apfl import TrainApfl
from fedge.steps.personal.train_babu import TrainBabu
from fedge.steps.personal.train_cp import TrainCp
from fedge.steps.personal.train_gh import TrainedGh, TrainGh
from fedge.steps.personal.train_gp import TrainGp
from fedge.steps.personal.train_moon import TrainMoon
from fedge.steps.personal.train_pfedme import TrainPFedMe
from fedge.steps.sgd import Sgd
from fedge.steps.training.share_private import PrivateShared, SharePrivate
from fedge.steps.training.train import MAX_STARTS, Start, Train, Trained, find_kept
from fedge.steps.training.train_dbe import TrainDbe
from fedge.steps.training.train_ditto import TrainDitto
from fedge.steps.training.train_dp import TrainDp, TrainedDp, require_no_statistics
from fedge.steps.training.train_feddyn import TrainFedDyn
from fedge.steps.training.train_rod import TrainRod
from fedge.steps.training.train_scaffold import TrainedScaffold, TrainScaffold
from fedge.tensors.fixed_point import count_bytes
from fedge.tensors.layout import BASE, HEAD, Layout, Selector, TensorInfo
from fedge.wire.messages import BlobRef, Order, Report, Role, decode_message, encode_message
from tests.support.contracts import LAYOUT, REF, TASK, order_of

PLAIN = BlobRef(digest="0" * 64, size_bytes=1)
START = Start(model=REF, cluster=2)
LOSSES = (1.0,) * 16
BETAS = (1.0, 1.0, 1.0)
CALIBRATION = {role: Calibration(temperature=1.0, kappa=0.0) for role in (Role.PRIVATE, Role.GLOBAL)}
POOLED = {Role.PRIVATE: 0.5, Role.GLOBAL: 0.5}

TRAIN = Train(starts=(START,), sgd=Sgd())
UNMEASURED = Train(starts=(START,), sgd=Sgd(), measure=False)
DITTO = TrainDitto(starts=(START,), sgd=Sgd(), proximal_lambda=0.1)
ROD = TrainRod(starts=(START,), sgd=Sgd())
FEDDYN = TrainFedDyn(starts=(START,), sgd=Sgd(), alpha=0.1)
SCAFFOLD = TrainScaffold(starts=(START,), sgd=Sgd())
DBE = TrainDbe(starts=(START,), sgd=Sgd(), global_mean=PLAIN)
BABU = TrainBabu(starts=(START,), sgd=Sgd(), personal=HEAD)
APFL = TrainApfl(starts=(START,), sgd=Sgd(), alpha=0.5)
MOON = TrainMoon(starts=(START,), sgd=Sgd(), mu=1.0, tau=0.5)
CP = TrainCp(starts=(START,), sgd=Sgd(), personal=HEAD, mmd=5.0)
GP = TrainGp(starts=(START,), sgd=Sgd(), personal=HEAD, pull=0.01, decay=0.1)
GH = TrainGh(starts=(START,), sgd=Sgd(), personal=BASE)
PFEDME = TrainPFedMe(starts=(START,), sgd=Sgd(), inner_steps=2, moreau_lambda=1.0, outer_rate=0.1)
PRIVACY = Privacy(clip_norm=1.0, delta=1e-5, participations=3, epsilon=2.0)
DP = TrainDp(starts=(START,), sgd=Sgd(), privacy=PRIVACY)
PROFILE, NOISY = Profile(extractor=REF), Profile(extractor=REF, noise=0.1)
FIT_CANDIDATES = FitCandidates(
    global_model=REF, experts=(Start(model=REF, cluster=1),), initial_model=REF, sgd=Sgd(), local_steps=1
)
NO_EXPERTS = FitCandidates(global_model=REF, initial_model=REF, sgd=Sgd(), local_steps=1)
FIT_WEIGHTS = FitWeights(calibration=CALIBRATION, pooled=(POOLED, POOLED), shrinkage=10.0)
FIT_ENERGY = FitEnergy(calibration=CALIBRATION, pooled=(POOLED, POOLED), shrinkage=20.0)
FIT_GATE = FitGate(calibration=CALIBRATION, pooled=POOLED, shrinkage=20.0, beta=0.5, sgd=Sgd())
INSTALL = Install(model=REF, method="fedavg")
FIT_MIXTURE = FitMixture(experts=(START,), initial_model=REF, sgd=Sgd())
FIT_POOL = FitPool(model=REF, personal=HEAD, kept_by="train", initial=REF, pool=(REF, None), own=1)
SHARE = SharePrivate(kept_by="train_rod")
INSTALL_BUNDLE = InstallBundle(files={"manifest.json": REF, "skeleton.onnx": REF, "part": REF}, release=1)


KEYS = KeysMade(encryption=bytes([9]).ljust(32, b"\0"), masking=bytes(range(32)), signing=bytes(32))
SEALED = {0: bytes(82), 2: bytes(82)}
MASKED = TrainMasked(session="s", roster=PLAIN, train=TRAIN, heaviest=10, sharers=PLAIN, shares=SEALED)
SIGNED = {0: bytes(64), 2: bytes(64)}
CONFIRM = ConfirmSum(session="s", roster=PLAIN, sharers=PLAIN, summed=PLAIN, statements=SIGNED)
UNMASK = Unmask(session="s", roster=PLAIN, confirmations=PLAIN)


def masked(size_bytes: int = 1, **changes: Any) -> TrainedMasked:
    ref = msgspec.structs.replace(PLAIN, size_bytes=size_bytes)
    values: dict[str, Any] = {
        "masked": ref, "statement": bytes(64), "loss_before": 1.0, "loss_after": 0.5, "gradient_norm": 1.0,
    }  # fmt: skip
    return TrainedMasked(**(values | changes))


def unmasked(*seeds: int, keys: tuple[int, ...] = ()) -> Unmasked:
    return Unmasked(seeds=dict.fromkeys(seeds, bytes(33)), keys=dict.fromkeys(keys, bytes(33)))


def trained(**changes: Any) -> Trained:
    values: dict[str, Any] = {
        "update": REF, "n_samples": 3, "cluster": 2, "loss_before": 1.0, "loss_after": 0.5, "gradient_norm": 1.0,
    }  # fmt: skip
    return Trained(**(values | changes))


def corrected(**changes: Any) -> TrainedScaffold:
    return TrainedScaffold(**(msgspec.structs.asdict(trained(**changes)) | {"control": PLAIN}))


def trained_dp(**changes: Any) -> TrainedDp:
    return TrainedDp(**({"update": REF, "n_samples": 3, "cluster": 2} | changes))


def fitted(*roles: Role, cluster: int = -1) -> CandidatesFitted:
    return CandidatesFitted(losses=dict.fromkeys(roles, LOSSES), n_validation=3, cluster=cluster)


def weighed(*weights: dict[Role, float]) -> WeightsFitted:
    return WeightsFitted(weights=weights, n_validation=3)


def energies(n: int, m: int) -> EnergyFitted:
    return EnergyFitted(pooled_losses=(1.0,) * n, beta_losses=(BETAS,) * m, n_validation=3)


def installed(release: int = 1) -> Installed:
    return Installed(release=release)


def profiled(**changes: Any) -> Profiled:
    return Profiled(**({"extractor": REF.digest, "profile": (0.5,), "n_samples": 2} | changes))


GOOD: list[tuple[Action, Result]] = [
    (TRAIN, trained()),
    (TRAIN, trained(val_score=1.0)),
    (TRAIN, trained(val_score=0.0)),
    (UNMEASURED, trained(loss_before=None, loss_after=None, gradient_norm=None)),
    (UNMEASURED, trained()),
    (DITTO, trained()),
    (ROD, trained()),
    (DBE, trained()),
    (BABU, trained()),
    (APFL, trained()),
    (PFEDME, trained()),
    (FEDDYN, trained()),
    (SCAFFOLD, corrected()),
    (MOON, trained()),
    (CP, trained()),
    (GP, trained()),
    (GH, TrainedGh(update=REF, n_samples=3, cluster=2, loss_before=1.0, loss_after=0.5, gradient_norm=1.0)),
    (DP, trained_dp()),
    (MeanFeatures(model=REF), FeaturesMeasured(mean=(0.5, -1.5), n_samples=5)),
    (MeanFeatures(model=REF), FeaturesMeasured(mean=(1 / 3,) * MAX_FEATURES, n_samples=5)),
    (PROFILE, profiled(halves=0.1)),
    (NOISY, profiled()),
    (DescribeLabels(), LabelsDescribed(feature=1, n_samples=3)),
    (DescribeLabels(epsilon=3.0), LabelsDescribed(feature=-1, n_samples=0)),
    (LabelShares(), LabelSharesMeasured(shares=(0.25, 0.75), n_samples=4)),
    (Trial(global_model=REF, expert=REF), Tried(delta=-0.1)),
    (Trial(global_model=REF, expert=REF), Tried()),
    (FIT_CANDIDATES, fitted(Role.GLOBAL, Role.EXPERT, cluster=1)),
    (NO_EXPERTS, fitted(Role.GLOBAL)),
    (FIT_WEIGHTS, weighed({Role.PRIVATE: 0.3, Role.GLOBAL: 0.7}, {Role.GLOBAL: 1.0})),
    (FIT_ENERGY, energies(2, 2)),
    (FIT_GATE, installed()),
    (INSTALL, installed()),
    (Install(model=REF, method="fedper", personal=HEAD, kept_by="train", initial=REF), installed()),
    (FIT_MIXTURE, installed()),
    (SHARE, PrivateShared(module=PLAIN)),
    (FIT_POOL, installed()),
    (Route(gate=REF), Routed(shares=(0.5, 0.5), n_samples=3)),
    (INSTALL_BUNDLE, installed()),
    (MaskKeys(session="s"), KEYS),
    (MaskShares(session="s", roster=PLAIN), SharesMade(sealed=SEALED, commitment=bytes(32))),
    (MASKED, masked()),
    (CONFIRM, SumConfirmed(confirmation=bytes(64))),
    (UNMASK, unmasked(0, keys=(1,))),
]

BAD: list[tuple[Action, Result, str]] = [
    (TRAIN, trained(n_samples=0), "no-samples"),
    (TRAIN, trained(update=PLAIN), "wrong-result"),
    (TRAIN, trained(cluster=-1), "wrong-result"),
    (TRAIN, trained(loss_before=None), "wrong-result"),
    (TRAIN, trained(loss_after=None), "wrong-result"),
    (UNMEASURED, trained(loss_after=None), "wrong-result"),
    (UNMEASURED, trained(gradient_norm=None), "wrong-result"),
    (TRAIN, trained(gradient_norm=None), "wrong-result"),
    *((TRAIN, trained(val_score=score), "wrong-result") for score in (1.01, -0.01)),
    *((MASKED, masked(val_score=score), "wrong-result") for score in (1.01, -0.01)),
    *(
        (action, trained(n_samples=0), "no-samples")
        for action in (DITTO, ROD, DBE, BABU, APFL, PFEDME, FEDDYN, MOON, CP, GP)
    ),
    (SCAFFOLD, corrected(n_samples=0), "no-samples"),
    (SCAFFOLD, msgspec.structs.replace(corrected(), control=REF), "wrong-result"),
    (GH, TrainedGh(update=REF, n_samples=0), "no-samples"),
    (DP, trained_dp(n_samples=0), "no-samples"),
    *(
        (DP, trained_dp(**{figure: 0.5}), "wrong-result")
        for figure in ("loss_before", "loss_after", "gradient_norm", "val_score")
    ),
    (PROFILE, profiled(extractor="1" * 64), "wrong-result"),
    (NOISY, profiled(halves=0.1), "wrong-result"),
    (DescribeLabels(), LabelsDescribed(feature=2, n_samples=3), "wrong-result"),
    *(
        (LabelShares(), LabelSharesMeasured(shares=shares, n_samples=4), "wrong-result")
        for shares in ((1.0,), (0.5, 0.25, 0.25), (0.5, 0.4), (1.0, 1.0))
    ),
    (FIT_CANDIDATES, fitted(Role.GLOBAL, cluster=7), "wrong-result"),
    (FIT_CANDIDATES, fitted(Role.PRIVATE, cluster=1), "wrong-result"),
    (NO_EXPERTS, fitted(Role.GLOBAL, Role.EXPERT), "wrong-result"),
    *(
        (FIT_CANDIDATES, CandidatesFitted(losses={Role.GLOBAL: (0.5,) * n}, n_validation=3), "wrong-result")
        for n in (1, 15, 17)
    ),
    (FIT_WEIGHTS, weighed(POOLED), "wrong-result"),
    (FIT_WEIGHTS, weighed(POOLED, {Role.LOCAL: 1.0}), "wrong-result"),
    (FIT_WEIGHTS, weighed(POOLED, {Role.PRIVATE: 0.9}), "wrong-result"),
    *(
        (FIT_WEIGHTS, msgspec.structs.replace(weighed(POOLED, {Role.GLOBAL: 1.0}), products=products), "wrong-result")
        for products in (
            {Role.LOCAL: {Role.LOCAL: 1.0}},
            {Role.GLOBAL: {Role.GLOBAL: 1.0, Role.PRIVATE: 0.5}},
            {Role.GLOBAL: {Role.GLOBAL: -1.0}},
            {Role.GLOBAL: {Role.GLOBAL: 1.0, Role.PRIVATE: 0.5}, Role.PRIVATE: {Role.GLOBAL: 0.4, Role.PRIVATE: 1.0}},
        )
    ),
    (FIT_ENERGY, energies(1, 2), "wrong-result"),
    (FIT_ENERGY, energies(2, 1), "wrong-result"),
    (INSTALL_BUNDLE, installed(2), "wrong-result"),
    (SHARE, PrivateShared(module=REF), "wrong-result"),
    *(
        (MaskKeys(session="s"), msgspec.structs.replace(KEYS, **changes), "wrong-result")
        for changes in ({"encryption": KEYS.masking}, {"signing": KEYS.masking}, {"masking": bytes([1] + [0] * 31)})
    ),
    *((MASKED, masked(**{name: None}), "wrong-result") for name in ("loss_before", "loss_after", "gradient_norm")),
    (UNMASK, unmasked(0, 1, keys=(1,)), "wrong-result"),
]

MALFORMED: list[tuple[Action | Result, dict[str, Any]]] = [
    (TRAIN, {"starts": ()}),
    (TRAIN, {"starts": (START,) * (MAX_STARTS + 1)}),
    (TRAIN, {"sgd": {"learning_rate": 0.0}}),
    (TRAIN, {"personal": [""]}),
    (TRAIN, {"codec": "pickle"}),
    (trained(), {"n_samples": -1}),
    (trained(), {"val_accuracy": "good"}),
    (trained(), {"update": {"digest": "AB" * 32, "size_bytes": 1}}),
    (trained(), {"update": {"digest": "0" * 64, "size_bytes": 0}}),
    (DITTO, {"proximal_lambda": -1.0}),
    (DBE, {"kappa": -1.0}),
    (APFL, {"alpha": 1.5}),
    (PFEDME, {"inner_steps": 0}),
    (FEDDYN, {"alpha": 0.0}),
    (MOON, {"tau": 0.0}),
    (CP, {"mmd": -1.0}),
    (GP, {"decay": -1.0}),
    (FeaturesMeasured(mean=(0.0,), n_samples=1), {"mean": ()}),
    (FeaturesMeasured(mean=(0.0,), n_samples=1), {"mean": (0.0,) * (MAX_FEATURES + 1)}),
    (NOISY, {"noise": -1.0}),
    (profiled(), {"profile": (1.5,)}),
    (profiled(), {"profile": ()}),
    (DescribeLabels(), {"epsilon": 0.0}),
    (LabelsDescribed(feature=0, n_samples=0), {"feature": -2}),
    (fitted(Role.GLOBAL), {"losses": {"private": []}}),
    (fitted(Role.GLOBAL), {"losses": {"private": ["a"] * 16}}),
    (fitted(Role.GLOBAL), {"losses": {"king": LOSSES}}),
    (FIT_WEIGHTS, {"pooled": ()}),
    (FIT_WEIGHTS, {"shrinkage": 0.0}),
    (FIT_WEIGHTS, {"calibration": {"private": {"temperature": 0.0, "kappa": 0.0}}}),
    (weighed(POOLED), {"weights": ({"private": 1.5},)}),
    (energies(1, 1), {"beta_losses": ((1.0, 1.0),)}),
    (FIT_GATE, {"beta": -1.0}),
    (FIT_GATE, {"pooled": {}}),
    (INSTALL, {"kept_by": "a/b"}),
    (INSTALL, {"fine_tune": {"sgd": {}, "checkpoints": (), "otherwise": 0}}),
    (installed(), {"release": 0}),
    (FIT_MIXTURE, {"top": 0}),
    (FIT_MIXTURE, {"top": 65}),
    (FIT_POOL, {"pool": ()}),
    (FIT_POOL, {"pool": (None,) * (MAX_POOL + 1)}),
    (FIT_POOL, {"denoise": 1.0}),
    (FIT_POOL, {"kept_by": None}),
    (SHARE, {"clip": 0.0}),
    (Routed(shares=(1.0,), n_samples=1), {"shares": (1.5,)}),
    (INSTALL_BUNDLE, {"files": {"manifest.json": REF}}),
    (INSTALL_BUNDLE, {"release": -1}),
    (KEYS, {"masking": b"short"}),
    (KEYS, {"signing": b"short"}),
    (SharesMade(sealed=SEALED, commitment=bytes(32)), {"sealed": {}}),
    (SharesMade(sealed=SEALED, commitment=bytes(32)), {"sealed": {MAX_COHORT: bytes(82)}}),
    (MASKED, {"heaviest": 0}),
    (MASKED, {"shares": {0: bytes(81)}}),
    (MASKED, {"sharers": (0, 1)}),
    (CONFIRM, {"statements": {0: bytes(63)}}),
    (CONFIRM, {"statements": {MAX_COHORT: bytes(64)}}),
    (CONFIRM, {"statements": dict.fromkeys(range(257), bytes(64))}),
    (unmasked(0), {"seeds": {0: bytes(32)}}),
]


def test_the_tables_cover_every_step() -> None:
    assert {type(action) for action, _ in GOOD} == set(load_installed_steps().values())
    checked = {type(action) for action, _, _ in BAD}
    own = {kind for kind in load_installed_steps().values() if kind.check is not Action.check}
    assert own == checked


@pytest.mark.parametrize(("action", "result"), GOOD)
def test_action_and_result_survive_the_wire_and_pass(action: Action, result: Result) -> None:
    order = decode_message(encode_message(order_of(action)), Order)
    assert decode_action(order, load_installed_steps()) == action
    report = decode_message(encode_message(make_report(order, result, 1.0)), Report)
    assert decode_result(report, action) == result
    action.check(result, TASK)
    assert action.passes(30, 40, 15) > 0


@pytest.mark.parametrize(("action", "result", "name"), BAD)
def test_what_the_action_did_not_ask_for_is_refused(action: Action, result: Result, name: str) -> None:
    assert decode_result(make_report(order_of(action), result, 1.0), action) == result
    with pytest.raises(ProtocolError) as caught:
        action.check(result, TASK)
    assert caught.value.name == name


def test_unknown_fields_of_a_result_and_of_its_references_are_ignored() -> None:
    fields = msgspec.to_builtins(trained())
    later = fields | {"update": {**fields["update"], "colour": "red"}, "wings": 2}
    assert msgspec.convert(later, Trained) == trained()


@pytest.mark.parametrize(("value", "changes"), MALFORMED)
def test_what_the_schema_refuses(value: Action | Result, changes: dict[str, Any]) -> None:
    fields = msgspec.to_builtins(value)
    assert msgspec.convert(fields, type(value)) == value
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert(msgspec.to_builtins(fields | changes), type(value))


# ------------------------------------------------------------------------------------- what travels and what stays


def names(layout: Layout) -> list[str]:
    return [info.name for info in layout.tensors]


@pytest.mark.parametrize("personal", [(), HEAD, BASE, ("norm",)])
def test_what_travels_and_what_stays_is_everything(personal: Selector) -> None:
    uploads = Train(starts=(START,), sgd=Sgd(), personal=personal).uploads(trained(), LAYOUT)
    kept = Train.select_kept(personal, LAYOUT)
    assert uploads.keys() == {REF}
    assert sorted([*names(uploads[REF]), *(names(kept) if kept else [])]) == sorted(names(LAYOUT))


KEPT: list[tuple[str, Selector, list[str]]] = [
    ("train", HEAD, ["out.w", "out.b"]),
    ("train", ("norm",), ["mean"]),
    ("train_ditto", (), ["in.w", "out.w", "out.b", "mean"]),
    ("train_rod", (), ["out.w", "out.b"]),
    ("train_dbe", (), ["offset"]),
    ("train_apfl", (), ["in.w", "out.w", "out.b", "mean", "apfl/alpha"]),
    ("train_moon", (), ["in.w", "out.w", "out.b", "mean"]),
    ("train_gh", BASE, ["in.w", "mean"]),
    ("train_pfedme", (), ["in.w", "out.w", "out.b", "mean"]),
]


@pytest.mark.parametrize(("step", "personal", "expected"), KEPT)
def test_what_each_step_keeps_is_what_may_be_shared(step: str, personal: Selector, expected: list[str]) -> None:
    assert names(find_kept(step, personal, LAYOUT)) == expected
    uploads = SharePrivate(kept_by=step, personal=personal).uploads(PrivateShared(module=PLAIN), LAYOUT)
    assert {ref: names(part) for ref, part in uploads.items()} == {PLAIN: expected}


@pytest.mark.parametrize("kind", [TrainCp, TrainGp])
def test_an_order_that_installs_has_the_head_of_the_step_that_kept_something(kind: type[Train]) -> None:
    final = Install(model=PLAIN, kept_by=kind.STEP, method="m")
    assert final.find_head_class({kind.STEP: kind, Train.STEP: Train}) == kind.HEAD_CLASS != ""
    assert final.find_head_class({}) == ""
    assert Install(model=PLAIN, method="m").find_head_class({kind.STEP: kind}) == ""
    assert Install(model=PLAIN, kept_by=Train.STEP, method="m").find_head_class({Train.STEP: Train}) == ""


def test_the_offset_is_as_long_as_the_features() -> None:
    (offset,) = TrainDbe.select_kept((), LAYOUT).tensors
    assert offset.shape == (4,)


@pytest.mark.parametrize("step", [ROD, DBE])
def test_without_a_head_it_says_so(step: Train) -> None:
    with pytest.raises(ConfigError, match="last layer"):
        step.select_kept((), Layout(tensors=(TensorInfo(name="w", shape=(2, 2)),)))


@pytest.mark.parametrize(
    ("step", "personal"), [("train", ()), ("train_babu", HEAD), ("profile", HEAD), ("dance", HEAD)]
)
def test_what_keeps_nothing_is_refused(step: str, personal: Selector) -> None:
    with pytest.raises(ConfigError, match=f"step {step} keeps nothing"):
        find_kept(step, personal, LAYOUT)


def test_only_steps_that_the_device_knows_keep_something() -> None:
    with pytest.raises(ConfigError):
        find_kept("train", HEAD, LAYOUT, {})


# -------------------------------------------------------------------------------------------------- what it costs


def test_more_work_costs_more() -> None:
    n = (30, 40, 15)
    assert TRAIN.passes(*n) < msgspec.structs.replace(TRAIN, starts=(START, START)).passes(*n)
    longer = msgspec.structs.replace(TRAIN, sgd=Sgd(steps=20), head_steps=3)
    assert longer.passes(*n) - TRAIN.passes(*n) == 3 * 13 * 30
    assert TRAIN.passes(*n) < min(DITTO.passes(*n), ROD.passes(*n))
    tuned = Install(model=REF, method="m", fine_tune=FineTune(sgd=Sgd(), checkpoints=(10, 0), otherwise=5))
    assert tuned.passes(*n) - INSTALL.passes(*n) == 3 * 10 * 32
    assert Trial(global_model=REF, expert=REF).passes(*n) == 2 * 15
    assert FIT_GATE.passes(*n) > FIT_WEIGHTS.passes(*n) == FIT_ENERGY.passes(*n)


def test_two_steps_need_no_torch() -> None:
    assert {name for name, step in load_installed_steps().items() if not step.TRAINS} == {"route", "install_bundle"}


def test_an_update_with_noise_is_all_that_differential_privacy_lets_out() -> None:
    assert DP.find_unaccounted() == {}
    assert set(TrainedDp.REVEALS.values()) <= HARMLESS
    assert "update" in TRAIN.find_unaccounted()
    assert not DP.timed


def test_a_network_with_running_statistics_cannot_learn_with_noise() -> None:
    require_no_statistics(Layout(tensors=LAYOUT.tensors[:3]))
    with pytest.raises(ConfigError, match=r"\(mean\), as batch normalisation.*GroupNorm"):
        require_no_statistics(LAYOUT)


def test_a_masked_update_has_exactly_the_bytes_of_the_network() -> None:
    n = count_bytes(LAYOUT)
    assert MASKED.uploads(masked(size_bytes=n), LAYOUT) == {masked(size_bytes=n).masked: None}
    for other in (n - 4, n + 4):
        with pytest.raises(ProtocolError, match="wrong-result"):
            MASKED.uploads(masked(size_bytes=other), LAYOUT)
    assert MASKED.passes(30, 40, 15) == TRAIN.passes(30, 40, 15)


def test_a_device_of_fedge_0_2_is_not_asked_to_choose_by_the_training_loss() -> None:
    asked = msgspec.structs.replace(TRAIN, choose="training_loss")
    assert (TRAIN.recipe_version, asked.recipe_version, order_of(asked).version) == (0, 1, 1001)
