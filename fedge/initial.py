"""The first model of a task without torch in this process: a short-lived child makes it."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import msgspec

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
        child = subprocess.run(
            [sys.executable, "-m", "fedge.models", str(seed), name],
            env={
                **os.environ,
                "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
            },  # the user's modules are found too
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
        if child.returncode != 0:
            last_line = (child.stderr.strip().splitlines() or ["no message"])[-1]
            raise ConfigError(f"the network of task {task.name} cannot be built: {last_line}")
        layout = msgspec.json.decode((folder / "layout.json").read_bytes(), type=Layout)
        return layout, flatten(from_bytes((folder / "model.safetensors").read_bytes()), layout)
