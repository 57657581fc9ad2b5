"""The alert rules fire for what needs attention, and for nothing else (`promtool` says so)."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from coordinator.page.metrics import iterate_metrics
from coordinator.watch.attention import Kind
from coordinator.watch.state import Watch
from tests.support.shop import make_shop

ALERTS = Path(__file__).parents[2] / "examples" / "alerts"
PROMTOOL = shutil.which("promtool")


@pytest.mark.skipif(PROMTOOL is None, reason="promtool is not installed")
@pytest.mark.parametrize("words", [("check", "rules", "fedge.rules.yml"), ("test", "rules", "fedge.test.yml")])
def test_the_rules_pass_their_own_test(words: tuple[str, ...]) -> None:
    assert PROMTOOL is not None
    done = subprocess.run([PROMTOOL, *words], cwd=ALERTS, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_rules_name_metrics_and_kinds_that_exist(tmp_path: Path) -> None:
    text = (ALERTS / "fedge.rules.yml").read_text()
    store = make_shop(tmp_path)
    known = {metric.name for metric in iterate_metrics(Watch(tmp_path, store).get_state())}
    store.close()
    assert set(re.findall(r"\b(fedge_\w+)", text)) <= known
    kinds = {kind for found in re.findall(r'kind!?[=~]+"([^"]+)"', text) for kind in found.split("|")}
    assert kinds <= set(Kind)
