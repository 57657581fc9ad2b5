"""The fleet of simulated devices: the agents' own workers, without a network.

`fleet` runs the workers in this process, `on_ray` in others. `memory` has their models and updates, `evidence` their
problems. `clock` and `devices` tell how long the work would take on real boards. Simulations and the demo use the
fleet. Begin with `fleet`.
"""

from fedge.system.moved import make_getattr

__getattr__ = make_getattr(__name__, "fleet")
