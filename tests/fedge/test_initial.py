from pathlib import Path

import msgspec
import numpy as np
import pytest

from fedge import initial, models
from fedge.errors import ConfigError
from fedge.task import TaskSpec

TASK = TaskSpec(name="digits", classes=tuple("0123456789"), input_shape=(1, 8, 8), model="mlp")


def test_the_child_makes_what_this_process_would_make() -> None:
    layout, model = initial.initial_in_subprocess(TASK, seed=5)
    expected_layout, expected = models.initial(TASK, seed=5)
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
    layout, model = initial.initial_in_subprocess(task, seed=0)
    assert layout.n_params == 64 * 10 + 10 + 2 * 10
    assert model.buffers.tolist() == [0.0] * 10 + [1.0] * 10
    assert model.counters.tolist() == [0]


def test_a_network_that_cannot_be_built_says_why() -> None:
    with pytest.raises(ConfigError, match="unknown model transformer"):
        initial.initial_in_subprocess(msgspec.structs.replace(TASK, model="transformer"), seed=0)
    with pytest.raises(ConfigError, match="no_such_package"):
        initial.initial_in_subprocess(msgspec.structs.replace(TASK, model="no_such_package:net"), seed=0)
