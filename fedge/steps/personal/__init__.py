"""Steps of the methods in `coordinator.methods.baselines.personal`: training that keeps something of the device's own.

One file is one contract; the device half has the same name below `edge_agent.steps.personal`. Begin with `train_apfl`.
"""
