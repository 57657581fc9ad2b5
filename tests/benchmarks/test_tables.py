"""One cheap cell of each results page, made again as its command makes it: the code still gives what the page says.

The bounds are those within which the pages call figures equal. Runs are deterministic, but other processors round
otherwise, and a round that goes on from another last bit ends elsewhere.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import numpy as np
import pytest

ROOT = Path(__file__).parent.parent.parent
DATA = ROOT.parent / "shared" / "data"


def told(page: str, row: tuple[str, ...], column: str, after: str) -> float:
    """The first number of a cell, in the first table with that column behind the words `after`."""
    text = (ROOT / "docs/results" / page).read_text(encoding="utf-8")
    lines = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in text[text.index(after) :].splitlines()
        if line.startswith("|")
    ]
    head = next(n for n, cells in enumerate(lines) if column in cells)
    cells = next(cells for cells in lines[head:] if tuple(cells[: len(row)]) == row)
    return float(cells[lines[head].index(column)].strip("*").split()[0])


def compared(script: ModuleType, label: str, method: str, fields: dict[str, object], out: Path) -> list[object]:
    """Three runs, as the scripts that compare methods make them."""
    arguments = argparse.Namespace(
        data=DATA, seeds="0,1,2", jobs=1, train_on="cpu", out=out, metrics=False, quick=False, settings=None
    )
    return script.measure(label, [method], fields, arguments)[method]  # type: ignore[no-any-return]


def of_cfic(out: Path) -> float:
    script = importlib.import_module("cfic")
    column = "skew 0.5, lr 0.1"
    runs = compared(script, column, "fedavg", script.SETTINGS["digits"][column], out)
    return float(script.over_seeds(runs, script.final).mean())


def of_pm_moe(out: Path) -> float:
    script = importlib.import_module("pm_moe")
    column = "digits, alpha 0.1"
    runs = compared(script, column, "fedper", script.SETUPS["A"][column], out)
    return float(script.over_seeds(runs, script.points).mean())


def of_scmoe_pfl(out: Path) -> float:
    script = importlib.import_module("scmoe_pfl")
    runs = compared(script, "digits 0.5", "scmoe-pfl", script.SETTINGS["digits 0.5"], out)
    return float(100 * script.over_seeds(runs, lambda run: run.accuracy).mean())


def of_fedepc(out: Path) -> float:
    script = importlib.import_module("fedepc")
    how, rate = script.SETTINGS["dirichlet 0.5"]
    found = []
    for seed in range(3):
        federation = script.Federation(script.Digits(seed), seed, how, out / str(seed))
        curve, _ = asyncio.run(script.learn(federation, "fedavg", script.settings_of(seed, 60, rate)))
        found.append(curve[-1][1])
    return float(np.mean(found))


def of_fedcoe(out: Path) -> float:
    script = importlib.import_module("fedcoe")
    trials = [
        script.Trial(script.MNIST, DATA, 0.1, seed, 1, out / str(seed), script.Processor.CPU) for seed in (0, 1, 2)
    ]
    return float(100 * np.mean([trial.of_one_model(trial.server_model(), tune=False).overall for trial in trials]))


def of_attacks(out: Path) -> float:
    script = importlib.import_module("attacks")
    case = script.Case("fedavg", "clipped", "x100", 0.2, 0.5, 0, 10)
    return float(script.of_honest(case, {case: script.run(case, out)}))


def of_fedge(out: Path) -> float:
    script = importlib.import_module("default_method")
    arguments = argparse.Namespace(
        data=None, seeds="40,41,42", jobs=1, out=out, methods=["fedge"], model=None, table="everybody", rounds=None,
        rivals_train_on_validation=False,
    )  # fmt: skip
    (found,) = script.measure("digits, alpha 0.5", arguments).methods
    return float(100 * found.accuracy.mean)


class Cell(NamedTuple):
    """A cell of a page, behind the words `after`; what makes it again, and by how much that may differ."""

    page: str
    row: tuple[str, ...]
    column: str
    made: Callable[[Path], float]
    within: float
    after: str = ""
    data: str | None = None


CELLS = (
    Cell("cfic.md", ("FedAvg",), "skew 0.5, lr 0.1", of_cfic, 0.01),
    Cell("pm_moe.md", ("FedPer",), "base", of_pm_moe, 0.5),
    Cell("scmoe_pfl.md", ("**SCMoE default**",), "digits 0.5", of_scmoe_pfl, 1.0),
    Cell("fedepc.md", ("FedAvg",), "Dirichlet 0.5", of_fedepc, 0.01),
    Cell("fedcoe.md", ("D_s alone",), "global", of_fedcoe, 1.0, data="mnist"),
    Cell("attacks.md", ("fedavg", "0.5", "clipped"), "x100", of_attacks, 1.0, after="Two of ten:"),
    Cell("fedge.md", ("digits, alpha 0.5",), "fedge", of_fedge, 0.5),
)

SMOKE = "fedge.md"
"""The page of which `make test-all` makes a cell; `make figures` makes one of each."""


@pytest.mark.statistical
@pytest.mark.parametrize(
    "cell",
    [pytest.param(cell, id=cell.page, marks=[] if cell.page == SMOKE else [pytest.mark.figures]) for cell in CELLS],
)
def test_a_cell_of_each_page_is_what_its_command_gives(
    cell: Cell, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if cell.data and not (DATA / cell.data).exists():
        pytest.skip(f"it needs {cell.data} in {DATA}")
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks" / "papers"))
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    assert cell.made(tmp_path) == pytest.approx(told(cell.page, cell.row, cell.column, cell.after), abs=cell.within)
