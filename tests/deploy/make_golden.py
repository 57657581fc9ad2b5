"""Makes tests/deploy/golden: a small bundle with all that the format knows, and what it predicts. Needs torch.

python -m tests.deploy.make_golden
"""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np

from export import Candidate, GateWeights, Guard, Mixture, write_bundle
from export.parity import expected
from fedge.messages import Role
from fedge.models import initial
from fedge.preprocess import apply
from fedge.task import Preprocessing, TaskSpec

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


def make(folder: Path) -> None:
    """Write folder/bundle and folder/expected.npz."""
    rng = np.random.default_rng(7)
    layout, _ = initial(TASK, 0)
    candidates = tuple(
        Candidate(
            role=role,
            name=f"{role.value}-{k}" if role is Role.EXPERT else role.value,
            model=initial(TASK, k)[1],
            temperature=1.4,
            kappa=0.3 * k,
            energy_mean=2.3,
            energy_std=0.2,
            weight=0.2,
        )
        for k, role in enumerate(ROLES)
    )
    gate = GateWeights(*(rng.normal(size=shape) * 0.3 for shape in ((16, 64), (16,), (5, 16), (5,))))
    mixture = Mixture(candidates, np.log(rng.dirichlet(np.ones(10) * 5)), 0.5, gate, Guard(1, 1.0, 0.5))
    raw = rng.integers(0, 17, size=(12, 8, 8)).astype(np.uint8)
    x = apply(TASK, raw)
    write_bundle(
        folder / "bundle",
        task=TASK, layout=layout, mixture=mixture, validation=x, release=3, method="fedge", metrics={"accuracy": 0.5},
    )  # fmt: skip
    p, weights, energies = expected(TASK, layout, mixture, x)
    np.savez(folder / "expected.npz", x=raw, y=p.argmax(axis=1), probabilities=p, weights=weights, energies=energies)


if __name__ == "__main__":
    shutil.rmtree(GOLDEN, ignore_errors=True)
    make(GOLDEN)
