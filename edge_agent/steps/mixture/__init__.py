"""Device halves of the steps that make a bundle.

Their contracts are in `fedge.steps.mixture`.
"""
