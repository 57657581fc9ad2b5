"""Rollouts as shown on a page, and the requests that users can make there.

A separate process, `fedge rollout start`, supervises a rollout with this machine's keys and configuration. Users name a
release and how far it may go; they see neither keys nor configuration.
"""

from __future__ import annotations

import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import msgspec

from coordinator.rollout.folder import Folder, Request
from export.signing import Repository
from fedge.errors import ConfigError
from fedge.system.child import make_command
from fedge.system.files import get_version
from fedge.wire.messages import RolloutState

BEGIN_S: Final = 60.0
"""Time limit for the start of a supervisor."""
LOOK_S: Final = 0.5
STOPPABLE: Final[dict[RolloutState | None, tuple[str, ...]]] = {
    RolloutState.RUNNING: ("pause", "abort"),
    RolloutState.PAUSED: ("resume", "abort"),
    RolloutState.DONE: ("abort",),
}
"""Requests that a supervisor accepts, by state."""


class Overview:
    """The rollouts of some repositories, each by the name of its folder.

    Args:
        repos: folders of `fedge release`.
        config: file for `fedge rollout start`, section [rollout]; if None, no rollout can be started.

    Raises:
        ConfigError: a folder is not a repository, or two have the same name.
    """

    def __init__(self, repos: Sequence[Path], config: Path | None) -> None:
        self._repos = {repo.absolute().name: repo for repo in repos}
        if len(self._repos) < len(repos):
            raise ConfigError("rollouts: two repositories have one name; rename one of the folders")
        for repo in repos:
            Repository(repo)
        self._config = config
        self._begun: list[subprocess.Popen[bytes]] = []  # kept to reap those that have ended

    def get_version(self) -> object:
        """Return a value that changes whenever there is something new to show."""
        return [get_version(Folder(repo).path / "state.json") for repo in self._repos.values()]

    def list_states(self) -> list[dict[str, Any]]:
        """List the state of each rollout as JSON values; `actions`: what may be requested now.

        Raises:
            StoreError: a rollout's state cannot be read.
        """
        return [self._read_state(name, repo) for name, repo in self._repos.items()]

    def _read_state(self, name: str, repo: Path) -> dict[str, Any]:
        folder = Folder(repo)
        record = folder.read()
        state = None if record is None else record.progress.state
        supervised = record is not None and folder.is_supervised()
        if supervised:
            actions = STOPPABLE.get(state, ())
        elif self._config is None:
            actions = ()
        else:
            actions = ("go-on",) if state in {RolloutState.RUNNING, RolloutState.PAUSED} else ("start",)
        kept = {} if record is None else msgspec.to_builtins(record)
        targets = Repository(repo).list_targets()
        return {**kept, "rollout": name, "targets": targets, "supervised": supervised, "actions": list(actions)}

    def request_action(self, name: str, action: str, target: str = "", stages: str = "", canary: str = "") -> str:
        """Pause, resume, abort, start or supervise a rollout again; return the reply for the user.

        Args:
            name: the repository's name.
            action: one of `actions`.
            target: the release, for `start`.
            stages: the stages for `start`, as in `fedge rollout start`; from the configuration if empty.
            canary: the canaries for `start`, as in `fedge rollout start`; from the configuration if empty.

        Raises:
            ConfigError: the action does not fit the rollout's state, or the supervisor does not start; with the reason.
            StoreError: the folder cannot be written.
        """
        if name not in self._repos:
            raise ConfigError(f"there is no repository {name!r} here")
        repo = self._repos[name]
        if action not in self._read_state(name, repo)["actions"]:
            raise ConfigError(f"the rollout of {name} cannot be asked to {action} as it stands")
        if action == "start":
            if target not in Repository(repo).list_targets():
                raise ConfigError(f"there is no release {target!r} in {name}")
            if not (stages + canary).isprintable():
                raise ConfigError("stages and canary are words without control characters")
            given = {"stages": stages, "canary": canary}
            self._start_supervisor(repo, target, *(f"--{key}={value}" for key, value in given.items() if value))
            return f"The rollout of {target} has begun."
        if action == "go-on":
            self._start_supervisor(repo)
            return "The rollout is supervised again."
        Folder(repo).write_request(Request(action))
        return {
            "pause": "No further device begins with the release.",
            "resume": "The rollout goes on.",
            "abort": "The devices that run the release go back.",
        }[action]

    def _start_supervisor(self, repo: Path, *words: str) -> None:
        """Start a supervisor that outlives us, and wait until it works."""
        folder = Folder(repo)
        folder.path.mkdir(exist_ok=True)
        start = make_command("fedge", "rollout", "start", str(repo), *words, "--config", str(self._config))
        with (folder.path / "log").open("w+b") as log:
            process = subprocess.Popen(start, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True)
            self._begun = [each for each in [*self._begun, process] if each.poll() is None]
            until = time.monotonic() + BEGIN_S
            while not folder.is_supervised():
                if time.monotonic() > until:
                    raise ConfigError(
                        f"the rollout's supervisor did not start within {BEGIN_S:.0f} s: see {folder.path / 'log'}"
                    )
                if process.poll() is not None:
                    log.seek(0)
                    *_, last = ["it ended at once", *log.read().decode(errors="replace").strip().splitlines()]
                    raise ConfigError(f"the rollout did not begin: {last.removeprefix('error: ')}")
                time.sleep(LOOK_S)
