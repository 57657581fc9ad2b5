"""Networks on another device than the CPU: what leaves the training is the same."""

import json
import subprocess
import sys

import pytest
from torch.utils import backend_registration

pytestmark = [
    pytest.mark.process,
    pytest.mark.skipif(
        not hasattr(backend_registration, "_setup_privateuseone_for_python_backend"),
        reason="before 2.10 torch takes no device that is written in Python",
    ),
]

SAME = [
    "fedge",  # Train side by side, Trial, FitCandidates, FitWeights, FitEnergy, FitGate
    "fedepc",  # Profile; losses and gradients before and after
    "scmoe-pfl",  # FitMixture
    "pm-moe:base=fedrod",  # SharePrivate, FitPool; a second head
    "dbe",  # MeanFeatures; an offset
    "lg-fedavg+ft",  # a base of one's own; fine-tuning
    "ditto",  # a model of one's own, drawn to the global one
    "apfl",  # two models by turns
    "pfedme",  # a trainer for each batch
    "moon",  # fixed copies of a network
    "fedgh",  # class means
    "fedcoe",  # the server's own networks
    "fedprox@tests.support.networks:noisy",  # running statistics, random numbers
]
"""Methods that together give all orders for which networks are asked or trained."""
STACKED = ["fedavg@cnn", "fedavg@resnet_moe"]
"""Networks that learn side by side there, and one after the other on the CPU."""


def test_methods_end_in_the_same_bytes_and_large_networks_side_by_side_learn_what_each_learns_alone() -> None:
    """One test, for one program runs all of it; first, that its device refuses tensors of the CPU."""
    command = [sys.executable, "-m", "tests.support.elsewhere", *SAME, *STACKED]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    report = json.loads(ran.stdout)
    assert "a tensor of cpu" in report["mixed"]
    assert "numpy" in report["unreadable"]
    assert [case for case in SAME if report[case] != {"same": True, "apart": 0.0}] == []
    assert [case for case in STACKED if not report[case]["apart"] < 1e-6] == []
