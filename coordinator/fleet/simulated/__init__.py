"""The fleet of simulated devices: the agents' own workers, without a network.

`fleet` runs them in this process, `on_ray` in others; `memory` has their models and updates, `evidence` what goes wrong
with them; `clock` and `devices` say how long that would take on real boards. Simulations and the demo use it. Begin
with `fleet`.
"""

from fedge.system.moved import make_getattr

__getattr__ = make_getattr(__name__, "fleet")
