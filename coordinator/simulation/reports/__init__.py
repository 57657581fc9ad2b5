"""The results of runs and comparisons, and their pages.

`outcome` and `comparison` are the figures. `report` shows them on a page of `markup` and `plots`, `terminal` as text;
`words` says settings and figures. Begin with `outcome`.
"""
