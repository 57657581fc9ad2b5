"""Steps: what a device can be asked to do.

`contract` defines actions and results; `training`, `mixture`, `masked` and `descriptions` hold one contract per module.
Methods write actions, agents carry them out: the device half of `fedge.steps.training.train` is
`edge_agent.steps.training.train`. Begin with `fedge.steps.training.train`.
"""
