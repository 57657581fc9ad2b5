"""`fedge rollout`: bring a release to a fleet, stage by stage."""

from __future__ import annotations

import asyncio
import json
import uuid
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import click
import msgspec

from coordinator.rollout.course import Observer, describe_event, explain_misfit
from coordinator.rollout.decision import Plan
from coordinator.rollout.folder import Folder, Record, Request
from coordinator.rollout.making import make_release
from coordinator.rollout.service import Release, Supervisor
from coordinator.rollout.settings import (
    Absent,
    AccuracyDrop,
    Canary,
    MaxFailures,
    MaxWorse,
    Soak,
    Stages,
    parse_stages,
)
from coordinator.watch.options import HOME, STORE
from export.signing import Repository
from fedge.errors import ConfigError, raise_as
from fedge.membership.credentials import Broker, Credentials, FederationName
from fedge.settings import resolve, settings_options
from fedge.system.background import run_until_stopped
from fedge.system.help import CommandGroup, json_lines_option, json_option, option
from fedge.system.loading import find_code
from fedge.system.stopping import INTERRUPTED
from fedge.system.text import Heading, escape_controls
from fedge.wire.messages import RolloutState

_json = json_option()
_repo = click.argument("repo", type=click.Path(path_type=Path))


class RolloutSettings(Credentials, frozen=True, kw_only=True):
    """Section [rollout] of the configuration."""

    broker: Broker
    federation: FederationName
    stages: Stages = "0.1,0.5,1"
    canary: Canary = ""
    soak_s: Soak = 60.0
    absent_s: Absent = 600.0
    max_failures: MaxFailures = 0.05
    max_worse: MaxWorse = 0.5
    accuracy_drop: AccuracyDrop = 0.01


@click.group(cls=CommandGroup)
def rollout() -> None:
    """Bring a release to a fleet, stage by stage; it stops by itself if the devices do worse.

    REPO is a repository of `fedge release`; the state of its rollout is in REPO/rollout. Each device tests the bundle
    on its own samples before it switches, and reverts by itself. For `status`, `pause`, `resume` and `abort` it may
    also be a coordinator's home, whose introduction of personal bundles is then meant.

    Examples:
      fedge rollout make releases --home shop
      fedge rollout start releases 5/manifest.json --broker localhost:1883 --federation shop
      fedge rollout status releases
      fedge rollout pause releases
      fedge rollout abort releases
      fedge rollout pause shop

    Exit codes: 0 done, 1 aborted, 2 wrong usage, no such release, or another rollout is under way, 3 the broker refuses
    us, 4 the disk is full or broken, 130 stopped.
    """


@rollout.command()
@_repo
@HOME
@STORE
@option(
    "--allow",
    heading=Heading.CODE,
    default="",
    help="The run may name this code of yours: package.module:name, comma-separated.",
)
@_json
def make(repo: Path, home: Path, store: str | None, allow: str, *, as_json: bool) -> None:
    """Release a federation's shared model for all devices, as a signed bundle with the next number.

    The number is higher than those of all releases in REPO and of all bundles that devices have reported. The
    coordinator may be running. Personal layers and the weights of experts are not part of this model; of fedcoe it is
    the gate with all experts. The command needs the keys of targets, snapshot and timestamp.

    Examples:
      fedge rollout make releases --home shop

    Exit codes: 0 done, 2 no repository, no coordinator's folder, nothing learned together yet, a key is missing, or the
    run names code that is not allowed, 4 the store cannot be read or the release cannot be written.
    """
    target = make_release(repo, home, store, find_code(allow))
    click.echo(json.dumps({"repo": str(repo), "target": target}) if as_json else target)


@rollout.command()
@_repo
@click.argument("target", required=False)
@settings_options(RolloutSettings, "rollout")
@json_lines_option("event")
def start(repo: Path, target: str | None, config: Path | None, *, as_json: bool, **flags: object) -> int:
    """Supervise a rollout to its end, and serve its files to the devices.

    You may kill it at any time: the same command continues, also without TARGET, by the plan of the start. It ends when
    every device that was ever online has the release. Devices remember an aborted release and refuse it: release the
    next number instead.

    Examples:
      fedge rollout start releases 5/manifest.json --broker server:8883 --federation shop --canary cam1,cam2
      fedge rollout start releases 5/manifest.json --config fleet.toml --stages 0.05,0.25,1 --soak-s 3600 --json
      fedge rollout start releases --config fleet.toml

    Exit codes: 0 done, 1 aborted, 2 wrong usage, no such release, its signatures have expired, the key of timestamp is
    not there, or another rollout is under way, 3 the broker refuses us, 4 the disk is full or broken, 130 stopped.
    """
    settings = resolve(RolloutSettings, "rollout", config, flags)
    broker = settings.make_broker_settings(settings.broker)
    repository, folder = Repository(repo), Folder(repo)
    if target is None:
        plan = _read_record(folder, repo).plan
        release = Release(repository, repo, plan.target)
    else:
        release = Release(repository, repo, target)
        plan = make_plan(settings, target, release)
    expired = [role for role, date in repository.get_expiries().items() if date <= datetime.now(UTC)]
    if expired:
        raise ConfigError(
            f"the signatures of {', '.join(expired)} have expired, and devices would refuse the release: "
            f"`fedge release renew {repo}` first"
        )
    with folder.supervise():
        supervisor = Supervisor(folder, release, plan, broker, settings.federation, _make_observer(as_json=as_json))
        ended = asyncio.run(run_until_stopped(supervisor.run()))
    if ended is None:
        return INTERRUPTED
    return 0 if ended.state is RolloutState.DONE else 1


def make_plan(settings: RolloutSettings, target: str, release: Release) -> Plan:
    """Make the plan that the settings describe.

    Raises:
        ConfigError: the stages are not ascending shares up to 1.
    """
    described = {
        "id": f"{release.manifest.release}-{uuid.uuid4().hex[:8]}",
        "target": target,
        "release": release.manifest.release,
        "digest": release.digest,
        **parse_stages(settings),
    }
    with raise_as(ConfigError, "canary", on=msgspec.ValidationError):
        return msgspec.convert(described, Plan)


def _make_observer(*, as_json: bool) -> Observer:
    """Make an observer that prints JSON lines, or lines for people."""
    if as_json:
        return lambda event, fields: click.echo(json.dumps({"event": event, **fields}))
    return lambda event, fields: _print_lines(_format_event(event, fields), err=True)


def _print_lines(lines: list[str], *, err: bool = False) -> None:
    """Print lines with control characters escaped, since devices can write anything into reasons."""
    click.echo("\n".join(escape_controls(line) for line in lines), err=err)


def _format_event(event: str, fields: dict[str, Any]) -> list[str]:
    if event == "device":
        return [f"  {fields['device']}: {describe_event(event, fields)}"]
    return [describe_event(event, fields), *(f"  {reason}" for reason in fields["reasons"])]


def _add_request_command(request: Request, about: str) -> None:
    """Add a command for one request to the supervisor."""

    def send_request(repo: Path, *, as_json: bool) -> None:
        folder = Folder(repo)
        record = _read_record(folder, repo)
        if why := explain_misfit(request, record):
            raise ConfigError(why)
        folder.write_request(request)
        supervised = folder.is_supervised()
        if as_json:
            click.echo(json.dumps({"id": record.plan.id, "request": str(request), "supervised": supervised}))
        elif supervised:
            click.echo(f"{record.plan.id}: asked to {request}")
        else:
            program = "fedge coordinator" if record.members else "fedge rollout start"
            click.echo(f"{record.plan.id}: nobody supervises it; `{program}`, as before, will {request} it")

    codes = "Exit codes: 0 asked for, 2 there is no rollout, or it has ended, 4 the disk is full or broken."
    text = f"{about}\n\nExamples:\n  fedge rollout {request} releases\n\n{codes}"
    rollout.command(str(request), help=text)(_repo(_json(send_request)))


_add_request_command(Request.PAUSE, "Have no further device begin with the release; those that run it go on.")
_add_request_command(Request.RESUME, "Go on with a rollout that was paused.")
_add_request_command(Request.ABORT, "Stop a rollout: the devices that run the release go back to the bundle before.")


@rollout.command()
@_repo
@_json
def status(repo: Path, *, as_json: bool) -> None:
    """Show the state of the rollout: stage, devices, reasons.

    Examples:
      fedge rollout status releases

    Exit codes: 0, 2 there is no rollout, 4 its state cannot be read.
    """
    folder = Folder(repo)
    record = _read_record(folder, repo)
    supervised = folder.is_supervised()
    if as_json:
        click.echo(json.dumps({**msgspec.to_builtins(record), "supervised": supervised}))
    else:
        _print_lines(_format_record(record, supervised=supervised))


def _read_record(folder: Folder, repo: Path) -> Record:
    record = folder.read()
    if record is None and (repo / "summary.json").exists():
        raise ConfigError(f"the coordinator of {repo} has introduced nothing yet: it begins at the end of a campaign")
    if record is None:
        raise ConfigError(f"no rollout in {repo}: begin one with `fedge rollout start {repo} TARGET`")
    return record


def _format_record(record: Record, *, supervised: bool) -> list[str]:
    plan, progress = record.plan, record.progress
    n_devices = sum(line.takes_part for line in record.devices.values())
    shown = [
        f"rollout  {plan.id}: {plan.target}",
        f"state    {progress.state}{'' if supervised else ' (nobody supervises it now)'}",
        f"stage    {progress.stage + 1} of {len(plan.stages)}: {n_devices} of {len(record.devices)} devices take part",
        *(f"reason   {reason}" for reason in progress.reasons),
    ]
    for device, line in sorted(record.devices.items()):
        why = f" ({line.reason})" if line.reason else ""
        accuracy = "" if line.accuracy is None else f", score {line.accuracy[0]:.3f} -> {line.accuracy[1]:.3f}"
        drift = ", drift" if line.drift else ""
        if line.outliers is not None and line.outliers.flagged:
            drift += f", {line.outliers.flagged} of {line.outliers.seen} samples unlike its own"
        mark = "*" if line.takes_part else " "
        shown.append(f"{mark} {device}: {line.phase}, release {line.release}{accuracy}{drift}{why}")
    return shown
