"""Makes the first model of a task in a process of its own: `python -m fedge.models SEED FOLDER`.

FOLDER holds task.json; layout.json and model.safetensors are written beside it. `fedge.initial` starts it, so that the
coordinator never imports torch.
"""

from __future__ import annotations

import sys
from pathlib import Path

import msgspec

from fedge.errors import FedgeError
from fedge.models import initial
from fedge.task import TaskSpec
from fedge.tensors import to_bytes, unflatten


def main(seed: int, folder: Path) -> None:
    """Read the task, write layout and tensors.

    Raises:
        ConfigError: the task's network cannot be built.
    """
    task = msgspec.json.decode((folder / "task.json").read_bytes(), type=TaskSpec)
    layout, model = initial(task, seed)
    (folder / "layout.json").write_bytes(msgspec.json.encode(layout))
    (folder / "model.safetensors").write_bytes(to_bytes(unflatten(model, layout)))


if __name__ == "__main__":
    try:
        main(int(sys.argv[1]), Path(sys.argv[2]))
    except FedgeError as error:
        sys.exit(str(error))
