"""Commands of every machine, and the `fedge` command itself.

`cli` finds all commands by entry point; `new`, `doctor`, `broker` and `egress` belong to no role. Nothing else in the
packages imports this room, but for the local broker and the needs of a machine. Begin with `cli`.
"""
