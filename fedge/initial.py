"""The first model of a task without torch in this process: a short-lived child makes it."""

from __future__ import annotations

from fedge import child
from fedge.errors import ConfigError
from fedge.task import TaskSpec
from fedge.tensors import Layout, Model
from fedge.weights import tell_fresh_head


def initial_in_subprocess(task: TaskSpec, seed: int) -> tuple[Layout, Model]:
    """Layout and first weights of the task's network, equal to those of `fedge.models.initial`.

    Raises:
        ConfigError: the child failed; the text holds what it said.
    """
    try:
        layout, model = child.call("fedge.models:initial", task, seed, returns=tuple[Layout, Model])
    except ConfigError as error:
        raise ConfigError(f"the network of task {task.name} cannot be built: {error}") from error
    tell_fresh_head(task, layout)
    return layout, model
