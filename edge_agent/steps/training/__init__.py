"""Device halves of the steps that train.

Their contracts are in `fedge.steps.training`; `edge_agent.learning.frame` is around the learning of all. Begin with
that frame, then `train`.
"""
