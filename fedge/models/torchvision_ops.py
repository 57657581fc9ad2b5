"""Makes torchvision importable beside a torch build that does not fit its compiled operators.

Importing torchvision registers shape functions for its operators `torchvision::nms` and `torchvision::qnms`. These are
declared by torchvision's C++ library, which does not load if it was built for another torch (the usual CUDA wheel
beside the CPU build of torch). The import then fails with "operator torchvision::nms does not exist", although the
networks in `torchvision.models` need no compiled operator. `declare_operators` provides the two signatures without
implementations, so calling one is an error, as it would be without this module.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

import torch

_SIGNATURES = (
    "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
)
_declared: list[torch.library.Library] = []  # a library lives as long as its object


def declare_operators() -> None:
    """Declare the operators, unless torchvision is absent, its own library loads, or they are declared already."""
    torchvision = importlib.util.find_spec("torchvision")  # found, not imported
    if _declared or torchvision is None or torchvision.origin is None or _can_load(Path(torchvision.origin).parent):
        return
    ours = torch.library.Library("torchvision", "DEF")  # type: ignore[no-untyped-call]
    for signature in _SIGNATURES:
        ours.define(signature)  # type: ignore[no-untyped-call]
    _declared.append(ours)


def _can_load(folder: Path) -> bool:
    """Return whether torchvision's compiled operators load here; if so, they stay loaded."""
    try:
        torch.ops.load_library(folder / "_C.so")  # type: ignore[no-untyped-call]
    except OSError:
        return False
    return True


def describe_torch() -> str:
    """Return torch's version and the GPU that torch sees."""
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"
    return f"{torch.__version__}, {gpu}"
