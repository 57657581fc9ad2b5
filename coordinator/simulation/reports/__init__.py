"""The results of runs and comparisons, and their pages.

`outcome` and `comparison` are the figures, `plots` and `report` show them. Begin with `outcome`.
"""
