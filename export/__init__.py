"""From a device's mixture in torch to a bundle that ONNX Runtime runs (the format: `fedge.bundle`)."""

from export.bundle import BundleInfo, write_bundle
from export.mixture import Candidate, GateWeights, Guard, Mixture
from export.pool import Pool, PoolGate
from export.reference import reference

__all__ = [
    "BundleInfo",
    "Candidate",
    "GateWeights",
    "Guard",
    "Mixture",
    "Pool",
    "PoolGate",
    "reference",
    "write_bundle",
]
