"""What several methods are made of.

`cohort` trains whom a rule selects, `averaging` averages updates, `grouping` clusters devices, `server_optimizer`
moves a model, `asynchronous` does without rounds. Begin with `cohort`.
"""
