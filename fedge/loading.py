"""Objects of the user's own, named in the configuration as `package.module:name`."""

from __future__ import annotations

import importlib
from typing import Any

from fedge.errors import ConfigError


def load_object(path: str) -> Any:
    """Import what `package.module:name` names: a task class or a network factory.

    The path comes from the configuration of this machine, never from the network.

    Raises:
        ConfigError: there is no such module or name in it.
    """
    module_name, _, name = path.partition(":")
    try:
        return getattr(importlib.import_module(module_name), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(f"cannot load {path}: {error}; write package.module:name") from error
