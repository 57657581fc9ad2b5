"""A bundle: what a device runs when it predicts.

`manifest` lists its parts; `formula` mixes the candidates, in numpy; `energies` and `calibration` are its numbers;
`graph_reader` reads graphs without onnx, and `runtime` is the only place that imports ONNX Runtime. `export` writes
bundles, `deploy` runs them. Begin with `manifest`.
"""

from fedge.system.moved import make_getattr

__getattr__ = make_getattr(__name__, "manifest", "fedge.data.task")
