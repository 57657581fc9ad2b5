"""Bundles, which devices run to predict.

`manifest` lists a bundle's parts; `formula` mixes the candidates, in numpy; `energies` and `calibration` are about the
formula's numbers; `graph_reader` reads graphs without onnx, and only `runtime` imports ONNX Runtime. `export` writes
bundles, `deploy` runs them. Begin with `manifest`.
"""

from fedge.system.moved import make_getattr

__getattr__ = make_getattr(__name__, "manifest", "fedge.data.task")
