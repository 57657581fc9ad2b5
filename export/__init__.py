"""Exports a device's mixture from torch to a bundle for ONNX Runtime, whose format is in `fedge.bundle`."""

from export.bundle import write_bundle
from export.mixture import Candidate, GateWeights, Guard, Mixture
from export.pool import Pool, PoolGate

__all__ = ["Candidate", "GateWeights", "Guard", "Mixture", "Pool", "PoolGate", "write_bundle"]
