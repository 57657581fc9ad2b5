"""Makes the bundles in tests/deploy/golden, and what they predict on the machine that makes them. Needs torch.

`bundle` has all that the format knew before there were engines, and stays as it is: such bundles must be readable for
ever. `full_range.onnx` is a graph in 8 bits as the export once wrote it; its sums saturate on some processors.
`engines` holds a bundle of trained networks that every engine can run:

python -m tests.deploy.make_golden
"""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

import numpy as np
from msgspec.structs import replace

import deploy
from deploy.inference.engines import ENGINES
from export import Candidate, GateWeights, Guard, Mixture, write_bundle
from export.int8 import Int8Limits, quantise_bundle
from export.parity import compute_expected
from fedge.bundle.manifest import read_bundle
from fedge.data.preprocessing import preprocess
from fedge.data.problems.calibration import Calibration
from fedge.data.task import Preprocessing, TaskSpec
from fedge.data.validation import Validation
from fedge.models.build import make_initial_model
from fedge.models.training import Network
from fedge.tensors.layout import Model
from fedge.wire.messages import Role

GOLDEN = Path(__file__).parent / "golden"
TASK = TaskSpec(
    name="digits",
    classes=tuple("0123456789"),
    input_shape=(1, 8, 8),
    model="mlp",
    model_options={"hidden": 16},
    preprocessing=Preprocessing(scale=16.0, image_mode="L"),
)
ROLES = (Role.PRIVATE, Role.GLOBAL, Role.EXPERT, Role.EXPERT, Role.LOCAL)
CONVOLUTIONS = replace(TASK, model="cnn", model_options={"channels": 4, "hidden": 16})


def make(folder: Path) -> None:
    """Write folder/bundle and folder/expected.npz."""
    rng = np.random.default_rng(7)
    layout, _ = make_initial_model(TASK, 0)
    gate = GateWeights(*(rng.normal(size=shape) * 0.3 for shape in ((16, 64), (16,), (5, 16), (5,))))
    prior = np.log(rng.dirichlet(np.ones(10) * 5))
    candidates = tuple(
        Candidate(
            role=role,
            name=f"{role.value}-{k}" if role is Role.EXPERT else role.value,
            model=make_initial_model(TASK, k)[1],
            offset=prior,
            calibration=Calibration(temperature=1.4, kappa=0.3 * k),
            energy_mean=2.3,
            energy_std=0.2,
            weight=0.2,
        )
        for k, role in enumerate(ROLES)
    )
    mixture = Mixture(candidates, 0.5, gate, Guard(1, Calibration(temperature=1.0, kappa=0.5)))
    raw = rng.integers(0, 17, size=(12, 8, 8)).astype(np.uint8)
    x = preprocess(TASK, raw)
    write_bundle(
        folder / "bundle",
        task=TASK, layout=layout, mixture=mixture, validation=x, release=3, method="fedge", metrics={"accuracy": 0.5},
    )  # fmt: skip
    p, weights, energies = compute_expected(TASK, layout, mixture, x)
    np.savez(folder / "expected.npz", x=raw, y=p.argmax(axis=1), probabilities=p, weights=weights, energies=energies)


def make_engines(folder: Path) -> None:
    """Write folder/bundle, which each engine can run, and folder/expected.npz: what each says of samples it is new to.

    Arrays: x (64, 8, 8) raw samples, and `<engine>_probabilities`, `_weights` and `_energies` for each engine.
    """
    from sklearn.datasets import load_digits

    raw, y = load_digits(return_X_y=True)
    raw = raw.reshape(-1, 8, 8).astype(np.uint8)
    x = preprocess(CONVOLUTIONS, raw)
    network = Network(CONVOLUTIONS)
    roles = (Role.PRIVATE, Role.EXPERT, Role.EXPERT, Role.EXPERT)
    candidates = tuple(
        Candidate(
            role=role,
            name=f"{role.value}-{k}",
            model=_trained(network, x[k:1200:4], y[k:1200:4].astype(np.int64), seed=k),
            offset=np.full(10, -np.log(10)),
            energy_mean=6.0,
            energy_std=2.0,
            weight=0.7 if role is Role.PRIVATE else 0.1,
        )
        for k, role in enumerate(roles)
    )
    mixture = Mixture(candidates, 0.5, GateWeights.make_untrained((1, 8, 8), len(roles)))
    with tempfile.TemporaryDirectory() as scratch:
        float32 = Path(scratch, "bundle")
        write_bundle(
            float32,
            task=CONVOLUTIONS, layout=network.layout, mixture=mixture, validation=x[1200:1400], release=1,
            method="fedge", metrics={},
        )  # fmt: skip
        quantise_bundle(
            read_bundle(float32),
            Validation(x[1200:1400], y[1200:1400].astype(np.int64)),
            folder / "bundle",
            Int8Limits(
                agreement=0.95, latency_ratio=np.inf
            ),  # small models: 97 of 100 on some processors, 98 on others
        )
    found = {engine: deploy.load(folder / "bundle", engine=engine).predict(raw[1400:1464]) for engine in ENGINES}
    arrays = {
        f"{engine}_{name}": getattr(prediction, name)
        for engine, prediction in found.items()
        for name in ("probabilities", "weights", "energies")
    }
    np.savez_compressed(folder / "expected.npz", x=raw[1400:1464], **arrays)


def _trained(network: Network, x: np.ndarray, y: np.ndarray, seed: int) -> Model:
    """Parameters after 60 steps on all samples."""
    import torch

    network.load(make_initial_model(CONVOLUTIONS, seed)[1])
    optimizer = torch.optim.Adam(network.module.parameters(), 0.01)
    for _ in range(60):
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(network.module(torch.from_numpy(x)), torch.from_numpy(y)).backward()
        optimizer.step()
    return network.dump()


if __name__ == "__main__":
    shutil.rmtree(GOLDEN / "engines", ignore_errors=True)
    make_engines(GOLDEN / "engines")
