"""Networks in torch, and their weights as vectors.

`build` makes a task's network, `network` turns it into a vector and back, `training` is SGD on that vector, and
`dp_sgd` its private form. `networks` has the built-in networks, `adapters` partly frozen ones. Tasks, agents and
exports use this package. Begin with `network`.
"""

from fedge.system.moved import make_getattr

__getattr__ = make_getattr(__name__, "network", "build")
