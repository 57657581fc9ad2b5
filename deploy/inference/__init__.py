"""Predictions with numpy and ONNX Runtime.

`runtime` loads a bundle and predicts, `engines` has the ways to run its graphs, and `sessions` opens the graphs. Begin
with `runtime`.
"""
