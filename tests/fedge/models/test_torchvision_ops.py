import subprocess
import sys


def test_torchvision_imports_and_its_networks_run() -> None:
    code = """
from fedge.models import torchvision_ops
torchvision_ops.declare_operators()
torchvision_ops.declare_operators()
import torch, torchvision
network = torchvision.models.mobilenet_v3_small(num_classes=3).eval()
assert network(torch.zeros(1, 3, 32, 32)).shape == (1, 3)
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
