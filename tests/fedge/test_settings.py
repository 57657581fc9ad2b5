from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, Literal

import click
import pytest
from click.testing import CliRunner
from msgspec import Meta, Struct

from fedge.errors import ConfigError
from fedge.settings import (
    CODE,
    SECTIONS,
    Name,
    Secret,
    describe_settings,
    read_section,
    resolve,
    resolve_given,
    settings_options,
)
from fedge.system.help import Option
from fedge.system.text import Heading, suggest_nearest


class Colour(StrEnum):
    RED = "red"
    BLUE = "blue"


class Settings(Struct, frozen=True, kw_only=True):
    broker: Annotated[str, "Where it listens."]
    rounds: Annotated[int, Meta(ge=1), Heading.TRAINING, "Rounds to run."] = 30
    deadline_s: Annotated[float, Meta(gt=0, extra={"unit": "s"}), "Time of a round."] = 60.0
    colour: Annotated[Colour, "A choice."] = Colour.RED
    kind: Annotated[Literal["hot", "cold"], "Another choice."] = "hot"
    home: Annotated[Path, "A folder."] = Path("here")
    json: Annotated[bool, "A switch."] = False
    limit: Annotated[Annotated[float, Meta(ge=0)] | None, "May be absent."] = None
    password: Annotated[Secret | None, "Never shown."] = None


@pytest.fixture
def config(tmp_path: Path) -> Path:
    file = tmp_path / "fedge.toml"
    file.write_text('[coordinator]\nbroker = "file"\nrounds = 1\ncolour = "blue"\n[agent]\nid = "cam1"\n')
    return file


def resolved(config: Path | None = None, **flags: object) -> Settings:
    return resolve(Settings, "coordinator", config, flags)


def test_defaults() -> None:
    assert resolved(broker="x") == Settings(broker="x")


def test_file_then_environment_then_flags(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert (resolved(config).broker, resolved(config).rounds) == ("file", 1)
    monkeypatch.setenv("FEDGE_COORDINATOR_ROUNDS", "2")
    assert (resolved(config).broker, resolved(config).rounds) == ("file", 2)
    assert (resolved(config, rounds=3).broker, resolved(config, rounds=3).rounds) == ("file", 3)
    assert resolved(config, rounds=None).rounds == 2


def test_values_from_everywhere_have_the_fields_types(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, text in {"DEADLINE_S": "1.5", "JSON": "true", "HOME": "/x", "LIMIT": "2", "PASSWORD": "pw"}.items():
        monkeypatch.setenv(f"FEDGE_COORDINATOR_{name}", text)
    found = resolved(config)
    assert found == Settings(
        broker="file", rounds=1, colour=Colour.BLUE, deadline_s=1.5, json=True, home=Path("/x"), limit=2.0,
        password=Secret("pw"),
    )  # fmt: skip
    assert isinstance(found.home, Path)
    assert isinstance(found.colour, Colour)


def test_a_missing_setting_says_where_it_can_be_given() -> None:
    with pytest.raises(ConfigError, match=r"--broker.*FEDGE_COORDINATOR_BROKER.*\[coordinator\]"):
        resolved()


def test_unknown_keys_name_the_nearest_right_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "fedge.toml"
    file.write_text("[coordinator]\nround = 3\n")
    with pytest.raises(ConfigError, match=r"unknown key round in \[coordinator\].*did you mean rounds\?"):
        resolved(file)
    file.write_text("[cordinator]\nrounds = 3\n")
    with pytest.raises(ConfigError, match=r"unknown key cordinator.*did you mean coordinator\?"):
        resolved(file)
    monkeypatch.setenv("FEDGE_COORDINATOR_DEADLINE", "3")
    with pytest.raises(ConfigError, match=r"did you mean FEDGE_COORDINATOR_DEADLINE_S\?"):
        resolved(broker="x")


class Own(Struct, frozen=True, kw_only=True):
    task: Annotated[str, CODE, "What is learned."] = "digits"
    steps: Annotated[str, CODE, "Of one's own."] = ""
    allow: Annotated[str, CODE, "What files may name."] = ""


def test_code_in_a_file_is_for_the_command_line_to_allow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def found(content: str, **flags: object) -> Own:
        (tmp_path / "fedge.toml").write_text(f"[agent]\n{content}")
        return resolve(Own, "agent", tmp_path / "fedge.toml", flags)

    told = r"steps in \[agent\] of .*fedge\.toml names code that would be run here: b:D; .* --steps a:C,b:D$"
    with pytest.raises(ConfigError, match=told):
        found('steps = "a:C,b:D"', allow="a:C")
    with pytest.raises(ConfigError, match=r"--steps a:C$"):
        found('allow = "a:C"\nsteps = "a:C"')
    assert found('task = "mnist"').task == "mnist"
    assert found('steps = "a:C,b:D"', allow="a:C,b:D").steps == "a:C,b:D"
    assert found('task = "a:C"', task="b:D").task == "b:D"
    monkeypatch.setenv("FEDGE_AGENT_ALLOW", "a:C")
    assert found('task = "a:C"').task == "a:C"
    monkeypatch.setenv("FEDGE_AGENT_TASK", "c:E")
    assert found('task = "b:D"').task == "c:E"


def test_other_roles_variables_and_sections_are_theirs(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDGE_AGENT_ID", "cam1")
    assert resolved(config).rounds == 1


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('rounds = "3"', "rounds in \\[coordinator\\] of .*Expected `int`.*got '3'"),
        ("rounds = 0", "Expected `int` >= 1"),
        ("rounds = true", "Expected `int`"),
        ('colour = "green"', "Invalid enum value 'green'"),
        ('kind = "warm"', "Invalid enum value 'warm': it is one of hot, cold"),
        ('kind = "colt"', "one of hot, cold \\(did you mean cold\\?\\)"),
        ("home = 3", "expected a string, got int"),
        ("json = 1", "Expected `bool`"),
        ("deadline_s = nan", "Expected `float` > 0"),
    ],
)
def test_values_of_the_wrong_type_or_range_name_their_source(tmp_path: Path, line: str, message: str) -> None:
    file = tmp_path / "fedge.toml"
    file.write_text(f'[coordinator]\nbroker = "x"\n{line}\n')
    with pytest.raises(ConfigError, match=message):
        resolved(file)


def test_environment_and_flags_are_named_too(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"^--rounds: Expected `int` >= 1, got 0$"):
        resolved(broker="x", rounds=0)
    monkeypatch.setenv("FEDGE_COORDINATOR_ROUNDS", "many")
    with pytest.raises(ConfigError, match=r"^FEDGE_COORDINATOR_ROUNDS: Expected `int`.*got 'many'$"):
        resolved(broker="x")


@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_numbers_are_finite(value: float) -> None:
    with pytest.raises(ConfigError, match="--deadline-s: "):
        resolved(broker="x", deadline_s=value)


@pytest.mark.parametrize("content", [b"[coordinator", b"coordinator = 3", b"\xff"])
def test_a_file_that_is_no_configuration(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "bad.toml").write_bytes(content)
    with pytest.raises(ConfigError, match=r"bad\.toml"):
        resolved(tmp_path / "bad.toml")
    with pytest.raises(ConfigError, match=r"none\.toml"):
        resolved(tmp_path / "none.toml")


def test_secrets_are_never_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = resolved(broker="x", password="hunter2")
    assert "hunter2" not in repr(settings)
    assert settings.password == "hunter2"
    with pytest.raises(ConfigError) as caught:
        resolved(broker="x", password=12345)
    assert "12345" not in str(caught.value)


@click.command()
@settings_options(Settings, "coordinator")
def command(config: Path | None, **flags: Any) -> None:
    click.echo(repr(resolve(Settings, "coordinator", config, flags)))


def test_flags_of_every_field() -> None:
    line = "--broker b --rounds 2 --deadline-s 3 --colour blue --home h --json --limit 1 --password p"
    result = CliRunner().invoke(command, line.split())
    expected = Settings(
        broker="b", rounds=2, deadline_s=3.0, colour=Colour.BLUE, home=Path("h"), json=True, limit=1.0,
        password=Secret("p"),
    )  # fmt: skip
    assert result.output.strip() == repr(expected)


def test_what_commands_have_in_common_comes_after_their_own() -> None:
    class More(Settings, frozen=True, kw_only=True):
        own: Annotated[int, "Of this command alone."] = 0

    assert [s.name for s in describe_settings(More, "coordinator")] == [
        "own",
        *(s.name for s in describe_settings(Settings, "agent")),
    ]


def test_a_switch_can_be_turned_off_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDGE_COORDINATOR_JSON", "1")
    assert "json=True" in CliRunner().invoke(command, ["--broker", "b"]).output
    assert "json=False" in CliRunner().invoke(command, ["--broker", "b", "--no-json"]).output


def test_the_file_can_come_from_the_environment(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDGE_CONFIG", str(config))
    assert "broker='file'" in CliRunner().invoke(command, []).output


def test_help_shows_default_unit_and_purpose_of_every_field_and_the_form_of_its_variable() -> None:
    text = " ".join(CliRunner().invoke(command, ["--help"], terminal_width=1000).output.split())
    for setting in describe_settings(Settings, "coordinator"):
        assert setting.flag in text
        assert setting.help in text
    assert "section [coordinator]. Environment variables such as FEDGE_COORDINATOR_BROKER" in text
    assert "default: 60.0" in text
    assert "unit: s" in text
    assert "required" in text


def test_a_setting_stands_under_its_heading_and_others_are_general() -> None:
    headings = {setting.name: setting.heading for setting in describe_settings(Settings, "coordinator")}
    assert headings.pop("rounds") is Heading.TRAINING
    assert set(headings.values()) == {Heading.GENERAL}
    flags = {each.name: each for each in command.params if isinstance(each, Option)}
    assert flags["rounds"].heading is Heading.TRAINING
    assert {name for name, each in flags.items() if not each.setting} == {"config"}


def test_a_type_that_is_no_flag_is_our_own_mistake() -> None:
    class Wrong(Struct, frozen=True):
        names: list[str] = []

    with pytest.raises(TypeError, match="list"):
        describe_settings(Wrong, "coordinator")


def test_nearest() -> None:
    assert suggest_nearest("devcies", ["devices", "rounds"]) == " (did you mean devices?)"
    assert suggest_nearest("zzz", ["devices", "rounds"]) == ""


def test_there_is_a_section_for_every_command() -> None:
    from fedge.commands.cli import COMMANDS

    assert set(COMMANDS) <= set(SECTIONS)


def test_a_name_that_is_none_is_refused_in_words() -> None:
    class Named(Struct, frozen=True, kw_only=True):
        id: Annotated[Name, "A name."]

    assert resolve(Named, "agent", None, {"id": "cam-1.b"}).id == "cam-1.b"
    for wrong in ("a/b", "", "-x", "a" * 64):
        with pytest.raises(ConfigError, match=r"^--id: expected 1 to 63 letters, digits.*, got '"):
            resolve(Named, "agent", None, {"id": wrong})


def test_settings_given_in_python_are_checked_as_flags_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDGE_COORDINATOR_ROUNDS", "7")
    assert resolve_given(Settings, {"broker": "x", "limit": None}) == Settings(broker="x"), (
        "the environment is for commands"
    )
    for values, words in (
        ({"broker": "x", "rouds": 2}, "did you mean rounds"),
        ({"broker": "x", "rounds": 0}, "rounds: Expected"),
        ({}, "broker is missing"),
    ):
        with pytest.raises(ConfigError, match=words):
            resolve_given(Settings, values)


def test_lists_in_lists_without_end_are_a_line_not_a_traceback(tmp_path):
    (tmp_path / "deep.toml").write_text("a = " + "[" * 20_000 + "]" * 20_000)

    with pytest.raises(ConfigError, match="cannot read the configuration"):
        read_section(tmp_path / "deep.toml", "serve")
