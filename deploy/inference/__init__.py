"""Predictions with numpy and ONNX Runtime.

`runtime` loads a bundle and predicts, `engines` has the ways to run its graphs, and `budget` picks what a device can
afford. `networks` has the candidates in memory or on the disk, and `sessions` opens the graphs. Begin with `runtime`.
"""
