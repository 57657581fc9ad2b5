"""The `fedge` command: finds each role's sub-command by entry point and loads only the one that is called.

Exit codes: 0 done, 1 an error, 2 wrong usage or configuration, 3 the broker, 4 durable state, 5 a bundle that is not to
be trusted, 6 an end at which no device has a bundle, 130 interrupted (Ctrl-C or SIGTERM).
"""

from __future__ import annotations

import atexit
import inspect
import logging
import re
import signal
import sys
from collections.abc import Sequence
from importlib.metadata import EntryPoint, entry_points
from importlib.util import find_spec
from typing import Any, Final, NamedTuple

import click

import fedge
from fedge.errors import ConfigError, FedgeError
from fedge.loading import needs
from fedge.logs import Format, configure, in_json
from fedge.stopping import INTERRUPTED, hear_no_more
from fedge.text import nearest, printable

log = logging.getLogger("fedge")

ENTRY_POINTS: Final = "fedge.commands"


class About(NamedTuple):
    """What `fedge --help` says of a sub-command without importing it."""

    summary: str
    extra: str  # the installation it needs: pip install '.[extra]' in the clone
    group: str  # its heading


RENAMED: Final = {
    "--welcome": "--late-joiners",
    "--newcomers": "--late-joiners",
    "--reserved": "--server-data",
    "--agents": "--devices",
}
"""Options of former versions that no command has any more, and those that stand for them."""
NEVER: Final = {
    "--optimizer": "devices train by SGD with momentum (--learning-rate, --momentum, --weight-decay). There is no "
    "other optimizer: orders can express only this one, and the methods' equations use it",
}
"""Options that people look for and no command has, and why."""
HERE: Final = "Try it on this machine"
SERVER: Final = "Edge server"
WATCH: Final = "See the fleet, and act"
LEARNS: Final = "A device that learns"
PREDICTS: Final = "A device that predicts"
OTHERS: Final = "Others"

COMMANDS: Final = {
    "demo": About("Run a whole federation on this machine and show what it brings.", "coordinator", HERE),
    "simulate": About("Run one method on simulated devices and measure it.", "coordinator", HERE),
    "compare": About("Run several methods on equal terms, over several seeds.", "coordinator", HERE),
    "tune": About("Search a method's options and the learning rate on validation samples.", "ray", HERE),
    "report": About("Write the report of a run anew from its folder.", "coordinator", HERE),
    "new": About("Create a small project of your own, ready to run.", "agent", HERE),
    "sample": About("Write samples of a task as data for devices, to try the other commands.", "coordinator", HERE),
    "check": About("Find out what would not work with a task and a network.", "coordinator", HERE),
    "coordinator": About("Run the rounds of a federation: the edge server.", "coordinator", SERVER),
    "relay": About("Represent the devices of a site: models come once, sums of updates leave.", "coordinator", SERVER),
    "status": About("Show rounds, devices and counters of a federation.", "coordinator", SERVER),
    "ui": About("Show a federation in a browser, live; pause it, retire a device.", "ui", WATCH),
    "devices": About("List the devices of a federation, and why one takes no part.", "coordinator", WATCH),
    "rounds": About("List the rounds: asked, answered, late, accuracy.", "coordinator", WATCH),
    "why": About("Explain the state of a device, and what it did in a round.", "coordinator", WATCH),
    "events": About("List what has happened, or follow it.", "coordinator", WATCH),
    "pause": About("Begin no further round.", "coordinator", WATCH),
    "resume": About("Begin rounds again.", "coordinator", WATCH),
    "retire": About("Retire a device: it gets no more orders.", "coordinator", WATCH),
    "readmit": About("Give a retired device orders again.", "coordinator", WATCH),
    "backup": About("Copy a coordinator's home, while it runs.", "coordinator", SERVER),
    "restore": About("Make a coordinator's home from a backup.", "coordinator", SERVER),
    "doctor": About("Find out what is wrong on this machine, and what to do.", "deploy", SERVER),
    "broker": About("Start a local MQTT broker: Mosquitto, or a pure Python one.", "coordinator", SERVER),
    "provision": About("Make the certificates of a federation, which say who belongs to it.", "coordinator", SERVER),
    "release": About("Sign bundles, so that devices can tell what is genuine.", "agent", SERVER),
    "rollout": About("Bring a release to a fleet, stage by stage.", "coordinator", SERVER),
    "enrol": About("Make this machine the device that its start-up kit names.", "deploy", LEARNS),
    "agent": About("Take part in a federation with the data of this device.", "agent", LEARNS),
    "export": About("Write the bundle of a device or a model for ONNX Runtime.", "agent", LEARNS),
    "egress": About("Show what has left a device, and what may leave it.", "deploy", LEARNS),
    "install": About("Give a device its first bundle and its root of trust, by hand.", "deploy", PREDICTS),
    "infer": About("Predict with an installed bundle; needs no torch.", "deploy", PREDICTS),
    "serve": About("Answer inference requests over HTTP and MQTT, as Triton does.", "serve", PREDICTS),
}

_PROBES: Final = {
    "deploy": ("onnxruntime", "tuf"),
    "serve": ("onnxruntime", "tuf", "aiohttp"),
    "agent": ("onnxruntime", "tuf", "torch", "onnxscript"),
    "coordinator": ("onnxruntime", "tuf", "torch", "onnxscript", "sklearn", "matplotlib"),
    "ray": ("ray", "pandas"),
}
"""Packages by which an extra is known to be installed."""


class Commands(click.Group):
    """The sub-commands of all installed packages, imported when called."""

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002 - click's signature
        """Names: ours in their order of use, then others."""
        installed = _installed()
        return [name for name in COMMANDS if name in installed] + sorted(set(installed) - set(COMMANDS))

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:  # noqa: ARG002
        """Import one sub-command; None if there is none of that name.

        Raises:
            ConfigError: it needs a package that is not installed.
        """
        found = _installed().get(cmd_name)
        return None if found is None else _load(cmd_name, found)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Suggest the nearest command for an unknown name."""
        names = self.list_commands(ctx)
        if not args[0].startswith("-") and args[0] not in names:
            raise click.UsageError(f"no such command {args[0]}{nearest(args[0], names)}", ctx)
        return super().resolve_command(ctx, args)

    def invoke(self, ctx: click.Context) -> Any:
        """Run the sub-command; a package found missing only now is reported as if missing at import."""
        try:
            return super().invoke(ctx)
        except ModuleNotFoundError as error:
            about = COMMANDS.get(ctx.invoked_subcommand or "")
            if about is None:
                raise
            raise needs(error, f"fedge {ctx.invoked_subcommand}", about.extra) from error

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """List the sub-commands from `COMMANDS` by role without importing any, and say what they lack here."""
        names = self.list_commands(ctx)
        lacking = {extra for extra, packages in _PROBES.items() if not all(find_spec(name) for name in packages)}
        for group in (HERE, SERVER, WATCH, LEARNS, PREDICTS):
            rows = [
                (name, f"{about.summary}{f'  [not here: needs {about.extra}]' if about.extra in lacking else ''}")
                for name, about in COMMANDS.items()
                if about.group == group and name in names
            ]
            if rows:
                with formatter.section(group):
                    formatter.write_dl(rows)
        if theirs := [(name, "") for name in names if name not in COMMANDS]:
            with formatter.section(OTHERS):
                formatter.write_dl(theirs)


def with_lines_kept(found: click.Command) -> click.Command:
    """Have click not wrap the examples and exit codes in a command's help: a backspace before a paragraph tells it."""
    found.help = re.sub(r"\n\n(?=Examples:|Exit codes:)", "\n\n\b\n", inspect.cleandoc(found.help or ""))
    for each in found.commands.values() if isinstance(found, click.Group) else ():
        with_lines_kept(each)
    return found


@with_lines_kept
@click.command(cls=Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(fedge.__version__, prog_name="fedge")
@click.option(
    "--log-level",
    type=click.Choice(["debug", "info", "warning", "error"]),
    default="info",
    envvar="FEDGE_LOG_LEVEL",
    show_default=True,
    help="Lines on standard error.  [env: FEDGE_LOG_LEVEL]",
)
@click.option(
    "--log-format",
    type=click.Choice(["text", "json"]),
    default="text",
    envvar="FEDGE_LOG_FORMAT",
    show_default=True,
    help="json: an object a line, for programs (docs/operating.md).  [env: FEDGE_LOG_FORMAT]",
)
def command(log_level: str, log_format: Format) -> None:
    """Personalised federated learning that runs at the edge.

    Examples:
      fedge demo
      fedge compare --methods fedavg,fedge --task digits --seeds 0,1,2
      fedge sample --task digits --devices 4 --out samples
      fedge coordinator --broker localhost:1883 --federation shop --home server --task digits
      fedge agent --broker localhost:1883 --federation shop --id cam1 --home cam1 --task digits --data samples/cam1.npz
      fedge infer cam1/bundles/1 samples/cam1-test.npz
    """
    configure(log_level, log_format)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command line (default: the process's own) and return its exit code."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell starts background jobs with it ignored
    signal.signal(signal.SIGTERM, lambda *_: signal.raise_signal(signal.SIGINT))  # one way to stop, one code path
    atexit.register(hear_no_more)
    try:
        result = command.main(arguments, prog_name="fedge", standalone_mode=False)
    except (click.Abort, KeyboardInterrupt):
        return INTERRUPTED
    except click.ClickException as error:
        if isinstance(error, click.NoSuchOption):
            name = error.option_name
            if now := RENAMED.get(name):
                error = click.UsageError(f"there is no option {name} any more: it is {now} now", error.ctx)
            elif why := NEVER.get(name):
                error = click.UsageError(f"there is no option {name}: {why}", error.ctx)
        error.show()
        return error.exit_code
    except UnicodeEncodeError as error:  # JSON and the store hold text
        return _failed(ConfigError(f"{error.object!a} is not UTF-8: rename the file or folder that is called so"))
    except FedgeError as error:
        return _failed(error)
    return result if isinstance(result, int) else 0


def _failed(error: FedgeError) -> int:
    if in_json():
        log.error("event=ended exit_code=%d reason=%s", error.exit_code, str(error))
    else:
        click.echo("\n".join(printable(line) for line in f"error: {error}".split("\n")), err=True)
    return error.exit_code


def _installed() -> dict[str, EntryPoint]:
    return {point.name: point for point in entry_points(group=ENTRY_POINTS)}


def _load(name: str, point: EntryPoint) -> click.Command:
    try:
        loaded = point.load()
    except ModuleNotFoundError as error:
        if name not in COMMANDS:
            raise
        raise needs(error, f"fedge {name}", COMMANDS[name].extra) from error
    assert isinstance(loaded, click.Command)
    return with_lines_kept(loaded)


if __name__ == "__main__":
    sys.exit(main())
