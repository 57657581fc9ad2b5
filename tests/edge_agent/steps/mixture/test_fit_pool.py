"""PM-MoE stage 2: worked numbers and invariants of pm_moe.md section 12, and the order on a device."""

from __future__ import annotations

import itertools

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from torch import nn

from deploy import load
from edge_agent.steps.mixture import fit_pool as stage2
from edge_agent.steps.mixture.fit_pool import compute_confidences, denoise_pool, make_gate_network, select_weights
from export.pool import compute_gate_logits, select_top_weights
from fedge.models.training import Network
from fedge.steps.contract import Failed
from fedge.steps.mixture.fit_pool import FitPool
from fedge.steps.mixture.install import Installed
from fedge.steps.sgd import Sgd
from fedge.steps.training.train import Start, Train, find_kept
from fedge.steps.training.train_dbe import TrainDbe
from fedge.steps.training.train_ditto import TrainDitto
from fedge.steps.training.train_rod import TrainRod
from fedge.system.files import find_highest_release
from fedge.tensors.layout import BASE, HEAD, to_bytes
from fedge.wire.messages import Role
from tests.support.orders import TASK, Blobs, D, device_data, manifest_of, order, roles_of, worker


def test_worked_energies() -> None:
    wanted = [1.173147, 0.953262, 0.804178, 0.693147, 1.202915]
    others = [(4, 3), (-3, 4), (4, -3), (0, 0), (6, 8)]
    outputs = np.array([[(3, 4), *others]], float)
    np.testing.assert_allclose(compute_confidences(outputs, 0)[1:], wanted, atol=5e-7)


def test_worked_mass_on_experts_that_are_right() -> None:
    """Eq. 14: five experts, each right with p = 0.6, and a gate that prefers those 1 + a = 2 times over.

    Bound: p (1 + a) M / (M + a (1 + (M - 1) p)), by Jensen; exact: over all 32 ways of being right.
    """
    right = np.array(list(itertools.product([0.0, 1.0], repeat=5)))
    chances = (0.6**right * 0.4 ** (1 - right)).prod(axis=1)
    alpha = 2**right / (2**right).sum(axis=1, keepdims=True)
    mass = (select_top_weights(alpha, 5) * right).sum(axis=1)
    assert chances @ mass == pytest.approx(0.724617, abs=5e-7)
    bound = 0.6 * 2 * 5 / (5 + 1 + 4 * 0.6)
    assert bound == pytest.approx(0.714286, abs=5e-7)
    best = (select_top_weights(alpha, 1) * right).sum(axis=1) > 0
    assert chances @ best == pytest.approx(1 - 0.4**5), "with k = 1 it takes one that is right where there is one"


def test_worked_way_from_outputs_to_logits() -> None:
    """Four heads, the own one first, one sample; a dropped expert has no weight, however large its z is."""
    outputs = np.array([[(3, 4), (4, 3), (-3, 4), (4, -3)]], float)
    keep = denoise_pool(compute_confidences(outputs, 0), 0, 0.5, np.ones(4, bool))
    assert keep.tolist() == [True, True, True, False]
    z = np.where(keep, [[1.0, 2.0, 0.5, 3.0]], -np.inf)
    alpha = np.exp(z) / np.exp(z).sum()
    np.testing.assert_allclose(alpha, [[0.231224, 0.628532, 0.140244, 0]], atol=5e-7)
    paper, anchored = (select_top_weights(alpha, 2, own=own, keep=keep) for own in (None, 0))
    np.testing.assert_allclose(paper @ outputs[0], [[3.207799, 2.810491]], atol=5e-7)
    np.testing.assert_allclose(anchored, [[0.268941, 0.731059, 0, 0]], atol=5e-7)
    np.testing.assert_allclose(anchored @ outputs[0], [[3.731059, 3.268941]], atol=5e-7)


finite = st.floats(-5, 5, allow_subnormal=False)


@given(arrays(np.float64, (4, 5, 3), elements=finite), st.floats(0.1, 10), st.integers(1, 4))
def test_scaling_an_expert_changes_no_confidence(outputs, factor, which) -> None:
    norms = np.linalg.norm(outputs, axis=2)
    outputs[norms < 1e-6] = 1.0
    scaled = outputs.copy()
    scaled[:, which] *= factor
    np.testing.assert_allclose(compute_confidences(scaled, 0), compute_confidences(outputs, 0), atol=1e-9)


def test_worked_denoising_and_its_count() -> None:
    keep = denoise_pool(np.array([1, 1, 1, 1, 1.5, 1]), 1, 0.5, np.ones(6, bool))
    assert keep.tolist() == [True, True, True, False, True, False]
    assert (~denoise_pool(np.arange(20.0), 0, 0.2, np.ones(20, bool))).sum() == 3
    equal = denoise_pool(np.ones(6), 5, 0.4, np.ones(6, bool))
    assert equal.tolist() == [True, True, True, False, False, True], "ties: the highest other indices go"


@given(st.lists(st.floats(-3, 3), min_size=1, max_size=12), st.floats(0, 0.99), st.data())
def test_the_own_expert_survives_and_the_right_number_goes(values, ratio, data) -> None:
    m = len(values)
    own = data.draw(st.integers(0, m - 1))
    present = np.array(data.draw(st.lists(st.booleans(), min_size=m, max_size=m)))
    present[own] = True
    keep = denoise_pool(np.array(values), own, ratio, present)
    others = int(present.sum()) - 1
    assert keep[own]
    assert not keep[~present].any()
    assert keep.sum() == 1 + others - int(np.floor(ratio * others + 1e-9))


def test_what_is_not_finite_never_survives() -> None:
    outputs = np.ones((2, 3, 2))
    outputs[0, 2, 1] = np.nan
    conf = compute_confidences(outputs, 0)
    assert conf[2] == -np.inf
    assert denoise_pool(conf, 0, 0.0, np.ones(3, bool)).tolist() == [True, True, False]
    assert denoise_pool(np.array([-np.inf, 1]), 1, 0.2, np.ones(2, bool)).tolist() == [False, True]
    four = denoise_pool(np.array([-np.inf, 0, 1, 2]), 3, 0.5, np.ones(4, bool))
    assert four.tolist() == [False, False, True, True], "it is missing, so one of the two others goes"


def test_the_gate_starts_orthogonal_and_anchored_on_the_own_expert() -> None:
    torch.manual_seed(0)
    network = make_gate_network(64, 17, 3)
    for layer in [m for m in network if isinstance(m, nn.Linear)][:-1]:
        w = layer.weight.detach()
        square = w @ w.T if w.shape[0] <= w.shape[1] else w.T @ w
        np.testing.assert_allclose(square, np.eye(len(square)), atol=1e-5)
    last = network[-1]
    assert last.bias.tolist() == [4.0 * (k == 3) for k in range(17)]
    with torch.no_grad():
        last.weight.zero_()
    network.eval()
    keep = torch.arange(17) != 5
    alpha = torch.softmax(network(torch.zeros(1, 64)).masked_fill(~keep, -torch.inf), dim=1)
    assert alpha[0, 3].item() == pytest.approx(0.784, abs=5e-4), "e^4 / (e^4 + 15)"


def test_the_gate_of_512_inputs_and_20_experts_has_the_size_of_the_specification() -> None:
    """pm_moe.md section 8."""
    sizes = [p.numel() for p in make_gate_network(512, 20, None).parameters()]
    assert sum(sizes) == 134_164
    layers = [weight + bias for weight, bias in zip(sizes[::2], sizes[1::2], strict=True)]
    assert layers == [128 * 512 + 128, 33_024, 32_896, 129 * 20]


def test_the_head_of_512_features_has_the_bytes_of_the_specification() -> None:
    """pm_moe.md section 8: 512 -> 10 with bias, float32, in a file of its own; 20 clients."""
    task = msgspec.structs.replace(TASK, classes=tuple("0123456789"), model_options={"hidden": 512})
    head = Network(task).layout.select(HEAD)
    assert head.n_params == 5_130
    s = 4 * head.n_params
    assert (s, 20 * s, 19 * s, 20 * 19 * s) == (20_520, 410_400, 389_880, 7_797_600)
    file = to_bytes({t.name: np.zeros(t.shape, np.float32) for t in head.tensors})
    assert s < len(file) < s + 250


@pytest.mark.parametrize("own", [None, 2])
def test_torch_and_numpy_select_alike_and_the_rest_gets_no_gradient(own) -> None:
    z = torch.randn(30, 6, generator=torch.Generator().manual_seed(0)).requires_grad_()
    keep = torch.tensor([True, True, True, False, True, True])
    w = select_weights(z, keep, 3, own)
    alpha = torch.softmax(z.detach().masked_fill(~keep, -torch.inf), dim=1).double().numpy()
    np.testing.assert_allclose(w.detach(), select_top_weights(alpha, 3, own=own, keep=keep.numpy()), atol=1e-6)
    w.square().sum().backward()
    assert (z.grad[:, 3] == 0).all()


# ------------------------------------------------------------------------------------------------ on a device

BASES = {
    "fedper": (Train, {"personal": HEAD}),
    "lg-fedavg": (Train, {"personal": BASE}),
    "fedrod": (TrainRod, {}),
    "dbe": (TrainDbe, {}),
    "ditto": (TrainDitto, {"proximal_lambda": 0.1}),
}
POOLED = ("fedper", "lg-fedavg", "fedrod", "dbe")


class Device:
    """A device that has trained once with something kept, and modules of others."""

    def __init__(self, home, base, data=None):
        self.blobs = Blobs()
        self.worker = worker(home, data or device_data(40, 30))
        self.home = home
        self.kind, self.fields = BASES[base]
        if base == "dbe":
            self.fields = {"global_mean": self.blobs.put({"mean": np.zeros(D, np.float32)})}
        self.personal = self.fields.get("personal", ())
        self.layout = find_kept(self.kind.STEP, self.personal, self.worker.network.layout)
        self.initial = self.blobs.model(1)
        self.shared = self.blobs.model(1, self.personal)
        self.rng = np.random.default_rng(0)

    def train(self):
        action = self.kind(starts=(Start(model=self.shared),), sgd=Sgd(steps=30), initial=self.initial, **self.fields)
        return self.worker.execute(order(action, 1, seed=1), self.blobs).result

    def kept(self):
        here = self.worker.make_device(order(self.action([None]), 2), self.blobs)
        return here.load_kept(self.kind.STEP, self.layout)

    def module(self, scale=0.3):
        return self.blobs.put(
            {t.name: (scale * self.rng.normal(size=t.shape)).astype(np.float32) for t in self.layout.tensors}
        )

    def action(self, pool, own=0, **changes):
        fields = {
            "model": self.shared, "personal": self.personal, "kept_by": self.kind.STEP, "initial": self.initial,
            "pool": tuple(pool), "own": own, "epochs": 4, "guard": False,
        }  # fmt: skip
        return FitPool(**(fields | changes))

    def fit(self, pool, own=0, **changes):
        return self.worker.execute(order(self.action(pool, own, **changes), 2, seed=2), self.blobs).result

    def predict(self, x):
        return load(self.home / "bundles" / str(find_highest_release(self.home))).predict(x)


@pytest.mark.parametrize("base", POOLED)
@pytest.mark.parametrize("preset", ["anchored", "paper"])
def test_every_base_ends_in_a_bundle_over_the_pool(tmp_path, base, preset) -> None:
    device = Device(tmp_path, base)
    device.train()
    before = {path: path.read_bytes() for path in (tmp_path / "kept" / "r" / "personal").rglob("*") if path.is_file()}
    assert before
    mine = device.module()
    result = device.fit([device.module(), mine, None, device.module(), device.module()], own=1, preset=preset)
    assert isinstance(result, Installed), result
    assert roles_of(tmp_path, result) == (Role.EXPERT, Role.PRIVATE, Role.EXPERT, Role.EXPERT, Role.EXPERT)
    assert manifest_of(tmp_path, result).max_abs_diff < 1e-4
    found = device.predict(device.worker.data.x_val)
    assert (found.weights[:, 2] == 0).all(), "a client that is gone"
    if preset == "anchored":
        assert (found.weights[:, 1] > 0).all()
    assert before == {path: path.read_bytes() for path in before}, "stage 2 changes nothing of stage 1"


@pytest.mark.parametrize("base", POOLED)
def test_a_pool_of_equal_modules_predicts_like_the_own_one(tmp_path, base) -> None:
    device = Device(tmp_path, base)
    device.train()
    same = device.blobs.put(device.kept().get_tensors())
    assert isinstance(device.fit([same, same, same], own=2), Installed)
    here = device.worker.make_device(order(device.action([same]), 2), device.blobs)
    model = device.worker.make_personal_model(here.fetch_model(device.initial))
    logits = here.network.compute_logits(model, device.worker.data.x_val)
    expected = np.exp(logits - np.logaddexp.reduce(logits, axis=1, keepdims=True))
    np.testing.assert_allclose(device.predict(device.worker.data.x_val).probabilities, expected, atol=1e-5)


def test_unfit_modules_count_as_missing(tmp_path) -> None:
    device = Device(tmp_path, "fedper")
    device.train()
    junk = device.blobs.file(b"junk")
    nan = device.blobs.file(to_bytes({t.name: np.full(t.shape, np.nan, np.float32) for t in device.layout.tensors}))
    result = device.fit([device.module(), junk, nan, device.module(), device.module()])
    assert isinstance(result, Installed)
    weights = device.predict(device.worker.data.x_val).weights
    assert (weights[:, 1:3] == 0).all()


@pytest.mark.parametrize("base", POOLED)
def test_a_module_whose_output_overflows_is_dropped_and_spoils_no_gate(tmp_path, base) -> None:
    device = Device(tmp_path, base)
    device.train()
    huge = device.blobs.put({t.name: np.full(t.shape, 3e38, np.float32) for t in device.layout.tensors})
    result = device.fit([device.module(), huge, device.module(), device.module()])
    assert isinstance(result, Installed), result
    assert len(roles_of(tmp_path, result)) == 4
    weights = device.predict(device.worker.data.x_val).weights
    assert np.isfinite(weights).all()
    assert (weights[:, 1] == 0).all()


def test_where_the_gate_diverges_the_own_module_serves(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stage2, "LEARNING_RATE", 1e30)
    device = Device(tmp_path, "fedper")
    device.train()
    result = device.fit([device.module() for _ in range(5)])
    assert isinstance(result, Installed), result
    assert roles_of(tmp_path, result) == (Role.PRIVATE,)


def test_alone_in_the_pool_the_own_module_serves(tmp_path) -> None:
    device = Device(tmp_path, "fedper")
    device.train()
    for pool in ([device.module()], [device.module(), None, None], [device.module(), device.module()]):
        assert roles_of(tmp_path, device.fit(pool)) == (
            Role.PRIVATE,
        )  # the last: k = 1, no gradient for an anchored gate


def test_without_an_own_module_it_fails(tmp_path) -> None:
    device = Device(tmp_path, "fedper")
    result = device.fit([device.module()] * 3)
    assert isinstance(result, Failed)
    assert "no module of its own" in result.reason


def test_what_has_no_pool_is_refused(tmp_path) -> None:
    device = Device(tmp_path, "ditto")
    device.train()
    assert "step train_ditto keeps cannot be pooled" in device.fit([device.module()] * 3).reason


def test_the_guard_serves_the_own_module_where_the_mixture_is_worse(tmp_path, monkeypatch) -> None:
    device = Device(tmp_path, "fedper")
    device.train()

    def wrong(worker, modules, pool, x):
        return np.roll(np.eye(3)[worker.data.y_val], 1, axis=1)

    monkeypatch.setattr(stage2, "_predict", wrong)
    result = device.fit([device.module()] * 3, guard=True)
    assert roles_of(tmp_path, result) == (Role.PRIVATE,)


def test_the_bundle_has_the_gate_that_was_trained(tmp_path) -> None:
    """The gate learns where the own module is good: its weight rises against a gate that has not learned."""
    device = Device(tmp_path, "fedper", device_data(80, 40))
    device.train()
    pool = [device.module(3.0), *(device.module(3.0) for _ in range(4))]
    device.fit(pool, epochs=0, preset="paper", denoise=0.0)
    untrained = device.predict(device.worker.data.x_val).weights[:, 0].mean()
    device.fit(pool, epochs=60, preset="paper", denoise=0.0)
    assert device.predict(device.worker.data.x_val).weights[:, 0].mean() > untrained + 0.1


def test_gate_logits_are_the_networks() -> None:
    torch.manual_seed(1)
    network = make_gate_network(6, 4, None).eval()
    layers = [layer for layer in network if isinstance(layer, nn.Linear)]
    from export import PoolGate

    gate = PoolGate(
        tuple(layer.weight.detach().numpy() for layer in layers),
        tuple(layer.bias.detach().numpy() for layer in layers),
        np.zeros(6),
        np.ones(6),
    )
    x = torch.randn(5, 6)
    np.testing.assert_allclose(compute_gate_logits(gate, x.numpy()), network(x).detach(), atol=1e-5)
