"""Device halves of the steps that describe data or score models.

Their contracts are in `fedge.steps.descriptions`.
"""
