"""Points against bytes: adapters on a frozen backbone against full float32 fine-tuning of the same backbone.

    python benchmarks/deep.py cifar10-jpeg.zip --out deep
    python benchmarks/deep.py cifar10-jpeg.zip --out deep-full --full --train-on cuda

The backbone is made first: a MobileNetV3-Small learns from images of the training part. The federation, 20 devices
with label skew, has images of the test part, which the backbone has never seen; a part of them is kept apart to measure
the global model of `fedavg`. Bytes are those of models and updates of all devices; what the frozen backbone costs
once for each device is told apart. OUT keeps the backbone, every run and the table; an interrupted benchmark goes on.
"""

from __future__ import annotations

import asyncio
import io
import json
import tempfile
import zipfile
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from script import markdown, parser_of, plot, say
from torch import nn

from coordinator.methods.baselines.fedavg import FedAvgState
from coordinator.methods.catalogue import make_method
from coordinator.simulation.federation import make_fleet, partition_samples
from coordinator.simulation.rounds import run_rounds
from coordinator.simulation.settings import Scenario
from fedge.data import preprocessing
from fedge.data.task import TaskSpec
from fedge.models import build, choice
from fedge.models.training import Network, Trainer, get_torch_device
from fedge.models.weights import find_device_weights
from fedge.steps.sgd import Sgd
from fedge.system.files import write_atomically
from fedge.system.hardware import Processor
from fedge.tasks import load_task
from fedge.tensors.layout import Codec, to_bytes, unflatten

MODEL: Final = "mobilenet-v3-small"
FULL: Final = "everything, float32"
RUNS: Final[Mapping[str, dict[str, Any]]] = {
    FULL: {"codec": Codec.FLOAT32, "learning_rate": 0.005},
    "all but norm, float32": {"adapt": "!norm", "codec": Codec.FLOAT32},
    "lora:2": {"adapt": "lora:2"},
    "head": {"adapt": "head"},
    "lora:1": {"adapt": "lora:1"},
    "all but norm, top-k up": {"adapt": "!norm", "codec": Codec.TOP},
    "lora:8": {"adapt": "lora:8"},
}
"""What is trained, and how updates are coded. The learning rate is 0.01 unless given (0.02 made the first worse)."""
SMALL: Final = {"pretrain": 20_000, "epochs": 4, "federation": 4_000, "rounds": 10, "local_steps": 5}
LARGE: Final = {"pretrain": 50_000, "epochs": 60, "federation": 10_000, "rounds": 100, "local_steps": 20}
SEEN: Final = 2048
"""Images that running statistics are measured on."""
Images = tuple[NDArray[np.uint8], NDArray[np.int64]]


def images(archive: Path, part: str, n: int) -> Images:
    """The first n images (n, 3, 32, 32) of a part, as many of each class, and their labels."""
    with zipfile.ZipFile(archive) as file:
        names = sorted(name for name in file.namelist() if name.startswith(f"{part}/") and name.endswith(".jpg"))
        classes = sorted({name.split("/")[1] for name in names})
        chosen = [(c, name) for c in classes for name in [m for m in names if f"/{c}/" in m][: n // len(classes)]]
        x = np.stack([np.asarray(Image.open(io.BytesIO(file.read(name)))).transpose(2, 0, 1) for _, name in chosen])
    return x, np.array([classes.index(c) for c, _ in chosen])


def backbone(archive: Path, out: Path, task: TaskSpec, size: Mapping[str, int], processor: Processor) -> Path:
    """Train the network on the training part with flips and shifts; the file, which every epoch writes anew."""
    file, log = out / "backbone.safetensors", out / "backbone.json"
    done = json.loads(log.read_text())["epochs"] if log.exists() else 0
    if done >= size["epochs"]:
        return file
    x, y = images(archive, "train", size["pretrain"])
    network = Network(task, get_torch_device(processor))
    network.load(build.make_initial_model(task if not done else choice.with_network(task, None, file), 0)[1])
    for epoch in range(done, size["epochs"]):
        rng = np.random.default_rng((1, epoch))
        rate = 0.05 * (1 + np.cos(np.pi * epoch / size["epochs"])) / 2
        sgd = Sgd(steps=len(y) // 128, batch_size=128, learning_rate=rate, momentum=0.9, weight_decay=5e-4)
        Trainer(network, preprocessing.preprocess(task, moved(x, rng)), y, sgd, rng).run(sgd.steps)
        write_atomically(file, to_bytes(unflatten(network.dump(), network.layout)))
        write_atomically(log, json.dumps({"epochs": epoch + 1, "images": len(y)}).encode())
        say(f"backbone: epoch {epoch + 1} of {size['epochs']}")
    settle(network, preprocessing.preprocess(task, x[np.random.default_rng(0).permutation(len(x))[:SEEN]]))
    write_atomically(file, to_bytes(unflatten(network.dump(), network.layout)))
    return file


def settle(network: Network, x: NDArray[np.float32]) -> None:
    """Measure the running statistics anew: in few steps torchvision's momentum of 0.01 does not get there."""
    norms = [layer for layer in network.module.modules() if isinstance(layer, nn.BatchNorm2d)]
    momentum = [norm.momentum for norm in norms]
    for norm in norms:
        norm.reset_running_stats()
        norm.momentum = None  # the mean over all batches
    with torch.inference_mode():
        network.module.train()
        for chunk in torch.split(torch.from_numpy(x), 128):
            network.module(chunk.to(network.processor))
    for norm, usual in zip(norms, momentum, strict=True):
        norm.momentum = usual


def moved(x: NDArray[np.uint8], rng: np.random.Generator) -> NDArray[np.uint8]:
    """Each image shifted by up to 4 pixels, every other one turned left to right."""
    padded = np.pad(x, ((0, 0), (0, 0), (4, 4), (4, 4)))
    found = np.empty_like(x)
    for k, (down, right, flip) in enumerate(rng.integers((9, 9, 2), size=(len(x), 3))):
        found[k] = padded[k, :, down : down + 32, right : right + 32][:, :, :: -1 if flip else 1]
    return found


async def run(scenario: Scenario, seed: int) -> dict[str, Any]:
    """Accuracy of the global model, and megabytes up and down, before round 1 and after each fifth of the rounds."""
    federation = partition_samples(scenario, seed)
    assert federation.global_test is not None
    x, y = federation.global_test
    network = Network(federation.task, get_torch_device(scenario.train_on))
    once = find_device_weights(federation.task)
    curve: list[dict[str, float]] = []
    with tempfile.TemporaryDirectory(prefix="fedge-deep-") as home:
        fleet, first, _ = make_fleet(federation, scenario, seed, Path(home))
        method = make_method("fedavg", scenario.make_method_settings(seed, {}))
        state: FedAvgState = method.make_first_state(federation.layout, first)
        met: set[str] = set()

        def on_round(state: FedAvgState) -> None:
            met.update(state.participations)
            if state.round % scenario.spacing:
                return
            logits = network.compute_logits(fleet.get(state.model, federation.layout), x)
            frozen = len(met) * once.size_bytes if once else 0
            curve.append(
                {
                    "round": state.round,
                    "accuracy": float((logits.argmax(axis=1) == y).mean()),
                    "up": fleet.bytes_up / 1e6,
                    "down": (fleet.bytes_down - frozen) / 1e6,
                    "once": frozen / 1e6,
                }
            )
            say(f"  {curve[-1]}")

        on_round(state)
        await run_rounds(method, state, fleet, on_round, scenario.rounds)
    return {"params": federation.layout.n_params, "curve": curve}


def table(found: Mapping[str, list[dict[str, Any]]]) -> str:
    """Means over the seeds; points to, and bytes against, the best run in float32."""
    ends = {name: [each["curve"][-1] for each in runs] for name, runs in found.items()}
    mean = {n: {key: float(np.mean([e[key] for e in own])) for key in own[0]} for n, own in ends.items()}
    whole = max((own for name, own in mean.items() if "float32" in name), key=lambda own: own["accuracy"])
    head = ["trained", "numbers", "accuracy", "to full float32", "MB up", "less", "MB down", "less", "MB once"]
    rows = []
    for name, own in mean.items():
        gained = 100 * (own["accuracy"] - whole["accuracy"])
        bytes_ = [text for way in ("up", "down") for text in (f"{own[way]:.2f}", f"1/{whole[way] / own[way]:.0f}")]
        shown = f"{100 * own['accuracy']:.1f}"
        rows.append([name, str(found[name][0]["params"]), shown, f"{gained:+.1f}", *bytes_, f"{own['once']:.0f}"])
    return markdown(head, rows)


def curves(found: Mapping[str, list[dict[str, Any]]], axes: Any) -> None:
    """Accuracy against megabytes up and down, one line a run."""
    for name, runs in found.items():
        points = runs[0]["curve"]
        accuracy = np.mean([[100 * p["accuracy"] for p in each["curve"]] for each in runs], axis=0)
        axes.plot([max(p["up"] + p["down"], 0.1) for p in points], accuracy, marker=".", label=name)
    axes.set(xscale="log", xlabel="MB up and down, all devices", ylabel="accuracy of the global model, %")
    axes.legend()


def main() -> None:
    """Make the backbone, do the runs that are missing, show all."""
    parser = parser_of(__doc__)
    parser.add_argument("archive", type=Path, help="cifar10-jpeg.zip, with train/ and test/")
    parser.add_argument("--out", type=Path, required=True, metavar="FOLDER")
    parser.add_argument("--full", action="store_true", help="all images and 100 rounds: for a GPU")
    parser.add_argument("--train-on", type=Processor, choices=list(Processor), default=Processor.CPU)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--runs", nargs="+", choices=list(RUNS), default=list(RUNS), metavar="RUN")
    given = parser.parse_args()
    size = LARGE if given.full else SMALL
    given.out.mkdir(parents=True, exist_ok=True)
    data = given.out / "federation.npz"
    if not data.exists():
        x, y = images(given.archive, "test", size["federation"])
        np.savez(data, x=x, y=y)
    task = choice.with_network(load_task("arrays", data), MODEL)
    file = backbone(given.archive, given.out, task, size, given.train_on)
    found: dict[str, list[dict[str, Any]]] = {}
    for seed in given.seeds:
        for name in given.runs:
            kept = given.out / f"{name.replace(', ', '-').replace(':', '-')}-{seed}.json"
            if not kept.exists():
                say(f"{name}, seed {seed}")
                settings = {"learning_rate": 0.01, **RUNS[name]}
                scenario = Scenario(
                    task="arrays",
                    data=data,
                    model=MODEL,
                    weights=file,
                    devices=20,
                    participation=0.25,
                    rounds=size["rounds"],
                    local_steps=size["local_steps"],
                    global_test=0.25,
                    evaluate_every=size["rounds"] // 5,
                    server_data=0.0,
                    down="float32",
                    hardware="none",
                    train_on=given.train_on,
                    **settings,
                )
                kept.write_text(json.dumps(asyncio.run(run(scenario, seed))))
            found.setdefault(name, []).append(json.loads(kept.read_text()))
    text = table(found)
    (given.out / "table.md").write_text(text + "\n")
    plot(given.out / "deep.png", partial(curves, found), figsize=(7, 4.5))
    print(text)


if __name__ == "__main__":
    main()
