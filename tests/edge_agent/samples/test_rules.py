"""What the owner wants is read from HOME/samples.toml; a typo loses no mark."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from edge_agent.samples.rules import read_rules, require_classes
from fedge.errors import ConfigError

X = np.zeros(3, np.float32)


def test_without_a_file_nothing_is_sensitive(tmp_path: Path) -> None:
    found = read_rules(tmp_path)
    assert not found.is_sensitive(X, ["cat"], "folder:porch/1.png")
    assert found.settings.unlabelled == 0


def test_samples_below_a_folder_are_sensitive(tmp_path: Path) -> None:
    (tmp_path / "samples.toml").write_text('[samples]\nsensitive_folders = "porch, night/*/faces"\n')
    found = read_rules(tmp_path)
    inside = ("folder:porch/1.png", "folder:porch/a/1.png", "folder:night/7/faces/2.png")
    assert all(found.is_sensitive(X, ["cat"], origin) for origin in inside)
    assert not any(
        found.is_sensitive(X, ["cat"], origin) for origin in ("folder:porches/1.png", "http", "folder:1.png")
    )


def test_samples_of_a_class_are_sensitive(tmp_path: Path) -> None:
    (tmp_path / "samples.toml").write_text('[samples]\nsensitive_classes = "face, person"\n')
    found = read_rules(tmp_path)
    assert [found.is_sensitive(X, names, "http") for names in (["face"], ["person"], ["cat"], [])] == [1, 1, 0, 0]
    with pytest.raises(ConfigError, match=r"person is no class .did you mean persons"):
        require_classes(found, ["face", "persons"])


def test_the_owners_function_decides_and_must_not_fail(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "their_rules.py").write_text(
        "def bright(x, name, origin):\n    return x.mean() > 1\ndef broken(x, name, origin):\n    return x.nothing\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "samples.toml").write_text('[samples]\nsensitive_when = "their_rules:bright"\n')
    found = read_rules(tmp_path)
    assert (found.is_sensitive(X + 2, [], "mqtt"), found.is_sensitive(X, [], "mqtt")) == (True, False)
    (tmp_path / "samples.toml").write_text('[samples]\nsensitive_when = "their_rules:broken"\n')
    with pytest.raises(ConfigError, match=r"their_rules:broken of samples\.toml fails"):
        read_rules(tmp_path).is_sensitive(X, [], "mqtt")


def test_a_misspelt_rule_is_refused(tmp_path: Path) -> None:
    (tmp_path / "samples.toml").write_text('[samples]\nsensitive_class = "face"\n')
    with pytest.raises(ConfigError, match=r"did you mean sensitive_classes"):
        read_rules(tmp_path)
