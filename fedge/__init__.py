"""The code that both sides of a federation share: wire contract, tasks, models, configuration and the `fedge` command.

For scripts and notebooks there are `fedge.Task`, `simulate`, `compare`, `tune` and `load`. They belong to the roles and
are imported on first use, so `import fedge` loads neither a role nor torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fedge.system import moved

if TYPE_CHECKING:
    from coordinator.simulation.interface import compare, simulate, tune
    from deploy import load
    from fedge.tasks import Task

moved.install()

__version__ = "0.2.0"

__all__ = ["Task", "compare", "load", "simulate", "tune"]

_INTERFACE = {
    "Task": ("fedge.tasks", "agent"),
    "compare": ("coordinator.simulation.interface", "coordinator"),
    "load": ("deploy", "deploy"),
    "simulate": ("coordinator.simulation.interface", "coordinator"),
    "tune": ("coordinator.simulation.interface", "coordinator"),
}
"""The module of each name of the Python interface, and the extra that it needs."""


def __getattr__(name: str) -> Any:
    """Return a name of the Python interface, which is imported on first use.

    Raises:
        AttributeError: there is no such name.
        ConfigError: the name needs a package that is not installed.
    """
    if name not in _INTERFACE:
        raise AttributeError(f"module 'fedge' has no attribute {name!r}")
    module, extra = _INTERFACE[name]
    from fedge.system.loading import load_role

    return getattr(load_role(module, f"fedge.{name}", extra), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_INTERFACE})
