"""Whole federations in one process.

`interface` has `fedge.simulate`, `compare` and `tune`; `run` is one method on one seed, `compare` several; the room
`commands` has the commands, `reports` the results. Begin with `run`.
"""
