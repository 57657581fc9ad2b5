"""A model server: HTTP in the V2 protocol, sensors over MQTT, metrics.

`server` is the port, `protocol` reads and writes bodies, `endpoints` is a model under its name, `batching` the one
thread in which graphs run. `fedge serve` uses it. Begin with `server`.
"""

from fedge.system.moved import make_getattr

__getattr__ = make_getattr(__name__, "endpoints")
