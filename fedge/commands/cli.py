"""The `fedge` command, which finds the sub-commands by entry point and imports only the one that is called.

Exit codes: 0 done, 1 an error, 2 wrong usage or configuration, 3 the broker, 4 durable state, 5 a bundle that is not to
be trusted, 6 an end at which no device has a bundle, 130 interrupted (Ctrl-C or SIGTERM).
"""

from __future__ import annotations

import atexit
import inspect
import logging
import re
import signal
from collections.abc import Sequence
from importlib.metadata import EntryPoint, entry_points
from importlib.util import find_spec
from typing import Any, Final, NamedTuple

import click

import fedge
from fedge.errors import ConfigError, FedgeError
from fedge.system.help import Command, CommandGroup, option
from fedge.system.loading import make_missing_package_error
from fedge.system.logs import Format, configure, is_json
from fedge.system.stopping import INTERRUPTED, ignore_signals
from fedge.system.text import Heading, escape_controls, suggest_nearest

log = logging.getLogger("fedge")

ENTRY_POINTS: Final = "fedge.commands"


class About(NamedTuple):
    """The description of a sub-command in `fedge --help`, which does not import the sub-command."""

    summary: str
    extra: str  # the extra that must be installed: pip install '.[extra]' in the clone
    group: str  # the heading under which the sub-command is listed


RENAMED: Final = {
    "--welcome": "--late-joiners",
    "--newcomers": "--late-joiners",
    "--reserved": "--server-data",
    "--agents": "--devices",
}
"""Options of former versions that no command has any more, with the options that replace them."""
FIRST: Final = "The first week"
SERVER: Final = "On the coordinator"
DEVICE: Final = "On a device"
WORKSHOP: Final = "In simulations"
TRUST: Final = "Releases and security"
OTHERS: Final = "Others"

COMMANDS: Final = {
    "demo": About("Run a whole federation on this machine and show what it brings.", "coordinator", FIRST),
    "new": About("Create a small project of your own, ready to run.", "agent", FIRST),
    "check": About("Find out what would not work with a task and a network.", "coordinator", FIRST),
    "simulate": About("Run one method on simulated devices and measure it.", "coordinator", FIRST),
    "compare": About("Run several methods on equal terms, over several seeds.", "coordinator", FIRST),
    "coordinator": About("Run the rounds of a federation: the edge server.", "coordinator", FIRST),
    "agent": About("Take part in a federation with the data of this device.", "agent", FIRST),
    "infer": About("Predict with an installed bundle; needs no torch.", "deploy", FIRST),
    "status": About("Show rounds, devices and counters of a federation.", "coordinator", SERVER),
    "ui": About("Show a federation in a browser, live; pause it, retire a device.", "ui", SERVER),
    "devices": About("List the devices of a federation, and why one takes no part.", "coordinator", SERVER),
    "rounds": About("List the rounds: asked, answered, late, accuracy.", "coordinator", SERVER),
    "why": About("Explain the state of a device, and what it did in a round.", "coordinator", SERVER),
    "events": About("List what has happened, or follow it.", "coordinator", SERVER),
    "pause": About("Begin no further round.", "coordinator", SERVER),
    "resume": About("Begin rounds again.", "coordinator", SERVER),
    "campaign": About("Run another campaign, or show those so far.", "coordinator", SERVER),
    "finish": About("End training early; devices get bundles of what was learned.", "coordinator", SERVER),
    "retire": About("Retire a device: it gets no more orders.", "coordinator", SERVER),
    "readmit": About("Give a retired device orders again.", "coordinator", SERVER),
    "backup": About("Copy a coordinator's home, while it runs.", "coordinator", SERVER),
    "restore": About("Make a coordinator's home from a backup.", "coordinator", SERVER),
    "relay": About("Represent the devices of a site: models come once, sums of updates leave.", "coordinator", SERVER),
    "broker": About("Start a local MQTT broker: Mosquitto, or a pure Python one.", "coordinator", SERVER),
    "enrol": About("Make this machine the device that its start-up kit names.", "deploy", DEVICE),
    "install": About("Give a device its first bundle and its root of trust, by hand.", "deploy", DEVICE),
    "serve": About("Answer inference requests over HTTP and MQTT, as Triton does.", "serve", DEVICE),
    "samples": About("Show, mark, export, delete and add the samples that a device has gathered.", "deploy", DEVICE),
    "collect": About("Watch folders and files, and take what is new into a device's store.", "deploy", DEVICE),
    "label": About("Label a device's inputs on a page of this machine, by keyboard.", "serve", DEVICE),
    "egress": About("Show what has left a device, and what may leave it.", "deploy", DEVICE),
    "doctor": About("Find out what is wrong on this machine, and what to do.", "deploy", DEVICE),
    "methods": About("List the methods, with a sentence each.", "coordinator", WORKSHOP),
    "sample": About("Write samples of a task as data for devices, to try the other commands.", "coordinator", WORKSHOP),
    "tune": About("Search a method's options and the learning rate on validation samples.", "ray", WORKSHOP),
    "report": About("Write the report of a run anew from its folder.", "coordinator", WORKSHOP),
    "provision": About("Make the certificates of a federation, which say who belongs to it.", "coordinator", TRUST),
    "export": About("Write the bundle of a device or a model for ONNX Runtime.", "agent", TRUST),
    "release": About("Sign bundles, so that devices can tell what is genuine.", "agent", TRUST),
    "rollout": About("Bring a release to a fleet, stage by stage.", "coordinator", TRUST),
}
"""All sub-commands in their order of use: first a demo, an own task, its check and simulation, then real machines."""

_PROBES: Final = {
    "deploy": ("onnxruntime", "tuf"),
    "serve": ("onnxruntime", "tuf", "aiohttp"),
    "agent": ("onnxruntime", "tuf", "torch", "onnxscript"),
    "coordinator": ("onnxruntime", "tuf", "torch", "onnxscript", "sklearn", "matplotlib"),
    "ray": ("ray", "pandas"),
}
"""Packages by extra; an extra counts as installed if all its packages are."""


class Commands(CommandGroup):
    """The sub-commands of all installed packages, imported when called."""

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002 - click's signature
        """Return the names of all sub-commands, ours in their order of use, then those of other packages."""
        installed = _find_commands()
        return [name for name in COMMANDS if name in installed] + sorted(set(installed) - set(COMMANDS))

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:  # noqa: ARG002
        """Import a sub-command; return None if there is none of that name.

        Raises:
            ConfigError: the sub-command needs a package that is not installed.
        """
        found = _find_commands().get(cmd_name)
        return None if found is None else _load_command(cmd_name, found)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Suggest the nearest command for an unknown name."""
        names = self.list_commands(ctx)
        if not args[0].startswith("-") and args[0] not in names:
            raise click.UsageError(f"no such command {args[0]}{suggest_nearest(args[0], names)}", ctx)
        return super().resolve_command(ctx, args)

    def invoke(self, ctx: click.Context) -> Any:
        """Run the sub-command; report a package that is found missing only now as one that is missing at import."""
        try:
            return super().invoke(ctx)
        except ModuleNotFoundError as error:
            about = COMMANDS.get(ctx.invoked_subcommand or "")
            if about is None:
                raise
            raise make_missing_package_error(error, f"fedge {ctx.invoked_subcommand}", about.extra) from error

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Show the sub-commands, then the options that stand before them."""
        self.format_commands(ctx, formatter)
        Command.format_options(self, ctx, formatter)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """List the sub-commands by group without importing them, and say which extras are not installed here."""
        names = self.list_commands(ctx)
        lacking = {extra for extra, packages in _PROBES.items() if not all(find_spec(name) for name in packages)}
        for group in (FIRST, SERVER, DEVICE, WORKSHOP, TRUST):
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


def preserve_lines(found: click.Command) -> click.Command:
    """Keep click from wrapping the examples and exit codes in a command's help: a backspace precedes each of them."""
    found.help = re.sub(r"\n\n(?=Examples:|Exit codes:)", "\n\n\b\n", inspect.cleandoc(found.help or ""))
    for each in found.commands.values() if isinstance(found, click.Group) else ():
        preserve_lines(each)
    return found


@preserve_lines
@click.command(cls=Commands, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120})
@click.version_option(fedge.__version__, prog_name="fedge", help="The command shows the version and ends.")
@option(
    "--log-level",
    heading=Heading.GENERAL,
    type=click.Choice(["debug", "info", "warning", "error"]),
    default="info",
    envvar="FEDGE_LOG_LEVEL",
    show_default=True,
    help="Lines of this level and above go to standard error.  [env: FEDGE_LOG_LEVEL]",
)
@option(
    "--log-format",
    heading=Heading.GENERAL,
    type=click.Choice(["text", "json"]),
    default="text",
    envvar="FEDGE_LOG_FORMAT",
    show_default=True,
    help="With json each line is an object, for programs (docs/operating.md).  [env: FEDGE_LOG_FORMAT]",
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
    """Run a command line, by default the process's own, and return its exit code."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell makes background jobs ignore SIGINT
    signal.signal(signal.SIGTERM, lambda *_: signal.raise_signal(signal.SIGINT))  # so both signals end us the same way
    atexit.register(ignore_signals)
    try:
        result = command.main(arguments, prog_name="fedge", standalone_mode=False)
    except (click.Abort, KeyboardInterrupt):
        return INTERRUPTED
    except click.ClickException as error:
        if isinstance(error, click.NoSuchOption):
            name = error.option_name
            if now := RENAMED.get(name):
                error = click.UsageError(f"there is no option {name} any more: it is {now} now", error.ctx)
        error.show()
        return error.exit_code
    except UnicodeEncodeError as error:  # JSON and the store hold text
        return _report_failure(
            ConfigError(f"{error.object!a} is not UTF-8: rename the file or folder that is called so")
        )
    except FedgeError as error:
        return _report_failure(error)
    return result if isinstance(result, int) else 0


def _report_failure(error: FedgeError) -> int:
    if is_json():
        log.error("event=ended exit_code=%d reason=%s", error.exit_code, str(error))
    else:
        click.echo("\n".join(escape_controls(line) for line in f"error: {error}".split("\n")), err=True)
    return error.exit_code


def _find_commands() -> dict[str, EntryPoint]:
    return {point.name: point for point in entry_points(group=ENTRY_POINTS)}


def _load_command(name: str, point: EntryPoint) -> click.Command:
    try:
        loaded = point.load()
    except ModuleNotFoundError as error:
        if name not in COMMANDS:
            raise
        raise make_missing_package_error(error, f"fedge {name}", COMMANDS[name].extra) from error
    assert isinstance(loaded, click.Command)
    return preserve_lines(loaded)
