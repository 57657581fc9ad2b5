"""Options of a method on the command line and in the configuration: `--option NAME=VALUE`, the table [method]."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Final, TypeVar

import click

from coordinator.methods.catalogue import get_installed_methods, load_method_class
from coordinator.methods.option_values import PARTS, list_code, parse_options
from coordinator.methods.settings import Option
from fedge.errors import ConfigError
from fedge.settings import read_section
from fedge.system.files import require_writable, write_atomically
from fedge.system.help import option
from fedge.system.loading import FINE_TUNED, require_allowed
from fedge.system.text import Heading

F = TypeVar("F", bound=Callable[..., Any])
STDOUT: Final = Path("-")


def method_options(command: F) -> F:
    """Add `--option`, which may be given several times, to a click command."""
    return option(
        "--option",
        "options",
        heading=Heading.METHOD,
        multiple=True,
        metavar="NAME=VALUE",
        help="This sets an option of the method, as in the table [method] of the TOML file; it may be repeated.",
    )(command)


def json_option(command: F) -> F:
    """Add `--json FILE` to a click command, checked before work begins. With -, other text goes to stderr."""
    return option(
        "--json",
        "json_file",
        heading=Heading.OUTPUT,
        type=click.Path(path_type=Path, allow_dash=True),
        callback=_require_writable,
        help="The figures are also written to this file, or to standard output if it is -.",
    )(command)


def _require_writable(_: click.Context, __: click.Parameter, file: Path | None) -> Path | None:
    if file not in (None, STDOUT):
        require_writable(file)
    return file


def write_json(file: Path | None, figures: bytes) -> None:
    """Write the figures where `--json` says: to a file, standard output, or nowhere.

    Raises:
        StoreError: the file cannot be written.
    """
    if file == STDOUT:
        click.echo(figures)
    elif file is not None:
        write_atomically(file, figures)


def resolve_options(config: Path | None, pairs: Iterable[str]) -> dict[str, Option]:
    """Read the table [method] of the file, overridden by NAME=VALUE pairs, which the method itself checks.

    Raises:
        ConfigError: the file cannot be read, a pair has no "=", or a value in the file is not a number, text or
            boolean, or names code that no pair names.
    """
    given = parse_pairs(pairs)
    found: dict[str, Option] = {}
    for name, value in read_section(config, "method").items():
        if not isinstance(value, int | float | str | bool):
            raise ConfigError(f"{name} in [method] of {config} must be a number, a text, true or false")
        found[name] = value
    for name in found.keys() & PARTS.keys() - given.keys():
        code = [f"{name}={path}" for path in list_code({name: found[name]})]
        require_allowed(f"{name} in [method] of {config}", code, (), "--option")
    return found | given


def parse_pairs(pairs: Iterable[str]) -> dict[str, Option]:
    """Parse NAME=VALUE texts to a dictionary; numbers and booleans are converted, the rest stays text.

    Raises:
        ConfigError: a text has no name or no "=".
    """
    options: dict[str, Option] = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not name.strip() or not equals:
            raise ConfigError(f"an option of a method is NAME=VALUE, not {pair!r}")
        options[name.strip()] = parse_value(value.strip())
    return options


def parse_value(text: str) -> Option:
    """Return a number or boolean if the text looks like one, otherwise the text."""
    if text.lower() in {"true", "false"}:
        return text.lower() == "true"
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def parse_method(text: str) -> tuple[str, dict[str, Option]]:
    """Split a method from its options after colons: "fedepc:clustering=k-means", "module:Class:option=value".

    A selection or clustering may be code, too: "fedavg:selection=module:function".

    Raises:
        ConfigError: an option is not NAME=VALUE.
    """
    name, *pairs = text.strip().split(":")
    if pairs and "=" not in pairs[0] and name.removesuffix(FINE_TUNED) not in get_installed_methods():
        name = f"{name}:{pairs.pop(0)}"
    return name, parse_pairs(join_paths(pairs))


def join_paths(words: Iterable[str]) -> list[str]:
    """Join words between colons to NAME=VALUE, since the value may be package.module:name.

    Example:
        >>> join_paths(["selection=mine.rules", "largest", "top=1"])
        ['selection=mine.rules:largest', 'top=1']
    """
    pairs: list[str] = []
    for word in words:
        if pairs and "=" not in word and pairs[-1].partition("=")[0].strip() in PARTS:
            pairs[-1] += f":{word.strip()}"
        else:
            pairs.append(word)
    return pairs


def require_method_options(name: str, options: Mapping[str, Option]) -> None:
    """Refuse an unknown method or option before anything is started.

    Raises:
        ConfigError: there is no such method, option or value.
    """
    parse_options(load_method_class(name), options)
