"""Device halves of the steps that train.

Their contracts are in `fedge.steps.training`; `frame` is around the learning of all. Begin with `frame`, then `train`.
"""
