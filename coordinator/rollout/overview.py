"""Rollouts and introductions as shown on a page, and the requests that users can make there.

The coordinator itself supervises its introductions. A separate process, `fedge rollout start`, supervises a rollout
with this machine's keys and configuration. Users name a release and how far it may go; they see neither keys nor
configuration.
"""

from __future__ import annotations

import subprocess
import time
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec

from coordinator.rollout.course import explain_misfit
from coordinator.rollout.folder import Folder, Record, Request
from coordinator.watch.expiring import write_repositories
from export.signing import Repository
from fedge.errors import ConfigError
from fedge.system.child import make_command
from fedge.system.files import get_version
from fedge.wire.messages import RolloutState

BEGIN_S: Final = 60.0
"""Time limit for the start of a supervisor."""
LOOK_S: Final = 0.5
INTRODUCTION: Final = "introduction"
"""Name of the coordinator's introduction among the rollouts."""
STOPPABLE: Final[dict[RolloutState | None, tuple[str, ...]]] = {
    RolloutState.RUNNING: ("pause", "abort"),
    RolloutState.PAUSED: ("resume", "abort"),
    RolloutState.DONE: ("abort",),
}
"""Requests that a supervisor accepts, by state."""


class Overview:
    """The rollouts of some repositories, each by the name of its folder, and a coordinator's introduction.

    Args:
        repos: folders of `fedge release`.
        config: file for `fedge rollout start`, section [rollout]; if None, no rollout can be started.
        home: the coordinator's home; None if only rollouts are shown.

    Raises:
        ConfigError: a folder is not a repository, or two have the same name.
        StoreError: the coordinator's home cannot be written.
    """

    def __init__(self, repos: Sequence[Path], config: Path | None, home: Path | None = None) -> None:
        self._home = home
        self._repos = {repo.absolute().name: repo for repo in repos}
        if len(self._repos) < len(repos):
            raise ConfigError("rollouts: two repositories have one name; rename one of the folders")
        for repo in repos:
            Repository(repo)
        if home is not None and repos:
            write_repositories(home, repos)
        self._config = config
        self._begun: list[subprocess.Popen[bytes]] = []  # kept to reap those that have ended

    def get_version(self) -> object:
        """Return a value that changes whenever there is something new to show."""
        homes = [] if self._home is None else [self._home]
        return [get_version(Folder(folder).path / "state.json") for folder in (*self._repos.values(), *homes)]

    def list_states(self) -> list[dict[str, Any]]:
        """List the state of each rollout as JSON values, an introduction first, if there is one.

        `actions`: what may be requested now. `targets`: the releases, the newest that was not aborted first. `aborted`:
        those that were.

        Raises:
            StoreError: a rollout's state cannot be read.
        """
        introduction = None if self._home is None else Folder(self._home).read()
        introduced = [] if introduction is None else [self._read_introduction(introduction)]
        return [*introduced, *(self._read_state(name, repo) for name, repo in self._repos.items())]

    def _read_introduction(self, record: Record) -> dict[str, Any]:
        assert self._home is not None
        supervised = Folder(self._home).is_supervised()
        actions = STOPPABLE.get(record.progress.state, ()) if supervised else ()
        more = {"targets": [], "aborted": [], "supervised": supervised, "actions": list(actions)}
        return {**msgspec.to_builtins(record), "rollout": INTRODUCTION, **more}

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
        aborted = [] if record is None else record.list_aborted()
        targets = rank_releases(Repository(repo).list_targets(), aborted)
        more = {"targets": targets, "aborted": aborted, "supervised": supervised, "actions": list(actions)}
        return {**kept, "rollout": name, **more}

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
        if name == INTRODUCTION and self._home is not None:
            return request_of_introduction(Folder(self._home), action)
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


def rank_releases(targets: Sequence[str], aborted: Collection[str]) -> list[str]:
    """Rank releases, given by ascending number: the newest first, those that were aborted last."""
    newest = targets[::-1]
    return [*(each for each in newest if each not in aborted), *(each for each in newest if each in aborted)]


def request_of_introduction(folder: Folder, action: str) -> str:
    """Ask the coordinator to pause, resume or abort its introduction; return the reply for the user.

    Raises:
        ConfigError: the action does not fit the introduction's state, or no coordinator runs; with the reason.
        StoreError: the folder cannot be written.
    """
    record = folder.read()
    if record is None or action not in set(Request):
        raise ConfigError(f"no introduction can be asked to {action}")
    if why := explain_misfit(Request(action), record):
        raise ConfigError(why)
    if not folder.is_supervised():
        raise ConfigError("no coordinator runs that could introduce anything")
    folder.write_request(Request(action))
    return {
        "pause": "No further device begins with its new bundle.",
        "resume": "The introduction goes on.",
        "abort": "The devices that run their new bundle go back.",
    }[action]
