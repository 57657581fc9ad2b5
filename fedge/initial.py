"""The first model of a task without torch in this process: a short-lived child makes it."""

from __future__ import annotations

import tempfile
from pathlib import Path

import msgspec

from fedge import child
from fedge.errors import ConfigError
from fedge.task import TaskSpec
from fedge.tensors import Layout, Model, flatten, from_bytes


def initial_in_subprocess(task: TaskSpec, seed: int) -> tuple[Layout, Model]:
    """Layout and first weights of the task's network, equal to those of `fedge.models.initial`.

    Raises:
        ConfigError: the child failed; the text holds what it said.
    """
    with tempfile.TemporaryDirectory(prefix="fedge-initial-") as name:
        folder = Path(name)
        (folder / "task.json").write_bytes(msgspec.json.encode(task))
        try:
            child.run("fedge.models", str(seed), name)
        except ConfigError as error:
            raise ConfigError(f"the network of task {task.name} cannot be built: {error}") from error
        layout = msgspec.json.decode((folder / "layout.json").read_bytes(), type=Layout)
        return layout, flatten(from_bytes((folder / "model.safetensors").read_bytes()), layout)
