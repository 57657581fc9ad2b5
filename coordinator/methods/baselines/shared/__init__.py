"""Rivals whose devices share one model, or a few, and which change how FedAvg's devices or server move it.

FedAdam and FedYogi (`fedopt`), q-FedAvg, SCAFFOLD, FedDyn and IFCA, each by its paper. Begin with `scaffold`, whose
devices send and keep more than a model.
"""
