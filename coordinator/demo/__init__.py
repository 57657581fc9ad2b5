"""The demonstration: a whole federation of real processes on this machine, compared with simpler ways to learn.

`run` is the demo, `processes` its child processes, `broker` what they talk over, `baselines` what they are compared
with, `cli` is `fedge demo`. Begin with `run`.
"""
