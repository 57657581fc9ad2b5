"""Device halves of the steps whose contracts are in `fedge.steps.personal`.

`edge_agent.learning.frame` is around the learning of all. Begin with `train_apfl`.
"""
