"""Settings of a command: frozen structs, filled from a TOML file, then the environment, then flags; later ones win.

A role describes its settings once, as a frozen msgspec Struct whose fields carry their range and help:

    class CoordinatorSettings(Struct, frozen=True, kw_only=True):
        rounds: Annotated[int, Meta(ge=1), Heading.TRAINING, "Training takes this many rounds."] = 30
        password: Annotated[Secret | None, Heading.BROKER, "This password belongs to the user name."] = None

From that struct come the flags and their help (`settings_options`), the environment variables
(FEDGE_COORDINATOR_ROUNDS), the keys of the section `[coordinator]` in the TOML file, and the checks (`resolve`). A
field without default must be given. A setting that several commands share is such an annotation with a name, so it has
the same heading and text in all of them.
"""

from __future__ import annotations

import math
import os
import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Final, Literal, TypeVar, Union, cast, get_args, get_origin, get_type_hints

import click
import msgspec
from msgspec import Meta, Struct

from fedge.errors import ConfigError
from fedge.system.help import Option, option
from fedge.system.loading import find_code, require_allowed
from fedge.system.text import Heading, suggest_nearest

S = TypeVar("S", bound=Struct)
F = TypeVar("F", bound=Callable[..., Any])

SECTIONS: Final = (
    *("agent", "backup", "broker", "campaign", "check", "collect", "compare", "coordinator", "demo", "devices"),
    *("doctor", "egress", "enrol", "events", "export", "finish", "infer", "install", "introduction", "label"),
    *("method", "methods", "new"),
    *("pause", "provision", "readmit", "relay", "release", "report", "restore", "resume", "retire", "rollout"),
    *("rounds", "sample", "samples", "serve", "simulate", "status", "tune", "ui", "why"),
)
"""Names of the sections that a TOML file may have; one file can serve all roles."""


_OWN_STEP: Final = "write a step of your own, as docs/extending.md says"
NO_SETTINGS: Final[Mapping[str, str]] = {
    **dict.fromkeys(
        ("optimiser", "solver", "optim"), f"it is called optimizer: sgd, adam or adamw; for another {_OWN_STEP}"
    ),
    **dict.fromkeys(
        ("loss", "loss_fn", "criterion", "objective"),
        "the problem says it; with classes it is cross-entropy, with label_smoothing and class_weights; for another "
        f"loss give a problem of your own (docs/python.md), or {_OWN_STEP}",
    ),
    **dict.fromkeys(("scheduler", "lr_scheduler", "lr_schedule"), "it is called schedule: constant, cosine or steps"),
    **dict.fromkeys(("decay", "l2", "weightdecay"), "it is called weight_decay"),
    **dict.fromkeys(("clip", "grad_clip", "max_norm", "max_grad_norm"), "it is called clip_norm"),
    **dict.fromkeys(("beta1", "betas"), "beta1 of adam is called momentum, and beta2 is 0.999"),
    **dict.fromkeys(("smoothing",), "it is called label_smoothing"),
    **dict.fromkeys(("class_weight",), "it is called class_weights: equal or balanced"),
    **dict.fromkeys(
        ("metric", "metrics", "score", "scoring"),
        "results have the usual figures; for others give simulate or compare your function as metric",
    ),
    **dict.fromkeys(
        ("augmentation", "augmentations", "data_augmentation", "transform", "transforms"),
        "it is called augment: flip, crop, rotate, noise, erase, or your own function",
    ),
    **dict.fromkeys(
        ("early_stopping", "early_stop", "earlystopping", "stop_early"),
        "it is called patience: training ends after so many rounds without a better validation score",
    ),
    **dict.fromkeys(
        ("x_test", "y_test", "test_data", "testset", "test_set"), "give x_test and y_test to fedge.Task.from_arrays"
    ),
    **dict.fromkeys(("kind", "problem_type", "task_type", "target_type"), "it is called problem, such as regression"),
    **dict.fromkeys(("lr", "learningrate", "eta"), "it is called learning_rate"),
    **dict.fromkeys(("epochs", "num_epochs", "n_epochs"), "say rounds, and local_epochs for those of a device in each"),
    **dict.fromkeys(("clients", "n_clients", "num_clients", "nodes"), "they are called devices"),
    **dict.fromkeys(("num_rounds", "n_rounds", "iterations"), "they are called rounds"),
    **dict.fromkeys(("strategy", "algorithm", "aggregator"), "it is called method; how it averages: average"),
    **dict.fromkeys(("dataset", "data_set"), "the samples are those of task and data"),
    **dict.fromkeys(("network", "net", "architecture"), "it is called model"),
    **dict.fromkeys(("gpu", "cuda", "device"), "what trains is called train_on: cpu or cuda"),
}
"""Names that people try as settings though no setting has them, each with the advice what to do instead."""


NAME: Final = r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,62}\Z"
Name = Annotated[
    str, Meta(pattern=NAME, extra={"words": "1 to 63 letters, digits, dots, dashes, underscores, the first no sign"})
]
"""Name of a federation, a device or a model, which becomes part of topics, folders and addresses."""
CODE: Final = Meta(extra={"code": "yes"})
"""Mark of a setting that may name code (package.module:name). A TOML file may name only code that a flag or the
environment names, too."""
AtLeastOne = Annotated[int, Meta(ge=1)]
Seconds = Annotated[float, Meta(ge=0, extra={"unit": "s"})]
Duration = Annotated[float, Meta(gt=0, extra={"unit": "s"})]
"""A time in seconds, above 0."""


TopicPrefix = Annotated[
    str,
    Meta(
        pattern=r"^[A-Za-z0-9_.:@-]+(/[A-Za-z0-9_.:@-]+)*\Z",
        max_length=200,
        extra={"words": "levels of a topic such as company/site: letters, digits and any of _.:@- between slashes"},
    ),
]
ClientPrefix = Annotated[
    str, Meta(pattern=r"^[A-Za-z0-9_.:@/-]{1,28}\Z", extra={"words": "1 to 28 letters, digits and any of _.:@/-"})
]
"""`TopicPrefix` and `ClientPrefix` are the prefixes that a broker run by others requires of all topics and client ids
(`fedge.wire.topics.MAX_CLIENT_PREFIX`)."""


class Secret(str):
    """A setting that is never shown, since its repr, also inside that of its struct, masks it."""

    __slots__ = ()

    def __repr__(self) -> str:
        return "'***'"


@dataclass(frozen=True, slots=True)
class Setting:
    """One setting, as flags, documentation and error messages need it."""

    name: str  # "deadline_s": field, and key in TOML
    section: str
    type: Any  # the annotation, with its range
    base: type  # bool, int, float, str, Path, Secret, an Enum, or tuple for a flag that may be repeated
    help: str
    heading: Heading
    unit: str
    words: str  # what a value must look like, in words rather than a regular expression
    default: object  # msgspec.NODEFAULT if the setting must be given
    code: bool  # whether it may name code (`CODE`)

    @property
    def flag(self) -> str:
        """The flag of the command line, such as --deadline-s."""
        return "--" + self.name.replace("_", "-")

    @property
    def environment(self) -> str:
        """The environment variable, such as FEDGE_COORDINATOR_DEADLINE_S."""
        return f"{_format_prefix(self.section)}{self.name.upper()}"


def describe_settings(settings: type[Struct], section: str) -> tuple[Setting, ...]:
    """Return all settings of a struct in order, with those of a base class, which commands share, last.

    Raises:
        TypeError: a field's type cannot be written as one flag.
    """
    hints = get_type_hints(settings, include_extras=True)
    own = vars(settings).get("__annotations__", {})
    fields = sorted(msgspec.structs.fields(settings), key=lambda field: field.name not in own)
    return tuple(_make_setting(field, hints[field.name], section) for field in fields)


def settings_options(settings: type[Struct], section: str) -> Callable[[F], F]:
    """Decorate a click command with one flag per field, and --config.

    The command gets `config: Path | None` and, per field, a keyword that is None unless the flag was given. Pass them
    unchanged to `resolve(Settings, section, config, flags)`.
    """

    def decorate(command: F) -> F:
        for setting in reversed(describe_settings(settings, section)):
            command = _make_option(setting)(command)
        example = describe_settings(settings, section)[0].environment
        config = option(
            "--config",
            heading=Heading.GENERAL,
            type=click.Path(path_type=Path),
            envvar="FEDGE_CONFIG",
            help=f"This TOML file has settings in its section [{section}]. Environment variables such as {example} win "
            "over the file, and options over both.  [env: FEDGE_CONFIG]",
        )
        return config(command)

    return decorate


def resolve(settings: type[S], section: str, config_file: Path | None, flags: Mapping[str, object]) -> S:
    """Read settings from the file, then the environment, then the flags that are not None; later sources win.

    Raises:
        ConfigError: the file cannot be read; a key is unknown (the nearest right one is named); a value has the wrong
            type or range; a setting without default is missing; or the file names code that neither a flag nor the
            environment names.
    """
    known = {setting.name: setting for setting in describe_settings(settings, section)}
    from_file = read_section(config_file, section)
    _refuse_unknown(from_file, known, f"[{section}] of {config_file}")
    variables = _read_environment(section, known)
    by_owner = variables | {name: value for name, value in flags.items() if value is not None}
    trusted = {
        path for name, setting in known.items() if setting.code for path in find_code(str(by_owner.get(name, "")))
    }
    values: dict[str, object] = {}
    for name, setting in known.items():
        if flags.get(name) is not None:
            values[name] = _convert(setting, flags[name], setting.flag)
        elif name in variables:
            values[name] = _convert(setting, variables[name], setting.environment, strict=False)
        elif name in from_file:
            source = f"{name} in [{section}] of {config_file}"
            values[name] = _convert(setting, from_file[name], source)
            if setting.code:
                require_allowed(source, find_code(str(from_file[name])), trusted, setting.flag)
        elif setting.default is msgspec.NODEFAULT:
            raise ConfigError(
                f"{name} is missing: give {setting.flag}, set {setting.environment}, or write it into [{section}] of "
                "the file named by --config"
            )
    return settings(**values)


def resolve_given(settings: type[S], values: Mapping[str, object], beside: Iterable[str] = ()) -> S:
    """Return settings given in Python, checked as by `resolve` but without file and environment.

    `beside` are further arguments of the function that takes them, which an unknown name may have meant.

    Raises:
        ConfigError: a name is unknown (the nearest one is named), a value has the wrong type or range, or a setting
            without default is missing.
    """
    known = {setting.name: setting for setting in describe_settings(settings, "")}
    _refuse_unknown(values, (*known, *beside), "the arguments")
    if missing := [n for n, setting in known.items() if setting.default is msgspec.NODEFAULT and n not in values]:
        raise ConfigError(f"{missing[0]} is missing")
    passed = {name: value for name, value in values.items() if value is not None}
    return settings(**{name: _convert(known[name], value, name) for name, value in passed.items()})


def read_section(config_file: Path | None, section: str) -> dict[str, Any]:
    """Return one section of the TOML file, unchecked, or {} if there is no file or no such section.

    Raises:
        ConfigError: the file cannot be read, or has a section that no command knows.
    """
    if config_file is None:
        return {}
    try:
        document = tomllib.loads(config_file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, RecursionError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"cannot read the configuration {config_file}: {error}") from error
    _refuse_unknown(document, SECTIONS, str(config_file))
    content = document.get(section, {})
    if not isinstance(content, dict):
        raise ConfigError(f"{section} in {config_file} must be a section: [{section}]")
    return content


def _make_setting(field: msgspec.structs.FieldInfo, hint: Any, section: str) -> Setting:
    found = get_annotations(hint)
    help_text = next((each for each in found if isinstance(each, str)), "")
    heading = next((each for each in found if isinstance(each, Heading)), Heading.GENERAL)
    extra = {name: text for each in found if isinstance(each, Meta) for name, text in (each.extra or {}).items()}
    default = field.default if field.default_factory is msgspec.NODEFAULT else field.default_factory()
    notes = extra.get("unit", ""), extra.get("words", "")
    return Setting(
        field.name, section, hint, _get_base_type(hint), help_text, heading, *notes, default, "code" in extra
    )


def get_annotations(hint: Any) -> list[Any]:
    """Return the annotations of a type, including those inside `X | None`."""
    if get_origin(hint) is Annotated:
        return [*hint.__metadata__, *get_annotations(hint.__origin__)]
    return [meta for argument in get_args(hint) for meta in get_annotations(argument)]


def _get_base_type(hint: Any) -> type:
    """Return the plain type inside `Annotated` and `| None`, or an Enum of a Literal's values."""
    if get_origin(hint) is Annotated:
        return _get_base_type(hint.__origin__)
    if get_origin(hint) in (Union, UnionType):
        inner = [argument for argument in get_args(hint) if argument is not NoneType]
        if len(inner) == 1:
            return _get_base_type(inner[0])
    if get_origin(hint) is Literal:
        return cast(type, Enum("Literal", {value: value for value in get_args(hint)}))
    if get_origin(hint) is tuple and get_args(hint) == (str, ...):
        return tuple
    if isinstance(hint, type) and issubclass(hint, bool | int | float | str | Path | Enum):
        return hint
    raise TypeError(f"a setting cannot have the type {hint}")


def _make_option(setting: Setting) -> Callable[[F], F]:
    flag = f"{setting.flag}/--no-{setting.flag[2:]}" if setting.base is bool else setting.flag
    return click.option(
        flag,
        setting.name,
        cls=Option,
        heading=setting.heading,
        setting=True,
        type=_get_click_type(setting.base),
        multiple=setting.base is tuple,
        default=None,
        callback=_drop_empty if setting.base is tuple else None,
        help=_format_help(setting),
    )


def _drop_empty(_context: click.Context, _option: click.Parameter, values: Sequence[str]) -> Sequence[str] | None:
    """Return None for a flag that may be repeated and was not given, as for all other flags."""
    return values or None


def _get_click_type(base: type) -> click.ParamType[Any]:
    if issubclass(base, Enum):
        return click.Choice([str(member.value) for member in base])
    if issubclass(base, Path):
        return click.Path(path_type=Path)
    plain: dict[type, click.ParamType[Any]] = {bool: click.BOOL, int: click.INT, float: click.FLOAT}
    return plain.get(base, click.STRING)


def _format_help(setting: Setting) -> str:
    notes = [f"unit: {setting.unit}"] if setting.unit else []
    if setting.default is msgspec.NODEFAULT:
        notes.append("required")
    elif setting.default not in (None, ()) and setting.base is not Secret:
        value = setting.default.value if isinstance(setting.default, Enum) else setting.default
        notes.append(f"default: {value}")
    return f"{setting.help}  [{'; '.join(notes)}]" if notes else setting.help


def _format_prefix(section: str) -> str:
    return f"FEDGE_{section.upper()}_"


def _read_environment(section: str, known: Mapping[str, Setting]) -> dict[str, str]:
    found = {name: value for name, value in os.environ.items() if name.startswith(_format_prefix(section))}
    names = {setting.environment: name for name, setting in known.items()}
    _refuse_unknown(found, names, "the environment")
    return {names[variable]: value for variable, value in found.items()}


def _refuse_unknown(found: Iterable[str], known: Iterable[str], where: str) -> None:
    right = list(known)
    for key in found:
        if key not in right and (why := NO_SETTINGS.get(key.lower())):
            raise ConfigError(f"unknown key {key} in {where}: {why}")
        if key not in right:
            raise ConfigError(f"unknown key {key} in {where}{suggest_nearest(key, right)}")


def _convert(setting: Setting, value: object, source: str, *, strict: bool = True) -> object:
    if setting.base is tuple and isinstance(value, str):  # of the environment
        value = [each.strip() for each in value.split(",") if each.strip()]
    try:
        found: object = msgspec.convert(value, setting.type, strict=strict, dec_hook=_convert_custom)
    except (msgspec.ValidationError, TypeError, ValueError) as error:
        shown = "" if setting.base is Secret else f", got {value!r}"
        wrong = f"expected {setting.words}" if setting.words and "regex" in str(error) else str(error)
        if issubclass(setting.base, Enum) and isinstance(value, str):
            words = [str(member.value) for member in setting.base]
            wrong, shown = f"{error}: it is one of {', '.join(words)}", suggest_nearest(value, words)
        raise ConfigError(f"{source}: {wrong}{shown}") from error
    if isinstance(found, float) and not math.isfinite(found):
        raise ConfigError(f"{source}: expected a finite number, got {value!r}")
    return found


def _convert_custom(kind: type, value: object) -> object:
    """Convert a string to Path or Secret, which msgspec cannot."""
    if not isinstance(value, str | Path):
        raise TypeError(f"expected a string, got {type(value).__name__}")
    return kind(value)
