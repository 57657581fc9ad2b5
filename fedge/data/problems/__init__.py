"""Problems: what a network is asked, and how a mixture answers it (docs/methods/problems.md).

Begin with `problem`: the terms over which everything else is written once. Each other module is one kind of problem.
"""
