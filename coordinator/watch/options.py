"""Options and phrases of the commands that read a coordinator's home."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Final

import click

from coordinator.store.store import Store
from coordinator.watch.state import read_summary
from fedge.settings import Secret
from fedge.system.help import json_option, option
from fedge.system.text import Heading

HOME_HELP: Final = "This is the folder of a coordinator on this machine."


STORE_HELP: Final = "This database, postgresql://..., has the coordinator's tables, if it keeps them there."


HOME: Final = option("--home", heading=Heading.FOLDERS, type=click.Path(path_type=Path), required=True, help=HOME_HELP)


STORE: Final = option("--store", heading=Heading.FOLDERS, help=STORE_HELP)


JSON: Final = json_option()


OnAttention = Annotated[
    str | None,
    Heading.SERVER,
    "This command is run once for each new item that needs attention. It gets the item as JSON on its standard input "
    "and in variables such as FEDGE_ATTENTION_TEXT.",
]


AttentionWebhook = Annotated[
    Secret | None,
    Heading.SERVER,
    "This URL gets each new item that needs attention once, as JSON by POST.",
]


def open_store(home: Path, store: str | None) -> Store:
    """Open the store of a coordinator, which may be running.

    Raises:
        ConfigError: there is no such store.
    """
    federation = read_summary(home)["federation"]
    return Store(home, store, federation=federation, intake=True)
