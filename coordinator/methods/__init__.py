"""Methods: one paper, one file that reads like its pseudocode.

`method` is the base class, with its `settings`, `state`, `rounds`, last round (`installation`) and `promises`.
`catalogue` finds a method by name, `option_values` checks its own options, `options` reads them from the command line.
The rooms `papers` and `baselines` hold the methods, `parts` the parts that several methods share, `server` the learning
of the server itself. The service and simulations run methods. Begin with `baselines.fedavg`, then `method`.
"""

from fedge.system.moved import make_getattr

PUBLIC = (
    *("method", "settings", "state", "rounds", "installation", "catalogue", "option_values"),
    *("coordinator.methods.parts.averaging", "coordinator.methods.parts.server_optimizer"),
)
"""Modules whose names are the room's, too, for those who write a method."""
__getattr__ = make_getattr(__name__, *PUBLIC, warns=False)
