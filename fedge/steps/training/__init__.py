"""Steps that train a model on a device and send the update.

One file is one contract; the device half has the same name below `edge_agent.steps.training`. Methods order these steps
in each round. Begin with `train`.
"""
