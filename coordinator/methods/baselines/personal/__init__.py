"""Methods after FedPer and Ditto whose devices end with a model of their own.

One file is one method; `coordinator.methods.baselines` has the older ones. Begin with `fedbabu`.
"""
