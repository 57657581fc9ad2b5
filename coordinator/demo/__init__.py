"""The demonstration: a whole federation of real processes on this machine, compared with simpler ways to learn.

`run` is the demo, `processes` its child processes, `broker` their broker, `baselines` the simpler ways to learn, and
`cli` is `fedge demo`. Begin with `run`.
"""
