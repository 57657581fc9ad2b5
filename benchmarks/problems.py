"""Problems beyond one class for each sample: fedge and its rivals on numbers, several labels, masks and anomalies.

Rows (docs/results/problems.md): arrival delays of flights by airport, 40 with about 80 flights each and 89 with about
460; the same with a constant of each airport's own; 14 labels of yeast genes; digits in pictures, pixel by pixel, by
cameras that are turned; what is not as usual in movements (an activity that nobody does in training; also learned with
Adam), in voices (a speaker whom nobody knows) and on a shuttle, without labels; and which library a docstring is from,
by hashed n-grams.

Figures are those of the devices' own bundles in ONNX Runtime on their own test samples, mean over devices, then over
seeds, in per cent. Differences to fedge are paired by seed; +- is the standard error of their mean over the seeds.
False alarms are the share of usual test samples above a bundle's threshold, which is set for 5 %.

Runs that are done are kept in --out; the same command goes on where it was.

    python benchmarks/problems.py --data DIR --out FOLDER
    python benchmarks/problems.py --data DIR --out FOLDER --rows "flights, 40" --seeds 0 --methods fedge,fedavg
    python benchmarks/problems.py --data DIR --out FOLDER --quick
"""

from __future__ import annotations

import ast
import logging
import zlib
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from script import finish, markdown, parser_of, progress_of, several

import fedge
from coordinator.simulation.interface import Simulation
from fedge.data.task import TaskSpec
from fedge.system.files import write_atomically
from fedge.tasks import Task
from fedge.tasks.pool import load_pool

OURS: Final = "fedge"
METHODS: Final = ("local", "fedavg", "fedavg+ft", "ditto", OURS)
AIRPORTS: Final = 89
LIBRARIES: Final = ("numpy", "scipy", "sklearn", "torch", "sympy", "networkx")
"""Libraries whose docstrings are the texts; PyTorch or scikit-learn bring them all."""
TOKENS, WORDS = 4096, 64
"""Number of different hashed n-grams, and of those that are kept of a text."""
SIDE: Final = 32
QUICK: Final = {"rounds": 3}


class Row(NamedTuple):
    """How a task is made from a folder, a seed and a number of samples; its run; names of the figures to show."""

    make: Callable[[Path, int, int], Task]
    figures: tuple[str, ...]
    run: dict[str, Any]
    samples: int
    quick: int


def make_flights(data: Path, seed: int, per_airport: int, n_airports: int, offset: float) -> Task:
    """Delays at some airports; `offset`: deviation of the airports' own constants, in deviations of the delays."""
    with np.load(data / "flights" / "flights.npz") as found:
        x, y, user = found["x"], found["y"].astype(np.float64), found["user"]
    rng = np.random.default_rng(seed)
    chosen = rng.permutation(AIRPORTS)[:n_airports]
    kept = np.concatenate([rng.permutation(np.flatnonzero(user == airport))[:per_airport] for airport in chosen])
    own = offset * y.std() * rng.normal(size=AIRPORTS)
    return Task.from_arrays(x[kept], (y + own[user][:, np.newaxis])[kept], problem="regression", users=user[kept])


def make_yeast(data: Path, seed: int, n: int) -> Task:
    """Genes and their functions."""
    with np.load(data / "yeast" / "yeast.npz") as found:
        x, y = found["x"], found["y"]
    kept = np.random.default_rng(seed).permutation(len(x))[:n]
    return Task.from_arrays(x[kept], y[kept], problem="multi-label")


def make_masks(data: Path, seed: int, n: int) -> Task:
    """Digits somewhere on a canvas; each pixel is of the background or of a digit."""
    pool = load_pool("mnist", data, seed=seed, limit=n)
    rng = np.random.default_rng(seed)
    x = np.zeros((n, 1, SIDE, SIDE), np.uint8)
    y = np.zeros((n, SIDE, SIDE), np.int64)
    for k, (digit, label) in enumerate(zip(pool.x.reshape(n, 28, 28), pool.y, strict=True)):
        top, left = rng.integers(0, SIDE - 28 + 1, 2)
        x[k, 0, top : top + 28, left : left + 28] = digit
        y[k, top : top + 28, left : left + 28] = np.where(digit > 96, label + 1, 0)
    names = ("background", *"0123456789")
    return Task.from_arrays(x, y, problem="segmentation", classes=names, model=Decoder)


def make_movements(data: Path, seed: int, n: int) -> Task:
    """People's movements, of which one activity is unusual."""
    pool = load_pool("uci-har", data / "uci-har", seed=seed, limit=n)
    return Task.from_arrays(pool.x, pool.y == seed % 6, problem="reconstruction", users=pool.user, block=pool.block)


def make_voices(data: Path, seed: int, n: int) -> Task:
    """Spoken digits of some people; the recordings of one more, dealt out over their devices, are unusual."""
    pool = load_pool("spoken-digits", data / "fsdd", seed=seed, limit=n)
    assert pool.user is not None
    people, strange = int(pool.user.max()) + 1, pool.user == seed % 6
    others = np.random.default_rng(seed).permutation([p for p in range(people) if p != seed % 6])
    user = np.where(strange, others[np.arange(len(strange)) % len(others)], pool.user)
    return Task.from_arrays(pool.x, strange, problem="reconstruction", users=user)


def make_shuttle(data: Path, seed: int, n: int, n_devices: int = 20) -> Task:
    """Readings in order of time, of which each device has a stretch; anomalies are marked."""
    with np.load(data / "shuttle" / "shuttle.npz") as found:
        x, marks = found["x"], found["anomaly"]
    kept = np.sort(np.random.default_rng(seed).permutation(len(x))[:n])
    stretch = kept * n_devices // len(x)
    return Task.from_arrays(x[kept], marks[kept], problem="reconstruction", users=stretch)


def make_texts(data: Path, seed: int, n: int) -> Task:  # noqa: ARG001 - the texts are those of installed packages
    """First paragraphs of docstrings; the class is the library."""
    rng = np.random.default_rng(seed)
    texts, y = [], []
    for label, library in enumerate(LIBRARIES):
        found = sorted(set(list_docstrings(library)))
        kept = [found[k] for k in rng.permutation(len(found))[: n // len(LIBRARIES)]]
        texts += kept
        y += [label] * len(kept)
    x = np.stack([hash_text(text) for text in texts])
    return Task.from_arrays(x, np.array(y), classes=LIBRARIES, model=EmbeddingBag)


def list_docstrings(library: str) -> Iterator[str]:
    """The first paragraphs of a library's docstrings, without the library's name."""
    found = find_spec(library)
    assert found is not None
    assert found.origin is not None
    for file in sorted(Path(found.origin).parent.rglob("*.py")):
        if "tests" in file.parts:
            continue
        try:
            tree = ast.parse(file.read_text(encoding="utf-8"))
        except SyntaxError:  # that of a newer Python
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.ClassDef) and (text := ast.get_docstring(node)):
                first = text.split("\n\n")[0].lower().replace(library, "")
                if len(first) >= 60:
                    yield first


def hash_text(text: str) -> NDArray[np.int64]:
    """Return the first words and three-letter pieces of a text as numbers 1 to `TOKENS` - 1, and 0 at the end."""
    words = text.split()
    pieces = words + [f" {word} "[k : k + 3] for word in words for k in range(len(word))]
    found = [1 + zlib.crc32(piece.encode()) % (TOKENS - 1) for piece in pieces[:WORDS]]
    return np.array(found + [0] * (WORDS - len(found)), np.int64)


class Decoder(torch.nn.Module):
    """What a picture shows, by strided convolutions, added to what its first convolution says of each pixel.

    A step takes about a sixth of the built-in U-Net's with 8 channels.
    """

    def __init__(self, task: TaskSpec) -> None:
        super().__init__()
        outputs, *_ = task.problem.get_output_shape(task.input_shape)
        self.first = torch.nn.Sequential(torch.nn.Conv2d(1, 8, 4, 2, 1), torch.nn.ReLU())
        self.whole = torch.nn.Sequential(
            torch.nn.Conv2d(8, 16, 4, 2, 1),
            torch.nn.ReLU(),
            torch.nn.Conv2d(16, 32, 4, 2, 1),
            torch.nn.ReLU(),
            torch.nn.Flatten(),
            torch.nn.Linear(32 * (SIDE // 8) ** 2, 64),
            torch.nn.ReLU(),
            torch.nn.Linear(64, outputs),
        )
        self.pixels = torch.nn.ConvTranspose2d(8, outputs, 2, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Compute the outputs of a batch, (n, outputs, H, W)."""
        first = self.first(x)
        found: torch.Tensor = self.pixels(first) + self.whole(first)[:, :, None, None]
        return found


class EmbeddingBag(torch.nn.Module):
    """The mean of the vectors of hashed n-grams, and a linear layer."""

    def __init__(self, task: TaskSpec) -> None:
        super().__init__()
        self.vectors = torch.nn.Embedding(TOKENS, 32)
        self.last = torch.nn.Linear(32, task.n_classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Compute the outputs of a batch; token 0 counts nowhere."""
        there = (x > 0).unsqueeze(-1).to(self.vectors.weight.dtype)
        total = (self.vectors(x.long()) * there).sum(dim=1)
        found: torch.Tensor = self.last(total / there.sum(dim=1).clamp(min=1))
        return found


def flights_row(n: int, per_airport: int, offset: float, quick: int) -> Row:
    """A row of flights."""

    def make(data: Path, seed: int, most: int) -> Task:
        return make_flights(data, seed, most, n, offset)

    return Row(make, ("r2",), {"partition": "natural", "devices": n}, per_airport, quick)


PEOPLE: Final[dict[str, Any]] = {"partition": "natural"}
STRANGE: Final = ("auroc", "false alarms")
SMALL_STEPS: Final[dict[str, Any]] = {"optimizer": "adam", "learning_rate": 0.005, "batch_size": 16}
ROWS: Final = {
    "flights, 40": flights_row(40, 110, 0.0, 40),
    "flights, 89": flights_row(AIRPORTS, 500, 0.0, 40),
    "flights, 40, offsets": flights_row(40, 110, 0.5, 40),
    "yeast": Row(make_yeast, ("macro_f1", "mean_average_precision"), {"devices": 10, "alpha": 0.3}, 2417, 600),
    "masks": Row(
        make_masks,
        ("mean_iou", "pixel_accuracy"),
        {"devices": 20, "partition": "groups", "n_groups": 4} | SMALL_STEPS,
        4000,
        600,
    ),
    "movements": Row(make_movements, STRANGE, PEOPLE, 10299, 1500),
    "movements, Adam": Row(
        make_movements, STRANGE, PEOPLE | {"optimizer": "adam", "learning_rate": 0.001}, 10299, 1500
    ),
    "voices": Row(make_voices, STRANGE, PEOPLE, 3000, 600),
    "shuttle": Row(make_shuttle, STRANGE, PEOPLE, 10000, 2000),
    "text": Row(make_texts, ("accuracy", "macro_f1"), {"devices": 10, "alpha": 0.3}, 3000, 600),
}


def run(row: Row, method: str, seed: int, data: Path, *, quick: bool, label: str) -> dict[str, float]:
    """The figures of a method, mean over devices."""
    task = row.make(data, seed, row.quick if quick else row.samples)
    scenario = {"rounds": 30, "hardware": "none"} | row.run | (QUICK if quick else {})
    done = fedge.simulate(task=task, method=method, seed=seed, progress=progress_of(label), **scenario)
    found = {"score": done.score} | average_metrics(done)
    return found | (count_alarms(done) if "false alarms" in row.figures else {})


def average_metrics(done: Simulation) -> dict[str, float]:
    """Each figure beside the score, mean over the devices with a bundle that have it."""
    scores = [device.score for device in done.devices if device.bundle]
    names = {name for score in scores for name in score.metrics}
    found = {n: [score.metrics[n] for score in scores if n in score.metrics] for n in sorted(names)}
    f1 = {} if done.macro_f1 is None else {"macro_f1": done.macro_f1}
    return {name: float(np.mean(values)) for name, values in found.items()} | f1


def count_alarms(done: Simulation) -> dict[str, float]:
    """The share of usual test samples that bundles flag, and the share of strange ones, mean over devices."""
    alarms: dict[str, list[float]] = {"false alarms": [], "found": []}
    for device in done.devices:
        if device.bundle:
            flagged = device.predictions.outlier
            for name, which in (("false alarms", device.y_test == 0), ("found", device.y_test > 0)):
                if which.any():
                    alarms[name].append(float(flagged[which].mean()))
    return {name: float(np.mean(values)) for name, values in alarms.items() if values}


def get_figure(figures: dict[str, float], name: str) -> float:
    """A figure by its name; the score has the problem's own name in tables."""
    return figures.get(name, figures["score"])


def difference(ours: list[float], others: list[float]) -> str:
    """The mean paired difference in points, with its standard error if there are several seeds."""
    points = 100 * (np.array(ours) - np.array(others))
    error = f" ± {points.std(ddof=1) / np.sqrt(len(points)):.2f}" if len(points) > 1 else ""
    return f"{points.mean():+.2f}{error}"


def tabulate(found: dict[str, list[dict[str, float]]], names: tuple[str, ...]) -> str:
    """The table of a row."""
    ours = found.get(OURS, [])
    lines = []
    for method, runs in found.items():
        line: list[str] = [method]
        for name in names:
            values = [get_figure(figures, name) for figures in runs]
            compared = method != OURS and len(ours) == len(runs)
            line.append(f"{100 * np.mean(values):.2f}")
            line.append(difference([get_figure(figures, name) for figures in ours], values) if compared else "–")
        lines.append(line)
    return markdown(["method", *(word for name in names for word in (name, f"{OURS} − it"))], lines)


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--out", type=Path, required=True, metavar="FOLDER", help="keeps runs that are done")
    parser.add_argument("--data", type=Path, required=True, metavar="DIR", help="folder with flights/, yeast/, ...")
    parser.add_argument("--rows", type=lambda text: text.split(";"), default=[*ROWS], help="; ".join(ROWS))
    parser.add_argument("--methods", type=several(), default=list(METHODS))
    parser.add_argument("--seeds", type=several(int), default=[0, 1, 2, 3, 4])
    parser.add_argument("--quick", action="store_true", help="few samples and rounds, to see that all runs")
    arguments = parser.parse_args()
    logging.disable(logging.WARNING)
    rows = [name.strip() for name in arguments.rows]
    outcomes: dict[str, dict[str, list[dict[str, float]]]] = {}
    for name, seed, method in product(rows, arguments.seeds, arguments.methods):
        file = arguments.out / f"{name}-{method}-{seed}{'-quick' * arguments.quick}.json"
        if not file.exists():
            label = f"{name}, {method}, seed {seed}"
            figures = run(ROWS[name], method, seed, arguments.data, quick=arguments.quick, label=label)
            file.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(file, msgspec.json.encode(figures))
        done = msgspec.json.decode(file.read_bytes(), type=dict[str, float])
        outcomes.setdefault(name, {}).setdefault(method, []).append(done)
    for name, found in outcomes.items():
        print(f"{name}, {len(arguments.seeds)} seeds\n\n{tabulate(found, ROWS[name].figures)}\n")
    finish(arguments, outcomes)


if __name__ == "__main__":
    main()
