"""Device halves of the steps of a masked sum.

Their contracts are in `fedge.steps.masked`.
"""
