"""What the page shows of a federation: flat rows of the state, and accuracy over the rounds."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any, Final

import numpy as np

from coordinator.page.differences import flatten
from coordinator.store.requests import ACTIONS
from coordinator.watch.accuracy import Measured, find_figure
from fedge.data.problems.scores import ACCURACY

TABLES: Final = ("fleet", "devices", "rounds", "history")
UNSEEN: Final = frozenset(
    {
        *("labels", "context.type", "context.device_id", "context.at", "context.n_samples", "accuracy"),
        *("of_bundle", "of_bundle.accuracy", "of_bundle.n", "of_bundle.release"),
    }
)
"""Fields of devices and rounds that the page leaves out, or shows otherwise."""
MAX_POINTS: Final = 200
"""Most points of a line in a chart."""
SHARES: Final = (0.1, 0.5, 0.9)
"""Quantiles over the devices that a chart shows."""


def make_tables(state: Mapping[str, Any]) -> dict[str, dict[str, dict[str, Any]]]:
    """Make the page's tables from the state (`coordinator.watch.state.Watch.get_state`)."""
    apart = {"devices", "rounds_list", "history"}
    fleet = {name: value for name, value in state.items() if name not in apart} | {"actions": sorted(ACTIONS)}
    if (figure := find_figure(state)) != ACCURACY:
        fleet["score"] = {"words": figure.words, "share": figure.share}
    return {
        "fleet": {"": fleet},
        "devices": {device["id"]: _make_device(device) for device in state["devices"]},
        "rounds": {str(row["round"]): _make_row(row) | {"accuracy": row["accuracy"]} for row in state["rounds_list"]},
        "history": {str(row["round"]): {n: row[n] for n in ("round", "accuracy")} for row in state["history"]},
    }


def _make_row(values: Mapping[str, Any]) -> dict[str, Any]:
    shown = {name: value for name, value in values.items() if name not in UNSEEN}
    return {name: value for name, value in flatten(shown) if name not in UNSEEN}


def _make_device(device: Mapping[str, Any]) -> dict[str, Any]:
    """Make a device's row; of its accuracies only the last one travels with each refresh."""
    number, share = device["accuracy"][-1] if device["accuracy"] else (None, None)
    context = {
        name: round(value, 2) if isinstance(value, float) else value
        for name, value in (device["context"] or {}).items()
    }
    shown = device["shown"] or {}
    if shown.get("of") == Measured.TRAINING:  # it travels already
        shown = {}
    return _make_row({**device, "context": context, "shown": shown}) | {"accuracy": share, "accuracy_round": number}


def make_series(devices: Iterable[Mapping[str, Any]], names: Iterable[str]) -> dict[str, Any]:
    """Return accuracy over the rounds: quantiles of all devices ("band"), and the points of those that are named."""
    of = {device["id"]: device["accuracy"] for device in devices}
    band = compute_band([point for points in of.values() for point in points])
    return {"band": band, "of": {name: of[name] for name in names if name in of}}


def compute_band(points: Iterable[tuple[int, float]]) -> list[list[float]]:
    """Compute quantiles (`SHARES`) of figures by round; if there are many rounds, neighbours count as one."""
    found: defaultdict[int, list[float]] = defaultdict(list)
    for number, share in points:
        found[number].append(share)
    step = -(-len(found) // MAX_POINTS)
    rounds = sorted(found)
    band = []
    for k in range(0, len(rounds), max(step, 1)):
        together = rounds[k : k + step]
        quantiles = np.quantile([share for number in together for share in found[number]], SHARES)
        band.append([together[-1], *(round(float(x), 4) for x in quantiles)])
    return band
