"""What a recipe costs: processor time of a training step with Adam, clipped gradients and others, over plain SGD.

MLPs on random inputs, batch 32, one thread. The recipes take turns, and each figure is the median of the turns' ratios
to plain SGD in the same turn, so a busy machine slows both. Aim: Adam side by side at most 1.3.

    python benchmarks/recipes.py [--turns 9] [--json FILE]
"""

from __future__ import annotations

import statistics
import time
from typing import Any, Final

import numpy as np
import torch
from script import DIGITS, finish, machine, parser_of

from fedge.data.task import TaskSpec
from fedge.models import build
from fedge.models.problems.cross_entropy import compute_class_weights, make_loss
from fedge.models.training import Network, Stack, Trainer, draw_stacked_batches, join_samples, to_tensor
from fedge.steps.sgd import Sgd

RECIPES: Final = {
    "SGD": Sgd(),
    "Nesterov": Sgd(nesterov=True),
    "clipped": Sgd(clip_norm=1.0),
    "Adam": Sgd(optimizer="adam", learning_rate=0.001),
    "AdamW": Sgd(optimizer="adamw", learning_rate=0.001, weight_decay=0.01),
    "smooth": Sgd(label_smoothing=0.1),
    "balanced": Sgd(class_weights="balanced"),
}
SETTINGS: Final = {
    "digits MLP (2,410 weights), alone": (64, 32, 1),
    "digits MLP (2,410 weights), 10 side by side": (64, 32, 10),
    "digits MLP (2,410 weights), 64 side by side": (64, 32, 64),
    "MNIST MLP (25,450 weights), 40 side by side": (784, 32, 40),
}
"""Inputs, hidden units and models of each setting."""


def time_step(n_inputs: int, hidden: int, n_models: int, sgd: Sgd, steps: int) -> float:
    """Return the processor seconds of a step of one model."""
    options = {"hidden": hidden}
    task = TaskSpec(name="x", classes=DIGITS, input_shape=(n_inputs,), model="mlp", model_options=options)
    rng = np.random.default_rng(0)
    samples = [(rng.random((60, n_inputs), np.float32), rng.integers(0, 10, 60)) for _ in range(n_models)]
    network, first = Network(task), build.make_initial_model(task, 0)[1]
    if n_models == 1:
        network.load(first)
        trainer = Trainer(network, *samples[0], sgd, rng)
    else:
        stack = Stack(network, [first] * n_models)
        if sgd.class_weights:
            stack.given = (to_tensor(np.stack([compute_class_weights(y, 10) for _, y in samples])),)
        drawn = draw_stacked_batches([60] * n_models, sgd.batch_size, [rng] * n_models)
        trainer = Trainer(stack, *join_samples(samples), sgd, drawn, loss=make_loss(sgd))
    trainer.run(3)
    began = time.process_time()
    trainer.run(steps)
    return (time.process_time() - began) / steps / n_models


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--turns", type=int, default=9)
    args = parser.parse_args()
    torch.set_num_threads(1)
    figures: dict[str, Any] = {}
    for name, (n_inputs, hidden, n_models) in SETTINGS.items():
        steps = max(20, 600 // n_models)
        turns = [
            {kind: time_step(n_inputs, hidden, n_models, sgd, steps) for kind, sgd in RECIPES.items()}
            for _ in range(args.turns)
        ]
        plain = statistics.median(turn["SGD"] for turn in turns)
        ratios = {kind: statistics.median(turn[kind] / turn["SGD"] for turn in turns) for kind in RECIPES}
        figures[name] = {"sgd_us": 1e6 * plain, "ratios": ratios}
        print(f"{name}: SGD {1e6 * plain:.0f} us;", ", ".join(f"{kind} {r:.2f}" for kind, r in ratios.items()))
    finish(args, {"machine": machine(), "figures": figures})


if __name__ == "__main__":
    main()
