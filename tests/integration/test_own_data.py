"""Data of the user's own, from the files to a device's predictions."""

from __future__ import annotations

import csv
import json
import subprocess
import sys
from pathlib import Path

import numpy as np

SCHEMA = """
target = "kind"
classes = ["round", "long"]
sensitive = "private"
[[columns]]
name = "width"
mean = 5.0
std = 2.0
missing = 5.0
[[columns]]
name = "place"
categories = ["in", "out"]
"""


def fedge(folder: Path, *words: str) -> str:
    """What a command says, run in a folder."""
    ran = subprocess.run(
        [sys.executable, "-m", "fedge", *words], cwd=folder, capture_output=True, text=True, check=False
    )
    assert ran.returncode == 0, ran.stderr
    return ran.stdout


def test_a_table_is_learned_and_rows_of_it_are_predicted(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    with (tmp_path / "rows.csv").open("w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(["width", "place", "kind", "private"])
        for kind in rng.integers(0, 2, 300):
            width = rng.normal(3 + 4 * kind)
            rows.writerow([f"{width:.2f}", rng.choice(["in", "out"]), ["round", "long"][kind], rng.integers(0, 2)])
    (tmp_path / "fruit.toml").write_text(SCHEMA)
    fedge(tmp_path, "simulate", "--task", "fruit.toml", "--data", "rows.csv", "--devices", "3", "--rounds", "3",
          "--method", "fedavg", "--out", "run")  # fmt: skip
    (bundle,) = (tmp_path / "run/device-0/bundles").glob("[0-9]*")
    (tmp_path / "new.csv").write_text("width,place,private\n2.5,in,0\n,out,0\n8,out,0\n")
    answer = json.loads(fedge(tmp_path, "infer", str(bundle), "new.csv", "--json"))
    assert answer["class_names"][::2] == ["round", "long"]
    assert json.loads(fedge(tmp_path, "infer", str(bundle), "rows.csv", "--json"))["accuracy"] > 0.85
