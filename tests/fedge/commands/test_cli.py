import json
import logging
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib.metadata import EntryPoint
from pathlib import Path

import click
import msgspec
import pytest

import fedge
from fedge import errors
from fedge.commands import cli
from fedge.system import logs
from fedge.system.help import Option

ROOT = Path(__file__).parents[3]
HEAVY = ("torch", "torchvision", "sklearn", "onnx", "onnxruntime", "scipy")


def fresh(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run code in an interpreter of its own."""
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, env=os.environ | environment
    )


@pytest.fixture
def commands(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, object]]:
    """Sub-commands by name, instead of the installed ones; the signal handlers of pytest are back afterwards."""
    found: dict[str, object] = {}

    class Point(EntryPoint):
        def load(self) -> object:
            command = found[self.name]
            if isinstance(command, Exception):
                raise command
            return command

    monkeypatch.setattr(
        cli, "_find_commands", lambda: {name: Point(name=name, value="x:y", group=cli.ENTRY_POINTS) for name in found}
    )
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield found
    for number, handler in before.items():
        signal.signal(number, handler)


def raising(error: BaseException) -> click.Command:
    @click.command()
    def command() -> None:
        raise error

    return command


@pytest.mark.parametrize(
    "code",
    [
        "import fedge; dir(fedge)",
        "import fedge.commands.cli",
        "from fedge.commands.cli import main; main(['--help'])",
        *(
            f"import fedge.{module}"
            for module in (
                "broker", "codec", "config", "errors", "files", "loading", "messages", "preprocess", "task",
                "tensors", "topics", "transfer", "transport",
            )
        ),
    ],
)  # fmt: skip
def test_heavy_packages_and_roles_are_not_imported(code: str) -> None:
    roles = ("coordinator", "edge_agent", "export", "deploy")
    check = f"import sys; bad = set({(*HEAVY, *roles)}) & set(sys.modules); sys.exit(repr(bad) if bad else 0)"
    result = fresh(f"{code}\n{check}")
    assert result.returncode == 0, result.stderr


def test_help_lists_every_command_and_version_is_ours() -> None:
    result = fresh("from fedge.commands.cli import main; main(['--help']); main(['--version'])")
    assert all(f"  {name} " in result.stdout for name in cli.COMMANDS)
    assert f"fedge, version {fedge.__version__}" in result.stdout


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (errors.ConfigError("no such file"), 2),
        (errors.TransportError("refused"), 3),
        (errors.StoreError("disk full"), 4),
        (errors.UpdateRejected("digest"), 5),
        (errors.ProtocolError("malformed", "x"), 1),
    ],
)
def test_our_errors_are_one_line_and_their_exit_code(
    commands: dict[str, object], capsys: pytest.CaptureFixture[str], error: errors.FedgeError, code: int
) -> None:
    commands["demo"] = raising(error)
    assert cli.main(["demo"]) == code
    assert capsys.readouterr().err == f"error: {error}\n"


def test_an_error_of_ours_is_a_line_of_json_where_lines_are(
    commands: dict[str, object], capsys: pytest.CaptureFixture[str]
) -> None:
    commands["demo"] = raising(errors.StoreError("it is full\x1b"))
    assert cli.main(["--log-format", "json", "demo"]) == 4
    line = json.loads(capsys.readouterr().err)
    assert (line["event"], line["exit_code"], line["reason"]) == ("ended", 4, "it is full\x1b")


@pytest.mark.parametrize("error", [KeyboardInterrupt(), click.Abort()])
def test_an_interrupt_is_130(commands: dict[str, object], error: BaseException) -> None:
    commands["demo"] = raising(error)
    assert cli.main(["demo"]) == 130


def test_a_name_that_is_no_text_is_an_error_that_shows_it(
    commands: dict[str, object], capsys: pytest.CaptureFixture[str]
) -> None:
    @click.command()
    @click.argument("path", type=click.Path(path_type=Path))
    def told(path: Path) -> None:
        msgspec.json.encode(str(path))

    commands["told"] = told
    assert cli.main(["told", os.fsdecode(b"caf\xe9/x")]) == 2
    assert (
        capsys.readouterr().err == "error: 'caf\\udce9/x' is not UTF-8: rename the file or folder that is called so\n"
    )


def test_any_other_error_is_a_bug_and_shows_its_traceback(commands: dict[str, object]) -> None:
    commands["demo"] = raising(ZeroDivisionError())
    with pytest.raises(ZeroDivisionError):
        cli.main(["demo"])


@pytest.mark.parametrize("turn", [1, 2])
def test_the_log_lines_of_a_command_are_not_those_of_the_next_test(commands: dict[str, object], turn: int) -> None:
    """`main` sends them to the standard error of its test, which is closed by then."""
    assert not any(isinstance(handler.formatter, logs.LineFormatter) for handler in logging.getLogger().handlers)
    commands["demo"] = raising(ZeroDivisionError(turn))
    with pytest.raises(ZeroDivisionError):
        cli.main(["demo"])


def test_success_and_an_exit_code_of_the_command(commands: dict[str, object]) -> None:
    @click.command()
    @click.option("--code", type=int)
    def command(code: int | None) -> None:
        if code is not None:
            click.get_current_context().exit(code)

    commands["demo"] = command
    assert cli.main(["demo"]) == 0
    assert cli.main(["demo", "--code", "7"]) == 7


def test_wrong_usage_names_the_nearest_command(commands: dict[str, object], capsys: pytest.CaptureFixture[str]) -> None:
    commands["demo"] = commands["agent"] = raising(AssertionError())
    assert cli.main(["agnet"]) == 2
    assert "did you mean agent?" in capsys.readouterr().err
    assert cli.main(["demo", "--no-such-flag"]) == 2


@pytest.mark.parametrize(
    ("command", "former", "now"),
    [
        ("simulate", "--newcomers", "--late-joiners"),
        ("simulate", "--reserved", "--server-data"),
        ("coordinator", "--agents", "--devices"),
    ],
)
def test_an_option_of_a_former_version_names_the_one_of_now(
    command: str, former: str, now: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main([command, former, "3"]) == 2
    assert f"there is no option {former} any more: it is {now} now" in capsys.readouterr().err


def test_a_missing_package_says_which_extra_brings_it(
    commands: dict[str, object], capsys: pytest.CaptureFixture[str]
) -> None:
    commands["coordinator"] = ModuleNotFoundError("No module named 'sklearn'", name="sklearn.cluster")
    assert cli.main(["coordinator"]) == 2
    assert "pip install '.[coordinator]'" in capsys.readouterr().err


def test_so_does_one_that_is_missed_only_when_the_command_runs(
    commands: dict[str, object], capsys: pytest.CaptureFixture[str]
) -> None:
    commands["simulate"] = raising(ModuleNotFoundError("No module named 'matplotlib'", name="matplotlib"))
    assert cli.main(["simulate"]) == 2
    assert "fedge simulate needs the package matplotlib: in fedge's clone, pip install '.[coordinator]'" in (
        capsys.readouterr().err
    )


def test_commands_stand_by_role_and_those_that_lack_something_say_so(
    not_installed: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    not_installed("matplotlib")
    assert cli.main(["--help"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    headings = [
        *("The first week:", "On the coordinator:", "On a device:", "In simulations:", "Releases and security:"),
        "General:",
    ]
    assert [said.index(heading) for heading in headings] == sorted(said.index(heading) for heading in headings)
    assert "measure it. [not here: needs coordinator]" in said
    assert "data of this device. infer" in said
    assert said.index("serve Answer") > said.index("On a device:")


def test_the_commands_of_the_first_week_stand_first() -> None:
    first = [name for name, about in cli.COMMANDS.items() if about.group == cli.FIRST]
    assert first == ["demo", "new", "check", "simulate", "compare", "coordinator", "agent", "infer"]
    assert list(cli.COMMANDS)[: len(first)] == first


def test_a_missing_module_of_ours_is_a_bug(commands: dict[str, object]) -> None:
    commands["coordinator"] = ModuleNotFoundError("No module named 'coordinator.x'", name="coordinator.x")
    with pytest.raises(ModuleNotFoundError):
        cli.main(["coordinator"])


def test_others_can_add_commands(commands: dict[str, object], capsys: pytest.CaptureFixture[str]) -> None:
    commands["zoo"] = raising(errors.ConfigError("theirs"))
    commands["demo"] = raising(AssertionError())
    assert cli.main(["--help"]) == 0
    listed = capsys.readouterr().out
    assert listed.index("demo") < listed.index("zoo")
    assert cli.main(["zoo"]) == 2


def test_entry_points_are_those_of_the_table() -> None:
    assert set(cli.COMMANDS) == set(cli._find_commands())


WAITING = """
import asyncio, sys, click
from importlib.metadata import EntryPoint
from fedge import cli
@click.command()
def wait():
    async def main():
        try:
            print("ready", flush=True)
            await asyncio.sleep(60)
        finally:
            print("stopped", flush=True)
    asyncio.run(main())
cli._load_command = lambda *_: wait
sys.exit(cli.main(["demo"]))
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("background", [False, True], ids=["foreground", "background"])
def test_both_signals_stop_cleanly_with_130(number: signal.Signals, background: bool) -> None:
    child = subprocess.Popen(
        [sys.executable, "-c", WAITING],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=(lambda: signal.signal(signal.SIGINT, signal.SIG_IGN)) if background else None,
    )
    with child:
        assert child.stdout is not None
        assert child.stdout.readline() == "ready\n"
        child.send_signal(number)
        out, err = child.communicate(timeout=300)
    assert (child.returncode, out) == (130, "stopped\n")
    assert "Traceback" not in err


ENDS_SLOWLY = """
import sys, time
from fedge import cli
class Late:
    def __del__(self):
        print("late", flush=True)
        time.sleep(1)
late = Late()
sys.exit(cli.main(["--version"]))
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_while_python_ends_does_not_change_the_exit_code(number: signal.Signals) -> None:
    """A second SIGTERM finds the process there."""
    child = subprocess.Popen([sys.executable, "-c", ENDS_SLOWLY], stdout=subprocess.PIPE, text=True)
    with child:
        assert child.stdout is not None
        assert child.stdout.readline().startswith("fedge")
        assert child.stdout.readline() == "late\n"
        child.send_signal(number)
        assert child.wait(300) == 0


def test_the_working_folder_is_not_searched_for_modules(tmp_path: Path) -> None:
    (tmp_path / "my_task.py").write_text("")
    code = "import os; os.chdir(FOLDER); import sys; sys.path[:] = [p for p in sys.path if p]\n".replace(
        "FOLDER", repr(str(tmp_path))
    )
    code += "from fedge.commands.cli import main; main(['--version']); import my_task"
    assert "No module named 'my_task'" in fresh(code).stderr


@pytest.mark.parametrize(
    "words", [["--help"], ["release", "--help"], ["release", "add", "--help"], ["agent", "--help"]]
)
def test_examples_keep_their_lines_in_the_help(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    said = []
    for _ in range(2):  # a command that is loaded again stays as it is
        assert cli.main(words) == 0
        said.append(capsys.readouterr().out)
    assert said[0] == said[1]
    lines = said[0].split("\n")
    examples = [line for line in lines if line.startswith("    fedge ")]
    assert len(examples) >= 3
    assert "\b" not in said[0]


CODE = {
    "agent": ("task", "steps", "allow"),
    "check": ("task", "model", "method", "allow", "problem", "augment"),
    "compare": ("task", "model", "methods", "baseline", "problem", "augment", "metric"),
    "coordinator": ("task", "model", "method", "allow", "problem", "augment"),
    "demo": ("task", "model", "method", "problem", "augment"),
    "relay": ("task", "allow"),
    "sample": ("task", "model", "problem", "augment"),
    "serve": ("score_with",),
    "simulate": ("task", "model", "method", "problem", "augment", "metric"),
    "tune": ("task", "model", "method", "problem", "augment", "metric"),
}
"""Settings that may name code, by command."""
REQUIRED = ("broker", "federation", "id", "home", "data", "task", "site_broker", "site_federation")


def flags_of(name: str) -> dict[str, str]:
    """The settings of a command, with their help."""
    command = cli.command.get_command(click.Context(cli.command), name)
    assert command is not None
    return {each.name or "": each.help or "" for each in command.params if isinstance(each, click.Option)}


def settings_of(name: str) -> set[str]:
    """The options of a command that a file and the environment can give, too."""
    command = cli.command.get_command(click.Context(cli.command), name)
    assert command is not None
    return {each.name or "" for each in command.params if isinstance(each, Option) and each.setting}


@pytest.mark.parametrize(("name", "setting"), [(name, each) for name, settings in CODE.items() for each in settings])
def test_code_that_a_file_names_is_not_even_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], name: str, setting: str
) -> None:
    (tmp_path / "of_a_stranger.py").write_text("def run(*_): raise AssertionError('it ran')\n")
    monkeypatch.syspath_prepend(tmp_path)
    needed = dict.fromkeys(flags_of(name).keys() & set(REQUIRED), "a") | {setting: "of_a_stranger:run"}
    lines = [f'{each} = "{value}"' for each, value in needed.items()]
    (file := tmp_path / "settings.toml").write_text("\n".join([f"[{name}]", *lines]))
    assert cli.main([name, "--config", str(file)]) == errors.ConfigError.exit_code
    assert (
        f"{setting} in [{name}] of {file} names code that would be run here: of_a_stranger:run; if you know and trust "
        f"it, say so on the command line: --{setting.replace('_', '-')} of_a_stranger:run\n"
    ) in capsys.readouterr().err
    assert "of_a_stranger" not in sys.modules


def test_no_command_has_another_setting_that_names_code() -> None:
    named = {}
    for name in cli.COMMANDS:
        words = {each: text for each, text in flags_of(name).items() if each in settings_of(name)}
        said = {each for each, text in words.items() if "package.module" in text}
        if found := said | words.keys() & {"task", "model", "method", "methods", "baseline", "steps", "allow"}:
            named[name] = found
    assert named == {name: set(settings) for name, settings in CODE.items()}
