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
    "fedcoe",  # the server's own networks
    "fedprox@tests.support.networks:noisy",  # running statistics, random numbers
]
"""Methods that together give all orders for which networks are asked or trained."""
STACKED = ["fedavg@cnn", "fedavg@resnet_moe"]
"""Networks that learn side by side there, and one after the other on the CPU."""


@pytest.fixture(scope="module")
def report():
    command = [sys.executable, "-m", "tests.support.elsewhere", *SAME, *STACKED]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    return json.loads(ran.stdout)


def test_the_device_of_these_tests_refuses_tensors_of_the_cpu(report) -> None:
    assert "a tensor of cpu" in report["mixed"]
    assert "numpy" in report["unreadable"]


@pytest.mark.parametrize("case", SAME)
def test_a_method_ends_in_the_same_bytes(report, case) -> None:
    assert report[case] == {"same": True, "apart": 0.0}


@pytest.mark.parametrize("case", STACKED)
def test_large_networks_side_by_side_learn_what_each_learns_alone(report, case) -> None:
    assert report[case]["apart"] < 1e-6
