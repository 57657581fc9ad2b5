"""The results of runs and comparisons, and their pages.

`outcome` and `comparison` are the figures. `report` shows them on a page of `markup` and `plots`, `terminal` as text;
`words` puts settings and figures into words. Begin with `outcome`.
"""
