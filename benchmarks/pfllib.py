"""Methods of fedge beside those of PFLlib on the same deal: digits, ten devices, the same first weights and recipe.

Both sides run in this process, one after the other: plain SGD without momentum, whole passes over each device's
samples, everybody in every round. PFLlib reads the devices' samples from files that this script writes. Accuracy is in
per cent, mean over the devices on their own test samples, by the network that a device ends with, without fedge's
offset; FedBABU is fedge's bundle. pFedMe's line is its global model on both sides, since PFLlib overwrites the personal
one before it is tested. Differences are paired by seed; +- is the standard error of their mean.

    python benchmarks/pfllib.py --pfllib FOLDER
    python benchmarks/pfllib.py --pfllib FOLDER --methods fedavg,apfl --seeds 0 --rounds 5

FOLDER: a checkout of github.com/TsingZ0/PFLlib (figures: commit d832e76).
"""

from __future__ import annotations

import contextlib
import importlib
import io
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, Final

import numpy as np
import torch
from script import finish, parser_of, say, several, show
from torch import nn

from coordinator.aggregation.protection import Protection
from coordinator.fleet.simulated.fleet import SimulatedFleet
from coordinator.methods.catalogue import load_method_class, make_method
from coordinator.methods.settings import MethodSettings
from coordinator.simulation.interface import use_one_thread
from coordinator.simulation.rounds import run_rounds
from deploy import load
from edge_agent.device.worker import Worker
from fedge.models.build import make_initial_model
from fedge.steps.sgd import Sgd
from fedge.tasks import Partitioning, Pool, load_pool, make_device_data, partition_pool
from fedge.tasks.shares import Share
from fedge.tensors.layout import Codec, Layout, Model, unflatten

DEVICES: Final = 10
RATE: Final = 0.05
BATCH: Final = 10
THEIRS: Final = {
    "fedavg": ("avg", "FedAvg"),
    "apfl": ("apfl", "APFL"),
    "fedbabu": ("babu", "FedBABU"),
    "fedcp": ("cp", "FedCP"),
    "feddyn": ("dyn", "FedDyn"),
    "fedgh": ("gh", "FedGH"),
    "gpfl": ("gpfl", "GPFL"),
    "moon": ("moon", "MOON"),
    "pfedme": ("pFedMe", "pFedMe"),
    "scaffold": ("scaffold", "SCAFFOLD"),
}
"""Their file and class of each method."""
OPTIONS: Final[dict[str, dict[str, float]]] = {
    "moon": {"mu": 1.0, "tau": 0.5},
    "pfedme": {"inner_steps": 5, "moreau_lambda": 15.0, "outer_rate": RATE},
    "fedcp": {"mmd": 5.0},
    "fedgh": {"head_rate": 0.1},
    "feddyn": {"alpha": 0.5},
    "gpfl": {"pull": 0.01, "decay": 0.1},
}


class Split(nn.Module):
    """The network of digits, in two parts as PFLlib wants them, with given weights."""

    def __init__(self, first: Model, layout: Layout) -> None:
        super().__init__()
        tensors = [torch.from_numpy(t.copy()) for t in unflatten(first, layout).values()]
        (hidden, d), (n_classes, _) = tensors[0].shape, tensors[2].shape
        self.base = nn.Sequential(nn.Flatten(), nn.Linear(d, hidden), nn.ReLU())
        self.head = nn.Linear(hidden, n_classes)
        with torch.no_grad():
            for own, given in zip(self.parameters(), tensors, strict=True):
                own.copy_(given)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Compute the logits."""
        return self.head(self.base(x))  # type: ignore[no-any-return]


def scale(pool: Pool, x: np.ndarray) -> np.ndarray:
    """Test samples as the network takes them."""
    how = pool.spec.preprocessing
    return ((x / how.scale - how.mean) / how.std).astype(np.float32).reshape(len(x), *pool.spec.input_shape)


def run_theirs(folder: Path, name: str, pool: Pool, shares: Sequence[Share], seed: int, rounds: int) -> float:
    """The accuracy of PFLlib's method."""
    file, kind = THEIRS[name]
    spec = pool.spec
    layout, first = make_initial_model(spec, seed)
    own = OPTIONS.get(name, {})
    sys.modules.setdefault("h5py", ModuleType("h5py"))
    sys.path[:] = [str(folder / "system"), *(p for p in sys.path if p != str(folder / "system"))]
    settings: dict[str, Any] = {
        "algorithm": kind, "dataset": "deal", "model": Split(first, layout), "device": "cpu", "num_classes": 10,
        "global_rounds": rounds, "local_epochs": 1, "batch_size": BATCH, "local_learning_rate": RATE,
        "learning_rate_decay": False, "learning_rate_decay_gamma": 0.99, "num_clients": len(shares), "join_ratio": 1.0,
        "random_join_ratio": False, "few_shot": 0, "time_select": False, "goal": "test", "time_threthold": 1e9,
        "save_folder_name": "items", "top_cnt": 100, "auto_break": False, "eval_gap": rounds, "client_drop_rate": 0.0,
        "train_slow_rate": 0.0, "send_slow_rate": 0.0, "dlg_eval": False, "dlg_gap": 100, "batch_num_per_client": 2,
        "num_new_clients": 0, "fine_tuning_epoch_new": 0, "alpha": own.get("alpha", 0.5), "beta": 1.0,
        "mu": own.get("mu", own.get("decay", 0.0)), "tau": own.get("tau", 1.0), "K": 5, "p_learning_rate": RATE,
        "lamda": next((own[name] for name in ("moreau_lambda", "mmd", "pull") if name in own), 1.0),
        "fine_tuning_epochs": 10, "server_learning_rate": own.get("head_rate", 1.0),
    }  # fmt: skip
    torch.manual_seed(seed)
    np.random.seed(seed)  # noqa: NPY002 - theirs draw from it
    here = Path.cwd()
    with tempfile.TemporaryDirectory() as home, contextlib.redirect_stdout(io.StringIO()):
        for part in ("train", "test"):
            place = Path(home, "dataset", "deal", part)
            place.mkdir(parents=True)
            for k, share in enumerate(shares):
                data = make_device_data(spec, share)
                x, y = (data.x_train, data.y_train) if part == "train" else (scale(pool, share.x_test), share.y_test)
                np.savez(place / f"{k}.npz", data=np.array({"x": x, "y": y}, object))
        Path(home, "system").mkdir()
        os.chdir(Path(home, "system"))
        try:
            server = getattr(importlib.import_module(f"flcore.servers.server{file}"), kind)(
                SimpleNamespace(**settings), 0
            )
            server.save_results = server.save_global_model = lambda: None
            tests = record_tests(server, "test_metrics_personalized" if name == "pfedme" else "test_metrics")
            server.train()
        finally:
            os.chdir(here)
    return float(np.mean(np.divide(tests[-1][2], tests[-1][1])))


def record_tests(server: Any, name: str) -> list[Any]:
    """Return a list that gets what each of the server's tests finds; the last is after `global_rounds` rounds."""
    tests: list[Any] = []
    inner = getattr(server, name)

    def test() -> Any:
        tests.append(inner())
        return tests[-1]

    setattr(server, name, test)
    return tests


async def run_ours(name: str, pool: Pool, shares: Sequence[Share], seed: int, rounds: int, home: Path) -> float:
    """The accuracy of fedge's method."""
    spec = pool.spec.with_head_class(load_method_class(name).HEAD_CLASS)
    layout, first = make_initial_model(spec, seed)
    workers = {f"d{k}": Worker(f"d{k}", spec, make_device_data(spec, s), home / f"d{k}") for k, s in enumerate(shares)}
    fleet = SimulatedFleet(spec, layout, workers, seed=seed)
    method = make_method(
        name,
        MethodSettings(
            rounds=rounds,
            seed=seed,
            sgd=Sgd(epochs=1, batch_size=BATCH, learning_rate=RATE, momentum=0.0),
            codec=Codec.FLOAT32,
            down="float32",
            protection=Protection() if name == "fedgh" else Protection(average="mean"),
            options=dict(OPTIONS.get(name, {})),
        ),
    )
    state = await run_rounds(method, method.init(layout, fleet.put(unflatten(first, layout))), fleet)
    right = []
    for (i, worker), share in zip(workers.items(), shares, strict=True):
        if name == "fedbabu":
            said = load(worker.home / "bundles" / str(state.installed[i].release)).predict(share.x_test).class_index
        else:
            model = fleet.get(method.get_model(state, i), layout)
            model = model if name == "pfedme" else worker.make_personal_model(model)
            said = worker.network.compute_logits(model, scale(pool, share.x_test)).argmax(axis=1)
        right.append(np.mean(said == share.y_test))
    return float(np.mean(right))


def main(arguments: Sequence[str] | None = None) -> None:
    """Run both sides on each seed."""
    import asyncio

    parser = parser_of(__doc__)
    parser.add_argument("--pfllib", type=Path, required=True, metavar="FOLDER", help="a checkout of PFLlib")
    parser.add_argument("--methods", type=several(), default=list(THEIRS), help="of fedge, with commas between them")
    parser.add_argument("--seeds", type=several(int), default=[0, 1, 2])
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--alpha", type=float, default=0.3, help="of the Dirichlet deal")
    given = parser.parse_args(arguments)
    use_one_thread()
    rows = []
    for name in given.methods:
        found = []
        for seed in given.seeds:
            pool = load_pool("digits", seed=seed)
            how = Partitioning(partition="dirichlet", alpha=given.alpha, sensitive=0.0)
            shares = partition_pool(pool, DEVICES, how, seed=seed)
            with tempfile.TemporaryDirectory() as home:
                ours = asyncio.run(run_ours(name, pool, shares, seed, given.rounds, Path(home)))
            theirs = run_theirs(given.pfllib.resolve(), name, pool, shares, seed, given.rounds)
            say(f"{name} seed {seed}: fedge {100 * ours:.1f}, PFLlib {100 * theirs:.1f}")
            found.append((100 * ours, 100 * theirs))
        both = np.array(found)
        apart = both[:, 0] - both[:, 1]
        error = float(apart.std(ddof=1) / np.sqrt(len(apart))) if len(apart) > 1 else 0.0
        mean = both.mean(axis=0)
        rows.append(
            {"method": name, "fedge": mean[0], "PFLlib": mean[1], "difference": float(apart.mean()), "+-": error}
        )
    show(rows)
    finish(given, {"rows": rows})


if __name__ == "__main__":
    main()
