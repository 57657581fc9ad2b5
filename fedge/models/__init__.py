"""Networks in torch, and their weights as vectors.

`build` makes a task's network, `network` turns it into a vector and back, `training` is SGD on that vector,
`dp_sgd` the private one; `networks` are the built-in ones, `adapters` frozen ones. Tasks, agents and exports use it.
Begin with `network`.
"""

from fedge.system.moved import make_getattr

__getattr__ = make_getattr(__name__, "network", "build")
