"""Device halves of the steps that train.

Their contracts are in `fedge.steps.training`; `train` is the frame of all.
"""
