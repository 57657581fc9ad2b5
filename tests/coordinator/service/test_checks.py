from pathlib import Path

import msgspec
import numpy as np
import pytest
from torch import nn

from coordinator.service import checks
from fedge.commands.doctor import AGENT_GB
from fedge.data.task import TaskSpec
from fedge.errors import ConfigError
from fedge.models import build
from fedge.system.loading import register_object
from fedge.tasks import load_task

TASK = TaskSpec(name="digits", classes=tuple("0123456789"), input_shape=(1, 8, 8), model="mlp")


def test_the_child_makes_what_this_process_would_make() -> None:
    layout, model = checks.make_first_model(TASK, seed=5)
    expected_layout, expected = build.make_initial_model(TASK, seed=5)
    assert layout == expected_layout
    assert layout.n_params == 2410
    assert np.array_equal(model.params, expected.params)


def test_the_users_network_is_found_and_may_print(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_net.py").write_text(
        "from torch import nn\n"
        "def factory(task):\n"
        "    print('hello')\n"
        "    return nn.Sequential(nn.Flatten(), nn.Linear(64, 10), nn.BatchNorm1d(10))\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    task = msgspec.structs.replace(TASK, model="my_net:factory")
    layout, model = checks.make_first_model(task, seed=0)
    assert layout.n_params == 64 * 10 + 10 + 2 * 10
    assert model.buffers.tolist() == [0.0] * 10 + [1.0] * 10
    assert model.counters.tolist() == [0]


def test_a_network_that_cannot_be_built_says_why() -> None:
    with pytest.raises(ConfigError, match="unknown model transformer"):
        checks.make_first_model(msgspec.structs.replace(TASK, model="transformer"), seed=0)
    with pytest.raises(ConfigError, match="no_such_package"):
        checks.make_first_model(msgspec.structs.replace(TASK, model="no_such_package:net"), seed=0)


def test_the_coordinator_tries_the_samples_that_describe_the_task(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "net_of_ones.py").write_text(
        "import torch\n"
        "class Net(torch.nn.Linear):\n"
        "    def __init__(self): super().__init__(4, 2)\n"
        "    def forward(self, x): return super().forward(x / (x.abs() > 0.99))\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    np.savez(tmp_path / "d.npz", x=np.array([[1.0] * 4, [-1.0] * 4]), y=np.arange(2))
    task = msgspec.structs.replace(load_task("arrays", tmp_path / "d.npz"), model="net_of_ones:Net")
    with caplog.at_level("INFO"):
        checks.make_first_model(task, 0, "", "arrays", tmp_path / "d.npz")
    assert "event=checking step='train the network on these samples'" in caplog.text
    with pytest.raises(ConfigError, match="gives NaN or infinity for 16 of 16 samples"):
        checks.make_first_model(task, 0)


def net(*layers: nn.Module) -> nn.Sequential:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 8), *layers)


def of(module: nn.Module) -> TaskSpec:
    return msgspec.structs.replace(TASK, model=register_object(module), model_options={})


def examined(module: nn.Module, without_profile: str = "") -> checks.Examination:
    """Checked as before a run; `module` lives until then, and so does its name."""
    task = of(module)
    return checks.examine(task, build.make_initial_model(task, 0)[0], without_profile)


def test_nothing_is_said_of_a_network_that_works() -> None:
    task = load_task("digits")
    found = checks.examine(task, build.make_initial_model(task, 0)[0], checks.explain_no_profile("fedge", {}))
    assert found.findings == ()
    assert (found.parameters, found.size_bytes) == (2410, 9640)
    assert found.ram_gb == AGENT_GB


def test_outputs_must_be_one_number_for_each_class() -> None:
    (found,) = examined(net(nn.ReLU(), nn.Linear(8, 7))).findings
    assert found.stops
    assert "shape (16, 7), and there are 10 classes" in found.what
    assert "task.n_classes" in found.do
    with pytest.raises(ConfigError, match="10 classes"):
        checks.require_sound((found,))


@pytest.mark.parametrize(
    ("method", "told"),
    [("fedge", "form one group"), ("fedge+ft", "form one group"), ("fedepc", "clustering=mctc"), ("fedavg", "")],
)
@pytest.mark.process  # for its seconds
def test_without_relu_it_says_what_becomes_of_the_method(method: str, told: str) -> None:
    findings = examined(net(nn.GELU(), nn.Linear(8, 10)), checks.explain_no_profile(method, {})).findings
    assert [told in finding.do for finding in findings] == [True] * bool(told)
    assert not any(finding.stops for finding in findings)


def test_methods_that_ask_for_no_profile_do_not_mind() -> None:
    assert checks.explain_no_profile("fedepc", {"clustering": "mctc"}) == ""
    assert checks.explain_no_profile("cfic", {}) == ""
    assert checks.explain_no_profile("fedge", {"buffer": 4}) == ""


@pytest.mark.process  # for its seconds
def test_a_network_that_is_too_large_names_the_boards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    (found,) = examined(net(nn.ReLU(), nn.Linear(8, 1_000_000), nn.Linear(1_000_000, 10))).findings
    assert not found.stops
    assert "Raspberry Pi Zero 2 W (0.3 GB free)" in found.what
    assert "Jetson Orin Nano" not in found.what
