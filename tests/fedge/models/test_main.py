from pathlib import Path

import msgspec
import numpy as np
import pytest

from fedge import models
from fedge.errors import ConfigError
from fedge.models.__main__ import main
from fedge.task import TaskSpec
from fedge.tensors import Layout, flatten, from_bytes

TASK = TaskSpec(name="t", classes=("a", "b"), input_shape=(3,), model="mlp")


def test_writes_layout_and_tensors(tmp_path: Path) -> None:
    (tmp_path / "task.json").write_bytes(msgspec.json.encode(TASK))
    main(7, tmp_path)
    layout, model = models.initial(TASK, 7)
    assert msgspec.json.decode((tmp_path / "layout.json").read_bytes(), type=Layout) == layout
    written = flatten(from_bytes((tmp_path / "model.safetensors").read_bytes()), layout)
    assert np.array_equal(written.params, model.params)


def test_a_wrong_task_writes_nothing(tmp_path: Path) -> None:
    (tmp_path / "task.json").write_bytes(msgspec.json.encode(msgspec.structs.replace(TASK, model="none")))
    with pytest.raises(ConfigError, match="unknown model none"):
        main(7, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["task.json"]
