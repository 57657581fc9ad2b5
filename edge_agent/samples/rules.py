"""The owner's rules for the samples that a device keeps, from HOME/samples.toml.

[samples]
max_mb = 500
sensitive_classes = "face, person"
sensitive_when = "my_rules:is_private"
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Annotated, Any, Final

from msgspec import Meta, Struct
from numpy.typing import NDArray

from fedge.errors import ConfigError
from fedge.settings import AtLeastOne, resolve
from fedge.system.loading import FAILURES, describe_error, load_object
from fedge.system.text import suggest_nearest

FILE: Final = "samples.toml"
Predicate = Callable[[NDArray[Any], "str | None", str], object]
"""(raw sample, name of its class, or of its labels with commas, or None, origin) -> whether the sample is sensitive."""


class SampleSettings(Struct, frozen=True, kw_only=True):
    """Section [samples] of HOME/samples.toml."""

    max_mb: Annotated[
        float,
        Meta(gt=0, extra={"unit": "MB"}),
        "Labelled samples take this much of the disk, and sensitive ones as much again.",
    ] = 500.0
    per_class: Annotated[AtLeastOne, "At most this many samples of a class are kept, and of sensitive ones again."] = (
        5000
    )
    keep_old: Annotated[
        float,
        Meta(ge=0, le=1),
        "This share of a full class stays an even choice of all that ever came; the rest are the newest.",
    ] = 0.5
    unlabelled: Annotated[
        int, Meta(ge=0), "This many inputs without a label are kept, for `fedge label` and for drift; none by default."
    ] = 0
    sensitive_folders: Annotated[
        str,
        "Samples whose origin is below one of these folders, comma-separated, are sensitive; * stands for any text.",
    ] = ""
    sensitive_classes: Annotated[str, "Samples of these classes, comma-separated, are sensitive."] = ""
    sensitive_when: Annotated[
        str, "This function, package.module:name, is called with (x, class, origin); if true, the sample is sensitive."
    ] = ""


@dataclass(frozen=True, slots=True)
class Rules:
    """Limits, and what is sensitive."""

    settings: SampleSettings
    folders: tuple[str, ...]
    classes: tuple[str, ...]
    predicate: Predicate | None

    @property
    def max_bytes(self) -> int:
        """Most bytes of labelled samples, and again of sensitive ones."""
        return int(self.settings.max_mb * 1e6)

    def is_sensitive(self, x: NDArray[Any], names: Sequence[str], origin: str) -> bool:
        """Return whether a raw sample of some classes or labels, none without a target, is sensitive by rule.

        Raises:
            ConfigError: the owner's function fails; the sample must not count as free of marks.
        """
        folder = origin.partition(":")[2]
        if not set(self.classes).isdisjoint(names) or any(
            fnmatch(folder, pattern) or fnmatch(folder, f"{pattern}/*") for pattern in self.folders
        ):
            return True
        if self.predicate is None:
            return False
        try:
            return bool(self.predicate(x, ", ".join(names) or None, origin))
        except FAILURES as error:
            raise ConfigError(f"{self.settings.sensitive_when} of {FILE} fails: {describe_error(error)}") from error


def read_rules(home: Path) -> Rules:
    """Read the owner's rules; without a file, the defaults.

    Raises:
        ConfigError: the file is wrong, or there is no such function.
    """
    file = home / FILE
    settings = resolve(SampleSettings, "samples", file if os.path.lexists(file) else None, {})
    predicate = load_object(settings.sensitive_when) if settings.sensitive_when else None
    if predicate is not None and not callable(predicate):
        raise ConfigError(f"sensitive_when in {file}: {settings.sensitive_when} is no function")
    return Rules(settings, split_words(settings.sensitive_folders), split_words(settings.sensitive_classes), predicate)


def require_classes(rules: Rules, classes: Sequence[str]) -> None:
    """Refuse rules on classes that the task does not have, since a typo must not lose the marks.

    Raises:
        ConfigError: there is such a rule.
    """
    for name in rules.classes:
        if name not in classes:
            raise ConfigError(f"sensitive_classes in {FILE}: {name} is no class{suggest_nearest(name, classes)}")


def split_words(text: str) -> tuple[str, ...]:
    """Return the words of a comma-separated setting."""
    return tuple(word.strip().rstrip("/") for word in text.split(",") if word.strip())
