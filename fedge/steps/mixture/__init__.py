"""Steps that make a device's bundle: candidates, weights, gate and installation.

One file is one contract; the device half has the same name below `edge_agent.steps.mixture`. Methods order these steps
at the end of a run. Begin with `install`.
"""
