"""A made-up result of a demo."""

from typing import Any

from coordinator.simulation.compare import compare_runs
from coordinator.simulation.reports.comparison import Comparison, Demonstration
from coordinator.simulation.reports.outcome import DeviceOutcome, make_outcome
from coordinator.simulation.settings import Scenario
from tests.support.comparison import a_run, a_score

WAYS = ("local", "fedavg", "fedavg+ft", "expert", "personal")
DEVICES = [f"camera-{i:02d}" for i in range(4)]
PLACES = dict(zip(DEVICES, ((0.4, -0.6), (-0.6, 0.4), (0.2, 0.0), (0.0, 0.2)), strict=True))


def a_demonstration(*, split: bool = True, task: str = "digits", **changes: Any) -> Demonstration:
    """Four devices in two clusters; each way to learn is 10 points ahead of the one before."""
    clusters = {"0": ("camera-00", "camera-02"), "1": ("camera-01", "camera-03")} if split else {}
    model = a_run()
    known = {name: getattr(model, name) for name in ("seconds", "rounds", "global_score", "evaluation_s", "curve")}
    known |= {"global_score": None, "seed": 3, "rounds": 6, "bytes_up": 1_500_000, "bytes_down": 2_500_000}
    runs = []
    for j, way in enumerate(WAYS):
        devices = [
            DeviceOutcome(
                id=device, group=i % 2, n_train=80 + i, score=a_score(0.5 + 0.1 * j - 0.01 * i, 30), trained=6 - i,
                bundle=True, release="1",
            )
            for i, device in enumerate(DEVICES)
        ]  # fmt: skip
        known["validation"] = {1: 0.1, 2: 0.4 + 0.05 * j}
        runs.append(
            make_outcome(devices, method=way, **known, max_abs_diff=1.5e-7, split=split, clusters=clusters, wall_s=9.5)
        )
    scenario = Scenario(task=task, partition="groups", n_groups=3, devices=4, hardware="none")
    found = compare_runs(scenario, runs, WAYS, [3], "local", None)
    values: dict[str, Any] = {name: getattr(found, name) for name in Comparison.__struct_fields__}
    values |= {"learned_by": "fedge", "broker": "mosquitto", "wall_s": 12.25, "places": PLACES}
    return Demonstration(**(values | changes))
