"""A model server: HTTP in the V2 protocol, sensors over MQTT, metrics.

`server` is the port, `protocol` reads and writes bodies, `endpoints` is a model under its name, `batching` the one
thread in which graphs run. `fedge serve` uses it. Begin with `server`.
"""

from fedge.system.moved import names_of

__getattr__ = names_of(__name__, "endpoints")
