"""Commands of every machine, and the `fedge` command itself.

`cli` finds all commands by entry point; `new`, `doctor`, `broker` and `egress` belong to no role. Other code imports
from here only the local broker and the checks of a machine. Begin with `cli`.
"""
