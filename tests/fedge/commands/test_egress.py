"""`fedge egress`: the ledger and the rules for people and for programs."""

from __future__ import annotations

import json
from pathlib import Path

from click.testing import CliRunner

from fedge.commands.cli import main
from fedge.commands.egress import egress
from fedge.privacy.ledger import Ledger
from fedge.steps.contract import Reveals


def noted(home: Path) -> Path:
    book = Ledger(home)
    book.record("context", "", ["load"], 60)
    book.record("context", "", ["load"], 61)
    book.record("reports", "train r.3.train.cam1", ["update", "count", "of_a_newer_fedge"], 1234)
    book.close()
    return home


def said(*arguments: object) -> list[str]:
    result = CliRunner().invoke(egress, list(map(str, arguments)))
    assert result.exit_code == 0, result.output
    return result.stdout.splitlines()


def test_what_left_is_told_in_bytes_and_in_words(tmp_path: Path) -> None:
    context, report, total = said(noted(tmp_path))
    assert "2 x          121 bytes  state of the machine: how busy it is, and how fast" in context
    assert (
        "1,234 bytes  report of train, order r.3.train.cam1: a number of samples, of_a_newer_fedge, a model" in report
    )
    assert total == "2 of 2 lines; 3 messages, 1,355 bytes in all"
    assert said(tmp_path, "--last", 1)[0] == report


def test_programs_read_every_line(tmp_path: Path) -> None:
    first, second = map(json.loads, said(noted(tmp_path), "--last", 1, "--json"))
    assert (first["message"], first["n"], first["bytes"], first["kinds"]) == ("context", 2, 121, ["load"])
    assert second["about"] == "train r.3.train.cam1"


def test_rules_list_each_field_under_its_kind_and_what_the_owner_makes_of_it(tmp_path: Path) -> None:
    (tmp_path / "egress.toml").write_text('[egress]\nforbid = "profile"\n')
    listed = {row["kind"]: row for row in map(json.loads, said(tmp_path, "--rules", "--json"))}
    assert set(listed) == set(Reveals)
    assert listed["profile"]["fields"] == ["profile: profile", "profile: halves"]
    assert [listed["profile"][name] for name in ("strict", "default", "here")] == [False, True, False]
    assert [listed["update"][name] for name in ("strict", "default", "here")] == [True, True, True]
    assert any(line.startswith("profile   strict: no   default: yes  here: no") for line in said(tmp_path, "--rules"))


def test_a_home_that_is_none_and_a_wrong_file_are_wrong_usage(tmp_path: Path) -> None:
    assert main(["egress", str(tmp_path / "nowhere")]) == 2
    (tmp_path / "egress.toml").write_text("[egress]\nforbid = 1\n")
    assert main(["egress", str(tmp_path), "--rules"]) == 2
