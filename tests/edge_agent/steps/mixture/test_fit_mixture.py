"""SCMoE-PFL on a device: the bundle computes what scmoe_pfl.md section 11 says, and nothing but the report leaves."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from benchmarks import default_method
from benchmarks.steps import ablated_mixture
from benchmarks.steps.ablated_mixture import FitAblatedMixture
from deploy import load
from edge_agent.device.device import Device
from edge_agent.learning import evaluation, gate, private_model
from edge_agent.steps.mixture import fit_mixture
from fedge.bundle.formula import compute_gate_features
from fedge.bundle.manifest import read_bundle
from fedge.models import build
from fedge.steps.mixture.fit_mixture import FitMixture
from fedge.steps.mixture.install import Installed
from fedge.steps.sgd import Sgd
from fedge.steps.training.train import Start
from fedge.tensors.layout import flatten, from_bytes
from fedge.wire.messages import Role
from tests.support.orders import TASK, Blobs, device, device_data, order, roles_of, worker


@pytest.fixture
def blobs() -> Blobs:
    return Blobs()


def mixture_of(blobs: Blobs, experts: int | tuple[Start, ...] = 3, **changes: object) -> FitMixture:
    starts = experts
    if isinstance(experts, int):
        starts = tuple(Start(model=blobs.model(10 + k, scale=4.0), cluster=k) for k in range(experts))
    fields = {"experts": starts, "initial_model": blobs.model(0), "sgd": Sgd(steps=20)} | changes
    return FitMixture(**fields)


def fitted(tmp_path, blobs, data=None, **changes):
    action = mixture_of(blobs, **changes)
    own = device(tmp_path, action, blobs, data)
    return outcome(tmp_path, own, fit_mixture.run(own, action))


def ablated(tmp_path, blobs, data=None, learns="validation", offset="untrained", alone=None, **changes):
    """As `fitted`, by the step of the benchmark's rows."""
    rows = {"learns": learns, "offset": offset, "alone": alone}
    action = default_method.ablated(FitAblatedMixture, mixture_of(blobs, **changes), **rows)
    own = device(tmp_path, action, blobs, data)
    return outcome(tmp_path, own, ablated_mixture.run(own, action))


def outcome(tmp_path, own, result):
    assert isinstance(result, Installed), result
    return own, result, load(tmp_path / "bundles" / "1")


def looking(tmp_path, blobs, data=None) -> Device:
    """What a step may use, for a look at models."""
    return device(tmp_path, mixture_of(blobs), blobs, data)


def logits_of_candidates(own, tmp_path, x):
    """(M, n, C) by torch from the parts of the bundle."""
    folder = tmp_path / "bundles" / "1"
    parts = [from_bytes((folder / c.part.file_name).read_bytes()) for c in read_bundle(folder).manifest.candidates]
    return np.stack([own.network.compute_logits(flatten(part, own.layout), x) for part in parts])


def gate_scores(tmp_path, x):
    folder = tmp_path / "bundles" / "1"
    tensors = from_bytes((folder / read_bundle(folder).manifest.gate.file_name).read_bytes())
    hidden = np.maximum(compute_gate_features(x) @ tensors["gate.hidden.weight"].T + tensors["gate.hidden.bias"], 0)
    return hidden @ tensors["gate.out.weight"].T + tensors["gate.out.bias"]


def printed_formula(s, logits, top=2):
    """Sections 11.2 and 11.3 by a loop: index 0 is private, always selected; top experts by prior times energy."""
    p = []
    for n in range(len(s)):
        log_a = s[n] + np.logaddexp.reduce(logits[:, n], axis=1)
        best = sorted(range(1, len(log_a)), key=lambda k: (-log_a[k], k))[:top]
        selected = [0, *sorted(best)]
        alpha = np.exp(log_a[selected] - np.logaddexp.reduce(log_a[selected]))
        softmax = [np.exp(row - np.logaddexp.reduce(row)) for row in logits[selected, n]]
        p.append(sum(a * q for a, q in zip(alpha, softmax, strict=True)))
    return np.array(p)


@pytest.mark.parametrize("top", [1, 2, 8])
def test_the_bundle_is_the_printed_formula(tmp_path, blobs, top) -> None:
    own, result, runtime = fitted(tmp_path, blobs, top=top)
    assert roles_of(tmp_path, result) == (Role.PRIVATE, Role.EXPERT, Role.EXPERT, Role.EXPERT)
    x = own.data.x_val
    expected = printed_formula(gate_scores(tmp_path, x), logits_of_candidates(own, tmp_path, x), top)
    found = runtime.predict(x)
    np.testing.assert_allclose(found.probabilities, expected, atol=1e-5)
    assert (np.count_nonzero(found.weights, axis=1) == min(top, 3) + 1).all()
    assert np.abs(gate_scores(tmp_path, x)).max() > 0.01, "the gate has learned"


def test_identity_all_selected_adds_unnormalised_exponentials(tmp_path, blobs) -> None:
    """11.3: with everything selected and no offsets p = softmax_c(logsumexp_k(s_k + l_kc))."""
    own, _, runtime = fitted(tmp_path, blobs, experts=2)
    x = own.data.x_val
    joined = np.logaddexp.reduce(
        gate_scores(tmp_path, x).T[:, :, None] + logits_of_candidates(own, tmp_path, x), axis=0
    )
    expected = np.exp(joined - np.logaddexp.reduce(joined, axis=1, keepdims=True))
    np.testing.assert_allclose(runtime.predict(x).probabilities, expected, atol=1e-5)


def test_with_few_validation_samples_the_gate_is_untrained_and_offsets_level_the_energies(tmp_path, blobs) -> None:
    data = device_data(m=9)
    own, _, runtime = fitted(tmp_path, blobs, data, experts=2)
    assert (gate_scores(tmp_path, data.x_val) == 0).all()
    energies = runtime.predict(data.x_val).energies
    np.testing.assert_allclose(energies.mean(axis=0), 0, atol=1e-5)
    raw = np.logaddexp.reduce(logits_of_candidates(own, tmp_path, data.x_val), axis=2)
    np.testing.assert_allclose(energies.T, raw - raw.mean(axis=1, keepdims=True), atol=1e-4)


def test_offsets_never_leaves_raw_energies(tmp_path, blobs) -> None:
    data = device_data(m=9)
    own, _, runtime = fitted(tmp_path, blobs, data, experts=2, energy_offset="never")
    raw = np.logaddexp.reduce(logits_of_candidates(own, tmp_path, data.x_val), axis=2)
    np.testing.assert_allclose(runtime.predict(data.x_val).energies.T, raw, atol=1e-4)


def test_an_untrained_gate_leaves_all_to_the_energies(tmp_path, blobs) -> None:
    """17.3: equal priors, however many samples there are; with offsets where an untrained gate has them (11.4)."""
    own, _, runtime = ablated(tmp_path, blobs, learns="untrained", offset="never")
    x = own.data.x_val
    assert (gate_scores(tmp_path, x) == 0).all()
    expected = printed_formula(np.zeros((len(x), 4)), logits_of_candidates(own, tmp_path, x))
    np.testing.assert_allclose(runtime.predict(x).probabilities, expected, atol=1e-5)
    _, _, levelled = ablated(tmp_path / "offset", blobs, learns="untrained")
    np.testing.assert_allclose(levelled.predict(x).energies.mean(axis=0), 0, atol=1e-5)


def test_the_gate_learns_from_what_the_order_says(tmp_path, blobs) -> None:
    """Other validation or other training labels change the gates that learn from them, and no others."""
    data = device_data()
    others = {
        "validation": replace(data, y_val=(data.y_val + 1) % 3),
        "training": replace(data, y_train=(data.y_train + 1) % 3),
    }
    for learns, changes in [
        ("validation", {"validation"}),
        ("training", {"training"}),
        ("training+validation", {"validation", "training"}),
        ("untrained", set()),
    ]:
        found = {}
        for name, d in {"as it is": data, **others}.items():
            folder = tmp_path / learns / name
            one = (Start(model=blobs.model(10, scale=4.0)), Start(model=blobs.model(11, scale=4.0)))
            ablated(folder, blobs, d, experts=one, learns=learns, sgd=Sgd(steps=0), private_start="initial")
            found[name] = read_bundle(folder / "bundles" / "1").manifest.gate.digest
        assert {name for name in others if found[name] != found["as it is"]} == changes


def test_uniform_is_the_plain_mean_of_probabilities(tmp_path, blobs) -> None:
    own, _, runtime = ablated(tmp_path, blobs, experts=2, learns="uniform")
    logits = logits_of_candidates(own, tmp_path, own.data.x_val)
    softmax = np.exp(logits - np.logaddexp.reduce(logits, axis=2, keepdims=True))
    np.testing.assert_allclose(runtime.predict(own.data.x_val).probabilities, softmax.mean(axis=0), atol=1e-5)


def test_without_the_gate_the_experts_are_averaged_and_there_is_no_private_model(tmp_path, blobs) -> None:
    own, result, runtime = ablated(tmp_path, blobs, experts=2, alone="average")
    assert roles_of(tmp_path, result) == (Role.EXPERT,)
    mean = private_model.average_models([own.fetch_model(blobs.model(10 + k, scale=4.0)) for k in range(2)])
    logits = own.network.compute_logits(mean, own.data.x_val)
    expected = np.exp(logits - np.logaddexp.reduce(logits, axis=1, keepdims=True))
    np.testing.assert_allclose(runtime.predict(own.data.x_val).probabilities, expected, atol=1e-5)


def test_without_the_gate_the_best_expert_can_serve_alone(tmp_path, blobs) -> None:
    """Section 17.2: the highest validation accuracy, then the lowest cross-entropy; nothing is mixed into it."""
    own, result, runtime = ablated(tmp_path, blobs, experts=5, alone="best")
    assert roles_of(tmp_path, result) == (Role.EXPERT,)
    models = [own.fetch_model(blobs.model(10 + k, scale=4.0)) for k in range(5)]
    ranks = [evaluation.rank_model(own, model, "accuracy") for model in models]
    assert ranks[0] != max(ranks), "the first one is not the best by chance"
    logits = own.network.compute_logits(models[ranks.index(max(ranks))], own.data.x_val)
    expected = np.exp(logits - np.logaddexp.reduce(logits, axis=1, keepdims=True))
    np.testing.assert_allclose(runtime.predict(own.data.x_val).probabilities, expected, atol=1e-5)


def test_the_private_model_can_serve_alone(tmp_path, blobs) -> None:
    """Section 17.1: the same that the mixture has; a device without one mixes its experts."""
    own, result, runtime = ablated(tmp_path / "alone", blobs, alone="private")
    assert roles_of(tmp_path / "alone", result) == (Role.PRIVATE,)
    fitted(tmp_path / "mixed", blobs)
    alone, mixed = (
        read_bundle(tmp_path / name / "bundles" / "1").manifest.candidates[0] for name in ("alone", "mixed")
    )
    assert alone.part == mixed.part
    np.testing.assert_allclose(runtime.predict(own.data.x_val).weights, 1)
    _, without, _ = ablated(tmp_path / "without", blobs, device_data(0, 0), alone="private")
    assert set(roles_of(tmp_path / "without", without)) == {Role.EXPERT}


def test_the_private_model_learns_from_what_the_order_says(tmp_path, blobs) -> None:
    """Other labels of the not sensitive samples change a private model on all data, and none on sensitive data."""
    data = device_data()
    other = replace(data, y_train=np.where(data.sensitive, data.y_train, (data.y_train + 1) % 3))
    private = {}
    for what in ("sensitive", "all"):
        for name, d in (("data", data), ("other", other)):
            folder = tmp_path / what / name
            fitted(folder, blobs, d, private_data=what, private_start="initial")
            private[what, name] = read_bundle(folder / "bundles" / "1").manifest.candidates[0].part.digest
    assert private["sensitive", "data"] == private["sensitive", "other"]
    assert private["all", "data"] != private["all", "other"]


def test_an_own_start_is_the_best_expert_by_accuracy(tmp_path, blobs) -> None:
    own = looking(tmp_path, blobs)
    ranks = [evaluation.rank_model(own, own.fetch_model(blobs.model(k, scale=4.0)), "accuracy") for k in range(6)]
    best = max(range(6), key=lambda k: (ranks[k][0], ranks[k][1], -k))
    action = mixture_of(
        blobs,
        experts=tuple(Start(model=blobs.model(k, scale=4.0), cluster=k) for k in range(6)),
        sgd=Sgd(steps=0),
    )
    fit_mixture.run(own, action)
    manifest = read_bundle(tmp_path / "bundles" / "1").manifest
    assert manifest.candidates[0].part == manifest.candidates[1 + best].part


def test_a_device_without_data_is_a_consumer_of_experts(tmp_path, blobs) -> None:
    nothing = device_data(0, 0)
    _, result, _ = fitted(tmp_path, blobs, nothing, experts=1)
    assert roles_of(tmp_path, result) == (Role.EXPERT,)
    alone = worker(tmp_path / "e", nothing).execute(order(mixture_of(blobs, experts=())), blobs).result
    assert "nothing to predict with" in alone.reason


def test_unknown_experts_are_thinned_to_the_near_best(tmp_path, blobs) -> None:
    own = looking(tmp_path, blobs, device_data(40, 100))
    experts = [own.fetch_model(blobs.model(k, scale=4.0)) for k in range(8)]
    kept = fit_mixture.select_near_best(own, experts)
    correct = [evaluation.rank_model(own, model, "accuracy")[0] for model in experts]
    chosen = [next(k for k, e in enumerate(experts) if e is model) for model in kept]
    assert 1 <= len(chosen) <= 3
    assert chosen == sorted(chosen)
    assert all(correct[k] >= max(correct) - 2 for k in chosen)
    left_out = [c for k, c in enumerate(correct) if k not in chosen]
    assert len(chosen) == 3 or all(c < max(correct) - 2 for c in left_out)


def test_the_gate_prefers_the_candidate_that_is_right(tmp_path, blobs) -> None:
    """Selection in training: with top 1 a wrong expert loses its place, and its gradient with it."""
    x = np.random.default_rng(0).normal(size=(60, 6)).astype(np.float32)
    log_p = np.log(np.array([[0.4, 0.9, 0.1]])).repeat(60, axis=0)
    weights = gate.train_gate(x, log_p, np.zeros((60, 3)), seed=0, decay=1e-3, experts=[1, 2], top=1)
    hidden = np.maximum(x @ weights.hidden_weight.T + weights.hidden_bias, 0)
    scores = hidden @ weights.out_weight.T + weights.out_bias
    assert (scores[:, 1] > scores[:, 0]).all()
    assert np.abs(weights.out_weight[2]).max() == pytest.approx(0, abs=1e-6), "never selected: no gradient"


def test_selected_keeps_the_lower_index_on_a_tie() -> None:
    scores = torch.tensor([[0.0, 1.0, 1.0, 1.0], [9.0, 1.0, 2.0, 3.0]])
    kept = gate._select_top(scores, torch.tensor([1, 2, 3]), 2)
    assert torch.isinf(kept).tolist() == [[False, False, False, True], [False, True, False, False]]


def test_models_of_the_layout_only(tmp_path, blobs) -> None:
    own = worker(tmp_path)
    result = own.execute(order(mixture_of(blobs, experts=(Start(model=blobs.file(b"junk")),))), blobs).result
    assert "malformed" in result.reason
    assert build.make_initial_model(TASK, 0)[0] == own.network.layout
