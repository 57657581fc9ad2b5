import textwrap
import types
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from torch import nn

from fedge.data.task import TaskSpec
from fedge.errors import ConfigError, ProtocolError
from fedge.models import build
from fedge.models import network as models
from fedge.models.training import Network, Trainer
from fedge.steps.sgd import Sgd
from fedge.tensors.layout import HEAD, Model, TensorInfo, unflatten

TASK = TaskSpec(name="digits", classes=tuple("0123456789"), input_shape=(1, 8, 8), model="mlp")


def with_batch_norm() -> nn.Module:
    return nn.Sequential(OrderedDict(lin=nn.Linear(2, 3), norm=nn.BatchNorm1d(3)))


def test_layout_lists_parameters_then_buffers_then_nothing_else() -> None:
    module = with_batch_norm()
    module.register_buffer("scratch", torch.zeros(5), persistent=False)
    assert models.make_layout(module).tensors == (
        TensorInfo(name="lin.weight", shape=(3, 2), layer="linear"),
        TensorInfo(name="lin.bias", shape=(3,), layer="linear"),
        TensorInfo(name="norm.weight", shape=(3,), layer="norm"),
        TensorInfo(name="norm.bias", shape=(3,), layer="norm"),
        TensorInfo(name="norm.running_mean", shape=(3,), kind="buffer", layer="norm"),
        TensorInfo(name="norm.running_var", shape=(3,), kind="buffer", layer="norm"),
        TensorInfo(name="norm.num_batches_tracked", shape=(), kind="counter", layer="norm"),
    )


def test_a_frozen_parameter_is_a_buffer_and_a_shared_one_counts_once() -> None:
    module = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))
    module[1].weight = module[0].weight
    assert [t.kind for t in models.make_layout(module).tensors] == ["param"]
    module[0].weight.requires_grad_(False)
    assert [t.kind for t in models.make_layout(module).tensors] == ["buffer"]


class Early(nn.Module):
    """Registers its head first; `after`: what becomes of the head's output."""

    def __init__(self, after: nn.Module | None = None, *, bias: bool = True) -> None:
        super().__init__()
        self.head = nn.Linear(4, 3, bias=bias)
        self.body = nn.Sequential(nn.Linear(6, 4), nn.ReLU(), nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 4))
        self.after = after or nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.after(self.head(self.body(x)))


class Twice(Early):
    """Its head is no last layer alone: the features have passed it, too."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(nn.functional.pad(self.head(self.body(x)), (0, 3))))


class Skipping(Early):
    """Something is added to what the head gives."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(x)) + x[:, :3]


TOY = TaskSpec(name="toy", classes=("a", "b", "c"), input_shape=(6,), model="networks_of_a_user:net")


@pytest.fixture
def user(own_module: Callable[..., types.ModuleType]) -> types.ModuleType:
    return own_module("networks_of_a_user")


def test_the_head_is_the_layer_that_gives_the_logits_wherever_it_is_registered(user: types.ModuleType) -> None:
    user.net = lambda _: Early()
    layout, first = build.make_initial_model(TOY, 3)
    assert [info.name for info in layout.select(HEAD).tensors] == ["head.weight", "head.bias"]
    network = Network(TOY)
    assert network.layout == layout
    x = np.random.default_rng(0).normal(size=(5, 6)).astype(np.float32)
    f, logits = network.compute_features(first, x), network.compute_logits(first, x)
    tensors = unflatten(first, layout)
    weight, bias = (tensors[info.name].astype(np.float64) for info in layout.select(HEAD).tensors)
    np.testing.assert_allclose(f @ weight.T + bias, logits, atol=1e-6)
    head = network.get_slice("head")
    np.testing.assert_array_equal(network.weights[head].numpy(), first.params[head])
    assert network.weights[head].numel() == 4 * 3 + 3
    Trainer(network, x, np.arange(5) % 3, Sgd(), np.random.default_rng(0), moves="head").run(3)
    moved = {n for n, t in unflatten(network.dump(), layout).items() if (t != tensors[n]).any()}
    assert moved == {"head.weight", "head.bias"}


@pytest.mark.parametrize(
    "net",
    [
        Early(nn.LogSoftmax(dim=1)),
        Early(nn.ReLU()),
        Early(nn.Linear(3, 3, bias=False)),
        Early(bias=False),
        Twice(),
        Skipping(),
    ],
)
def test_a_network_without_such_a_layer_is_not_split_at_another_one(net: nn.Module, user: types.ModuleType) -> None:
    user.net = lambda _: net
    layout, first = build.make_initial_model(TOY, 3)
    with pytest.raises(ConfigError, match="its output the logits; change the network, or choose a method"):
        layout.select(HEAD)
    with pytest.raises(ConfigError, match="cannot be split"):
        Network(TOY).compute_features(first, np.zeros((2, 6), np.float32))
    assert layout.without(()) == layout


def test_a_network_that_does_not_take_the_tasks_inputs_is_refused_before_anything_runs(user: types.ModuleType) -> None:
    user.net = lambda _: nn.Sequential(nn.Linear(5, 4), nn.Linear(4, 3))
    with pytest.raises(ConfigError, match=r"networks_of_a_user:net does not take inputs \(n, 6\)"):
        build.make_initial_model(TOY, 3)


def not_finite() -> nn.Module:
    net = Early()
    nn.init.constant_(net.head.bias, float("nan"))
    return net


def sharing() -> nn.Module:
    net = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 3))
    net[1].weight.data = net[0].weight.data
    return net


def named(name: str) -> nn.Module:
    net = Early()
    net.register_buffer(name, torch.zeros(3))
    return net


def with_more_state() -> nn.Module:
    class Counted(Early):
        def get_extra_state(self) -> dict[str, int]:
            return {"seen": 3}

    return Counted()


def exits() -> nn.Module:
    raise SystemExit("no licence")


@pytest.mark.parametrize(
    ("net", "told"),
    [
        (lambda: nn.Sequential(nn.LazyLinear(4), nn.Linear(4, 3)), "tensor 0.weight is lazy, it has no shape"),
        (lambda: torch.jit.script(Early()), "it was made by torch.jit.script: give the torch.nn.Module"),
        (lambda: nn.Sequential(torch.jit.script(nn.ReLU())), "its layer 0 was made by torch.jit.script"),
        (lambda: nn.DataParallel(Early()), "it was made by torch.nn.DataParallel: give the torch.nn.Module"),
        (lambda: torch.compile(Early()), "it was made by torch.compile: give the torch.nn.Module"),
        (lambda: nn.Sequential(nn.Linear(6, 3), nn.ParameterList([torch.zeros(0, 4)])), "shape (0, 4) has no elements"),
        (lambda: Early().double(), "tensor head.weight is torch.float64; a network may have float32"),
        (lambda: nn.Sequential(nn.Linear(6, 3), nn.Embedding(3, 2)).half(), "tensor 0.weight is torch.float16"),
        (sharing, "tensors 0.weight and 1.weight share their memory, but are two: assign the parameter itself"),
        (lambda: nn.Linear(6, 3, device="meta"), "tensor weight is on meta: make the network on the cpu"),
        (lambda: named("x"), "tensor x is called as the input or the output of graphs (x, logits): give it another"),
        (lambda: named("logits"), "tensor logits is called as the input or the output of graphs"),
        (with_more_state, "its state has _extra_state, a dict, and only tensors are sent: keep it in a buffer"),
        (not_finite, "begins with NaN or infinity in head.bias: initialise these weights"),
        (exits, "fails with SystemExit: no licence (test_network.py, line"),
    ],
)
@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")
def test_what_cannot_be_sent_by_name_is_refused_in_a_sentence(
    net: Callable[[], nn.Module], told: str, user: types.ModuleType
) -> None:
    user.net = net
    with pytest.raises(ConfigError) as refused:
        build.make_initial_model(TOY, 3)
    assert told in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("answer", [dict, list, lambda *_: None])
def test_a_network_that_answers_with_no_tensor_has_no_head(
    answer: Callable[[object], object], user: types.ModuleType
) -> None:
    class Other(Early):
        def forward(self, x: torch.Tensor) -> object:
            return answer([("logits", super().forward(x))])

    user.net = lambda _: Other()
    layout, _ = build.make_initial_model(TOY, 3)
    assert not [info for info in layout.tensors if info.layer == "head"]


def test_load_after_dump_gives_an_equal_network_with_its_statistics() -> None:
    trained = with_batch_norm()
    trained(torch.randn(8, 2))
    layout = models.make_layout(trained)
    model = models.dump_model(trained, layout)
    assert model.counters.tolist() == [1]
    fresh = with_batch_norm()
    models.load_model(fresh, model, layout)
    for name, tensor in trained.state_dict().items():
        assert torch.equal(fresh.state_dict()[name], tensor)
    x = torch.randn(4, 2)
    assert torch.equal(fresh.eval()(x), trained.eval()(x))


def test_dump_is_a_copy_and_load_takes_read_only_vectors() -> None:
    module = with_batch_norm()
    layout = models.make_layout(module)
    model = models.dump_model(module, layout)
    before = model.params.copy()
    with torch.no_grad():
        module.lin.weight += 1
    assert np.array_equal(model.params, before)
    for vector in (model.params, model.buffers, model.counters):
        vector.setflags(write=False)
    models.load_model(module, model, layout)
    assert np.array_equal(models.dump_model(module, layout).params, before)


def test_load_keeps_the_tensors_that_an_optimiser_holds() -> None:
    module = with_batch_norm()
    layout = models.make_layout(module)
    weight = module.lin.weight
    zero = Model(np.zeros(15, np.float32), np.zeros(6, np.float32), np.zeros(1, np.int64))
    models.load_model(module, zero, layout)
    assert module.lin.weight is weight
    assert weight.requires_grad
    assert not weight.any()


def test_a_diverged_network_is_refused() -> None:
    module = with_batch_norm()
    layout = models.make_layout(module)
    with torch.no_grad():
        module.lin.bias[0] = torch.nan
    with pytest.raises(ProtocolError) as caught:
        models.dump_model(module, layout)
    assert caught.value.name == "not-finite"


def test_other_types_are_the_users_error() -> None:
    with pytest.raises(ConfigError, match="float64"):
        models.make_layout(nn.Linear(2, 2).double())
    module = nn.Linear(2, 2)
    module.register_buffer("mask", torch.ones(2, dtype=torch.bool))
    with pytest.raises(ConfigError, match="mask"):
        models.make_layout(module)


def test_initial_depends_on_the_seed_alone() -> None:
    torch.manual_seed(1)
    layout, first = build.make_initial_model(TASK, seed=3)
    expected_next = torch.rand(1, generator=torch.Generator().manual_seed(1))
    assert torch.equal(torch.rand(1), expected_next)  # the global generator was left alone
    _, again = build.make_initial_model(TASK, seed=3)
    _, other = build.make_initial_model(TASK, seed=4)
    assert layout.n_params == 2410
    assert np.array_equal(first.params, again.params)
    assert not np.array_equal(first.params, other.params)


def test_the_users_factory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_factories.py").write_text(
        "from torch import nn\n"
        "def net(task):\n    return nn.Sequential(nn.Flatten(), nn.Linear(64, task.n_classes))\n"
        "def nothing(task):\n    return None\n"
        "def mobile(task):\n"
        "    import torchvision\n    return torchvision.models.mobilenet_v3_small(num_classes=task.n_classes)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    layout, _ = build.make_initial_model(msgspec.structs.replace(TASK, model="my_factories:net"), seed=0)
    assert layout.n_params == 650
    with pytest.raises(ConfigError, match="NoneType"):
        build.make_network(msgspec.structs.replace(TASK, model="my_factories:nothing"))
    mobile = msgspec.structs.replace(TASK, model="my_factories:mobile", input_shape=(3, 32, 32))
    layout, _ = build.make_initial_model(mobile, seed=0)
    assert layout.select_kind("counter")
    assert [info.name for info in layout.select(HEAD).tensors] == ["classifier.3.weight", "classifier.3.bias"]


def test_a_method_puts_a_module_into_the_place_of_the_head(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is made of the head with its first weights, also of given ones and in a network that is nothing else."""
    (tmp_path / "my_heads.py").write_text(
        textwrap.dedent("""
        from torch import nn

        class Twice(nn.Module):
            def __init__(self, head):
                super().__init__()
                self.head, self.own = head, nn.Linear(head.in_features, head.out_features)

            def forward(self, f):
                return self.head(f) + self.own(f)

        def broken(head):
            return head.nothing
        """)
    )
    monkeypatch.syspath_prepend(tmp_path)
    wide = TASK.with_head_class("my_heads:Twice")
    assert (wide.code, wide.with_head_class("")) == (("my_heads:Twice",), TASK)
    (plain_layout, plain), (layout, model) = (build.make_initial_model(task, 3) for task in (TASK, wide))
    before, found = unflatten(plain, plain_layout), unflatten(model, layout)
    head = plain_layout.select(HEAD).tensors[0].name.removesuffix(".weight")
    assert found.keys() - {f"{head}.own.weight", f"{head}.own.bias"} == {
        name.replace(f"{head}.", f"{head}.head.") for name in before
    }
    for name, own in before.items():
        np.testing.assert_array_equal(found[name.replace(f"{head}.", f"{head}.head.")], own)
    with pytest.raises(ConfigError, match="my_heads:broken fails with AttributeError"):
        build.make_network(TASK.with_head_class("my_heads:broken"))
    headless = msgspec.structs.replace(TASK, model="tests.support.networks:without_head", input_shape=(6,))
    with pytest.raises(ConfigError, match="its last layer must be linear"):
        build.make_network(headless.with_head_class("valve"))


def test_an_unknown_model_lists_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"mlp, cnn, cnn_fedavg, resnet_moe, .*, or package\.module:factory"):
        build.make_network(msgspec.structs.replace(TASK, model="transformer"))


def test_each_tensor_says_of_which_kind_its_layer_is(user: types.ModuleType) -> None:
    user.net = lambda _: nn.Sequential(
        nn.Unflatten(1, (1, 6)), nn.Conv1d(1, 2, 3), nn.BatchNorm1d(2), nn.Flatten(), nn.Linear(8, 4), nn.LayerNorm(4),
        nn.GRUCell(4, 2), nn.Linear(2, 3),
    )  # fmt: skip
    layout, _ = build.make_initial_model(TOY, 3)
    of_layer = {info.name.rpartition(".")[0]: info.layer for info in layout.tensors}
    assert of_layer == {"1": "conv", "2": "norm", "4": "linear", "5": "norm", "6": "", "7": "head"}
    norm = layout.select(("norm",))
    assert [info.name for info in norm.tensors] == [
        "2.weight", "2.bias", "5.weight", "5.bias", "2.running_mean", "2.running_var", "2.num_batches_tracked",
    ]  # fmt: skip
    assert {info.kind for info in norm.tensors} == {"param", "buffer", "counter"}
    others = layout.without(("norm",))
    assert {*norm.tensors, *others.tensors} == set(layout.tensors)


def test_the_head_comes_first_where_a_layer_is_of_two_kinds(user: types.ModuleType) -> None:
    user.net = lambda _: nn.Sequential(nn.Linear(6, 4), nn.Linear(4, 3))
    layout, _ = build.make_initial_model(TOY, 3)
    assert [info.layer for info in layout.tensors] == ["linear", "linear", "head", "head"]
