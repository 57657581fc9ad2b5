"""A made-up result of a demo."""

import numpy as np

from coordinator.demo.outcome import METHODS, Background, DeviceOutcome, Outcome, mean_accuracy


def an_outcome(**changes: object) -> Outcome:
    devices = tuple(
        DeviceOutcome(
            id=f"camera-{i:02d}",
            n_train=80 + i,
            n_test=30,
            experts=(i % 2,),
            accuracy={name: 0.5 + 0.1 * j - 0.01 * i for j, name in enumerate(METHODS)},
            bundle=f"/bundles/{i}",
            max_abs_diff_torch_onnx=1.5e-7,
        )
        for i in range(4)
    )
    values: dict[str, object] = {
        "task": "digits",
        "partition": "groups",
        "agents": 4,
        "rounds": 6,
        "seed": 3,
        "broker": "mosquitto",
        "wall_s": 12.25,
        "bytes_up": 1_500_000,
        "bytes_down": 2_500_000,
        "clusters": {"0": ("camera-00", "camera-02"), "1": ("camera-01", "camera-03")},
        "selection": {f"camera-{i:02d}": 6 - i for i in range(4)},
        "split": True,
        "accuracy": mean_accuracy(devices),
        "devices": devices,
    }
    return Outcome(**(values | changes))  # type: ignore[arg-type]


def a_background(**changes: object) -> Background:
    directions = np.array([[1.0, 0.0], [0.0, 1.0], [0.8, 0.6], [0.6, 0.8]])
    values: dict[str, object] = {
        "method": "fedge",
        "accuracy_by_round": {"personalised": [(1, 0.1), (2, 0.6)], "fedavg": [(1, 0.1), (2, 0.4)]},
        "ids": tuple(f"camera-{i:02d}" for i in range(4)),
        "places": directions - directions.mean(axis=0),
        "groups": {f"camera-{i:02d}": i % 2 for i in range(4)},
    }
    return Background(**(values | changes))  # type: ignore[arg-type]
